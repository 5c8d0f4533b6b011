"""Follow the data that a script computes with, operator by operator, from where they enter to the loss.

Data are *known* if one device and the ranks have the same: parameters and buffers, batches and tensors that a replay
has joined, and results of operators on these alone. All other data come from *outside*, however the script got them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mgpu_check.simulated.tensor import tensors_in

_CONSTANT = (
    *("aten::arange", "aten::eye", "aten::zeros", "aten::ones", "aten::new_zeros", "aten::new_ones"),
    *("aten::zeros_like", "aten::ones_like"),
)
"""Operators whose results depend on sizes alone, if they get no other numbers."""
_FORM = ("dim", "dim0", "dim1", "start_dim", "end_dim", "chunks", "split_size", "reduction")
"""Numbers that say how an operator treats dimensions. Others may be data."""


class Origin(enum.Enum):
    """The origin of the data in a storage."""

    KNOWN = enum.auto()
    CONSTANT = enum.auto()
    OUTSIDE = enum.auto()


class OperatorSchema(NamedTuple):
    """The parts of an operator's schema that are used.

    Attributes:
        arguments: the names of the arguments.
        written: positions of the arguments that it changes in place.
        overwrites: it replaces all of their elements.
        constant: its results depend on sizes alone, if it gets no other numbers.
    """

    name: str
    arguments: Sequence[str]
    written: Sequence[int]
    overwrites: bool
    constant: bool

    def changed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among the arguments that it changes in place."""
        values = [args[i] if i < len(args) else kwargs.get(self.arguments[i]) for i in self.written]
        return list(tensors_in(values))

    def numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the numbers among the arguments that may be data."""
        numbers = [
            value
            for i, value in enumerate(args)
            if (type(value) is int or type(value) is float) and self.arguments[i] not in _FORM
        ]
        if kwargs:
            numbers += [value for name, value in kwargs.items() if type(value) in (int, float) and name not in _FORM]
        return tuple(numbers)

    def indexed(self, args: Sequence[Any]) -> dict[int, int]:
        """Return the `id` of each tensor that has positions along a dimension of the first one -> its size there."""
        if self.name.startswith("aten::index_put") or self.name == "aten::index":
            return {id(part): args[0].shape[i] for i, part in enumerate(args[1]) if part is not None and _counts(part)}
        if self.arguments[:3] == ("self", "dim", "index") and isinstance(args[2], torch.Tensor) and args[0].dim():
            return {id(args[2]): args[0].shape[args[1]]}
        return {}


@functools.cache
def schema_of(func: Any) -> OperatorSchema:
    """Return the parts of an operator's schema."""
    arguments = func._schema.arguments
    name = func._schema.name
    collective = name.startswith("c10d::")  # their schemas do not say what they change
    written = [
        i
        for i, one in enumerate(arguments)
        if (one.alias_info is not None and one.alias_info.is_write) or (collective and one.name.startswith("output"))
    ]
    overwrites = collective or name == "aten::copy_"
    return OperatorSchema(name, tuple(one.name for one in arguments), written, overwrites, name in _CONSTANT)


def _counts(index: torch.Tensor) -> bool:
    return index.dtype != torch.bool


class Origins:
    """The origins of storages. Data without an origin come from outside."""

    def __init__(self) -> None:
        # A weak reference keeps the address of its storage from being used again.
        self._known: dict[int, tuple[StorageWeakRef, Origin]] = {}

    def of(self, tensor: torch.Tensor) -> Origin | None:
        """Return the origin of a tensor. Parameters and results of operators with gradients are known."""
        if tensor.grad_fn is not None:
            return Origin.KNOWN
        origin = self.of_storage(tensor)
        if origin is None and tensor.requires_grad and isinstance(tensor, torch.nn.Parameter):
            return Origin.KNOWN
        return origin

    def of_storage(self, tensor: torch.Tensor) -> Origin | None:
        """Return the origin of the tensor's storage, whether it has gradients or not."""
        try:
            found = self._known.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # of a sparse tensor
            return None
        return None if found is None else found[1]

    def set(self, tensors: Iterable[torch.Tensor], origin: Origin | None = Origin.KNOWN) -> None:
        """Set the origin of the storages of tensors."""
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            if origin is None:
                self._known.pop(storage._cdata, None)
            else:
                self._known[storage._cdata] = StorageWeakRef(storage), origin

    def drop_ended(self) -> None:
        """Forget the storages that no tensor has any more."""
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}

    @contextlib.contextmanager
    def known(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the storages of tensors be known for a while."""
        before = [(tensor, self.of_storage(tensor)) for tensor in tensors]
        self.set(tensors)
        try:
            yield
        finally:
            for tensor, origin in before:
                self.set([tensor], origin)
