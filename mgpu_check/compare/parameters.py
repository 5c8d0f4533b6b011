"""Record, in the script's process, what training changes: the parameters of its optimizers, states and buffers.

Parameters have numbers in the trace, and groups. A state with the shape of its parameter has the placement of its
parameter. A state that is flat over all parameters is one state of each parameter: optimizers of one flat vector, such
as LBFGS, keep states of all parameters in one tensor. A statistic over some dimensions of a parameter, as of factored
optimizers such as Adafactor, is placed in the other dimensions. A single number, such as a step count, is not divided,
and all ranks must agree on it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mgpu_check.compare.models import Names
from mgpu_check.compare.placements import Placing, TracePart, write_buffer, write_shape
from mgpu_check.compare.summaries import Cut, Numbers, over, shape_of, summaries, whole
from mgpu_check.compare.trace import Writer, named_state
from mgpu_check.numerics.placement import Slice, indexed
from mgpu_check.torch_hooks.nested import named_modules
from mgpu_check.torch_hooks.tensors import copied, is_distributed, name_of, readable


class NumberedPart(NamedTuple):
    """A part of a parameter, with its number in the trace."""

    number: int
    parameter: torch.Tensor
    part: TracePart


def numbers_of(parts: Sequence[NumberedPart]) -> dict[int, Numbers]:
    """Return the summary of each part that has numbers, by its number in the trace."""
    found = summaries([one.parameter for one in parts], [one.part.cut for one in parts])
    return {one.number: numbers for one, numbers in zip(parts, found, strict=True) if numbers is not None}


class Parameters:
    """The known parameters, each recorded in the trace on first use."""

    def __init__(self, writer: Writer, names: Names) -> None:
        self.placing = Placing(names, None)
        self._writer, self._names = writer, names
        self._number = 0
        self._parts: dict[int, list[NumberedPart]] = {}  # by the id of a parameter
        self._held: list[torch.Tensor] = []  # keeps objects alive whose ids are keys
        self._groups: dict[int, list[dict[str, Any]]] = {}
        self._unread: set[str] = set()

    def parts(self, optimizer: Any, number: int) -> list[NumberedPart]:
        """Return the parts of an optimizer's parameters.

        Args:
            number: the number of the optimizer.
        """
        fresh: dict[int, tuple[torch.Tensor, str]] = {}
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                if id(parameter) not in self._parts:
                    fresh[id(parameter)] = parameter, f"optimizer{number}.group{g}.parameter{p}"
        if fresh:
            self._names.look_around()
        for (parameter, _), parts in zip(fresh.values(), self.placing.parts(list(fresh.values())), strict=True):
            self._held.append(parameter)
            self._parts[id(parameter)] = [self._numbered(parameter, part) for part in parts]
        if fresh:
            self._names.look_around()  # releases the references to all modules
        return [one for parameter in parameters_of(optimizer) for one in self._parts[id(parameter)]]

    def _numbered(self, parameter: torch.Tensor, part: TracePart) -> NumberedPart:
        self._writer.write(
            "parameter",
            name=part.label,
            order=part.order,
            shape=part.shape,
            dtype=name_of(parameter.dtype),
            device=str(parameter.device),
            sharded=is_distributed(parameter),
            held=None if part.cut is None or part.cut.is_whole else dataclasses.asdict(part.cut.held),
            unplaced=part.unplaced,
            same_elsewhere=part.same_elsewhere,
            over=over(parameter),
        )
        if readable(parameter) is None:
            self.note_unread(part.label, "", parameter)
        self._number += 1
        return NumberedPart(self._number - 1, parameter, part)

    def note_unread(self, name: str, of: str, value: object) -> None:
        """Record a tensor or state whose values cannot be read.

        Args:
            of: the parameter that has the state; "" for a parameter or a gradient.
        """
        if name not in self._unread:
            self._unread.add(name)
            self._writer.write("unread", after=0, name=name, of=of, type=type(value).__name__)

    def note_groups(self, optimizer: Any, number: int) -> None:
        """Record learning rates and other options of each group, if any has changed since the last step."""
        groups = [
            {
                "options": {key: _plain(value) for key, value in group.items() if _is_plain(key, value)},
                "members": [one.number for parameter in group["params"] for one in self._parts[id(parameter)]],
            }
            for group in optimizer.param_groups
        ]
        if self._groups.get(number) != groups:
            self._groups[number] = groups
            self._writer.write("groups", optimizer=number, rule=type(optimizer).__name__, groups=groups)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_OF_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable", "params", "initial_lr")
"""Options that choose an implementation, or that no step reads."""


def _is_plain(key: str, value: object) -> bool:
    numbers = value if isinstance(value, (tuple, list)) else [value]
    kinds = bool, int, float, str, type(None)
    return key not in _OF_IMPLEMENTATIONS and all(
        isinstance(one, kinds) or (isinstance(one, torch.Tensor) and one.numel() == 1) for one in numbers
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def entries(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each value of an optimizer's state with its name.

    A value in a list or a dict has a name like "old_dirs[0]".
    """
    for key, value in state.items():
        yield from _within(str(key), value)


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _within(f"{name}[{index}]", part)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _within(f"{name}[{key}]", part)
    else:
        yield name, value


def flat_parts(value: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the part of each parameter in a state that is flat over all of them; None for any other state.

    Args:
        parameters: all parameters of the optimizer.
    """
    if value.dim() != 1 or is_distributed(value) or any(map(is_distributed, parameters)):
        return None
    counts = [parameter.numel() for parameter in parameters]
    if sum(counts) != value.numel():
        return None
    return [part.view(p.shape) for part, p in zip(value.split(counts), parameters, strict=True)]


def statistic(value: torch.Tensor, local: torch.Size, part: Slice, shape: Sequence[int]) -> Cut | None:
    """Return the elements of a whole statistic that a rank has; None if it is unclear which dimensions were reduced.

    The statistic may cover only a part of the reduced dimensions: that of the rank's slice.

    Args:
        local: shape of the parameter on this rank, which is the slice `part` of the whole parameter.
        shape: shape of the statistic on one device.
    """
    found = set(_reductions(local, value.shape)) & set(_reductions(part.shape, shape))
    indices = _indices(local, part)
    if len(found) != 1 or indices is None:
        return None
    ((reduced, _),) = found
    kept = [size for dim, size in enumerate(part.shape) if dim not in reduced]
    chosen = [own for dim, own in enumerate(indices) if dim not in reduced]
    at = indexed(kept, torch.meshgrid(*chosen, indexing="ij")) if kept else torch.zeros(1, dtype=torch.int64)
    cut = Cut(Slice(part.whole, tuple(shape), at))
    divided = {dim: Slice("", part.shape[dim : dim + 1], indices[dim]) for dim in sorted(reduced)}
    divided = {dim: some for dim, some in divided.items() if not bool(some.mask.all())}
    covers = ", ".join(str(some).replace("dim 0", f"dim {dim}") for dim, some in divided.items())
    share = math.prod(len(indices[dim]) / part.shape[dim] for dim in divided)
    cut.held = replace(cut.held, covers=covers, share=share)
    return cut


def _reductions(whole: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[frozenset[int], bool]]:
    """Yield the dimensions whose reduction gives a shape, and whether they stay as dimensions of size 1."""
    for count in range(1, len(whole) + 1):
        for some in itertools.combinations(range(len(whole)), count):
            if [1 if dim in some else size for dim, size in enumerate(whole)] == list(shape):
                yield frozenset(some), True
            if [size for dim, size in enumerate(whole) if dim not in some] == list(shape):
                yield frozenset(some), False


def _indices(local: torch.Size, part: Slice) -> list[torch.Tensor] | None:
    """Return the indices of a slice along each dimension of the whole; None if it is not a block of them."""
    at = part.at
    if at is None or part.within is not None or len(local) != len(part.shape) or at.numel() != local.numel():
        return None
    rest, found = at.view(local), []
    for dim, size in enumerate(part.shape):
        stride = math.prod(part.shape[dim + 1 :])
        index = (rest // stride) % size
        own = index.movedim(dim, 0).reshape(local[dim], -1)
        if not own.numel() or not torch.equal(own, own[:, :1].expand_as(own)):
            return None
        found.append(own[:, 0])
    return found


class States:
    """The known states and buffers, each recorded in the trace when first seen.

    Args:
        keep: returns the file descriptor that receives initial buffers; None: they are not stored.
    """

    def __init__(self, writer: Writer, names: Names, known: Parameters, keep: Callable[[], int | None]) -> None:
        self._writer, self._names, self._known, self._keep = writer, names, known, keep
        self.shapes: Mapping[str, Sequence[int]] = MappingProxyType({})  # of states on one device, if known
        self._number = 0
        self._entries: dict[object, tuple[int, Cut | None] | None] = {}
        self._seen = WeakIdKeyDictionary()
        self._buffers: list[tuple[weakref.ref[nn.Module], str, torch.Tensor]] = []
        self._versions: dict[int, tuple[int, int | None]] = {}

    def begin(self, model: nn.Module) -> None:
        """Copy the buffers of a model before its first call."""
        if model in self._seen:
            return
        for _, module in named_modules(model):
            if module in self._seen:
                continue
            self._seen[module] = True
            # Non-persistent buffers are left out: they are caches, or counts of this rank.
            for key in sorted(module._buffers.keys() - module._non_persistent_buffers_set):
                value = module._buffers[key]
                first = None if value is None else whole(value)
                if first is not None:
                    self._buffers.append((weakref.ref(module), key, copied(first)))

    def after(self, optimizers: Sequence[Any], parts: Iterable[NumberedPart], called: Any) -> dict[int, Numbers]:
        """Return the numbers of each state and buffer after a step.

        Args:
            optimizers: the optimizer of the step, and its inner optimizers.
            called: the modules called so far.
        """
        found = [*self._of_optimizers(optimizers, parts), *self._of_buffers(called)]
        numbers = summaries([value for _, _, value in found], [cut for _, cut, _ in found])
        return {number: own for (number, _, _), own in zip(found, numbers, strict=True) if own is not None}

    def _of_optimizers(
        self, optimizers: Sequence[Any], parts: Iterable[NumberedPart]
    ) -> Iterator[tuple[int, Cut | None, torch.Tensor]]:
        of: dict[int, list[NumberedPart]] = {}
        for one in parts:
            of.setdefault(id(one.parameter), []).append(one)
        for own in of.values():
            parameter = own[0].parameter
            states = [(optimizer, getattr(optimizer, "state", None)) for optimizer in optimizers]
            kept = [(optimizer, state.get(parameter)) for optimizer, state in states if isinstance(state, Mapping)]
            held = ((optimizer, state) for optimizer, state in kept if isinstance(state, Mapping) and state)
            optimizer, state = next(held, (None, MappingProxyType({})))
            for key, value in entries(state):
                read = _as_tensor(value)
                if read is None:
                    if value is not None:
                        label = own[0].part.label
                        self._known.note_unread(named_state(key, label), label, value)
                    continue
                together = parameters_of(optimizer)
                flat = None if read.shape == parameter.shape else flat_parts(read, together)
                pairs = [(parameter, read)] if flat is None else zip(together, flat, strict=True)
                for owner, some in pairs:
                    yield from self._of(of.get(id(owner), ()), key, some)

    def _of(
        self, parts: Iterable[NumberedPart], key: str, value: torch.Tensor
    ) -> Iterator[tuple[int, Cut | None, torch.Tensor]]:
        for one in parts:
            if (one.number, key) not in self._entries:
                self._entries[one.number, key] = self._state(one, key, value)
            entry = self._entries[one.number, key]
            if entry is not None:
                yield (*entry, value)

    def _state(self, one: NumberedPart, key: str, value: torch.Tensor) -> tuple[int, Cut | None]:
        part = one.part
        known = None if part.cut is None else self.shapes.get(named_state(key, part.cut.held.whole))
        like = value.shape == one.parameter.shape and known in (None, part.shape)
        shape, cut, unplaced = (part.shape, part.cut, part.unplaced) if like else (shape_of(value), None, "")
        if not like and value.numel() == 1 and (known is None or math.prod(known) == 1):
            shape = []  # such as the number of steps
        elif not like and part.cut is not None and known is not None:
            cut = statistic(value, one.parameter.shape, part.cut.part, known)
            shape = shape if cut is None else cut.shape
        if not like and shape and cut is None and (part.cut is not None or part.unplaced):
            unplaced = f"its shape {list(value.shape)} is not that of the slice that the rank trains"
        return self._note(part.label, key, TracePart("", part.order, shape, cut, unplaced), value)

    def _note(
        self, of: str, key: str, part: TracePart, value: torch.Tensor, start: Numbers | None = None
    ) -> tuple[int, Cut | None]:
        held = None if part.cut is None or (part.cut.is_whole and not part.cut.held.covers) else part.cut.held
        if key and (keep := self._keep()) is not None:
            write_shape(keep, named_state(key, of), part.shape)
        self._writer.write(
            "state",
            name=named_state(key, of),
            of=of,
            key=key,
            order=part.order,
            shape=part.shape,
            dtype=name_of(value.dtype),
            device=str(value.device),
            sharded=is_distributed(value),
            held=None if held is None else dataclasses.asdict(held) | {"whole": named_state(key, held.whole)},
            unplaced=part.unplaced,
            same_elsewhere=part.same_elsewhere,
            over=over(value),
            start=start,
        )
        self._number += 1
        return self._number - 1, part.cut

    def _of_buffers(self, called: Any) -> Iterator[tuple[int, Cut | None, torch.Tensor]]:
        """Yield the buffers of called modules that may have changed since the last step."""
        fresh = False
        for index, (reference, key, first) in enumerate(self._buffers):
            module = reference()
            value = None if module is None else module._buffers.get(key)
            now = None if value is None else readable(value)
            if module is None or now is None or module not in called:
                continue
            if index not in self._entries:
                self._entries[index] = self._buffer(module, key, first, now)
                fresh = True
            entry = self._entries[index]
            if entry is None:
                continue
            version = id(value), None if now.is_inference() else now._version
            if self._versions.get(index) != version or version[1] is None or is_distributed(now):
                self._versions[index] = version
                yield (*entry, _widened(now))
        if fresh:
            self._names.look_around()

    def _buffer(
        self, module: nn.Module, key: str, first: torch.Tensor, value: torch.Tensor
    ) -> tuple[int, Cut | None] | None:
        named = self._names.of_key(module, key)
        if named is None:
            return None
        if (keep := self._keep()) is not None:
            write_buffer(keep, named[0], first)
        part = self._known.placing.buffer(*named, first)
        (start,) = summaries([_widened(first)], [part.cut])
        return self._note(named[0], "", part, value, start)


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a state as a tensor; None if it is neither a readable tensor nor a number."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    read = readable(value) if isinstance(value, torch.Tensor) else None
    return None if read is None else _widened(read)


def _widened(value: torch.Tensor) -> torch.Tensor:
    """Convert integers and 8-bit floating-point numbers to float64, so that they can be summed."""
    small = value.is_floating_point() and value.element_size() == 1
    return value.double() if small or not (value.is_floating_point() or value.is_complex()) else value
