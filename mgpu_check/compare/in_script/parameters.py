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

from mgpu_check.compare.in_script.models import Names
from mgpu_check.compare.in_script.placements import Placing, TracePart, write_shape, write_tensor
from mgpu_check.compare.in_script.summaries import Cut, Numbers, over, shape_of, summaries, whole
from mgpu_check.compare.trace import Writer, named_state
from mgpu_check.numerics.placement import Slice, indexed
from mgpu_check.torch_hooks.nested import named_modules
from mgpu_check.torch_hooks.tensors import copied, is_distributed, name_of, readable


class NumberedPart(NamedTuple):
    """A part of a parameter, with its number in the trace."""

    number: int
    parameter: torch.Tensor
    part: TracePart


def _described(name: str, piece: TracePart, value: torch.Tensor, held: object) -> dict[str, object]:
    return {
        "name": name,
        "order": piece.order,
        "shape": piece.shape,
        "dtype": name_of(value.dtype),
        "device": str(value.device),
        "sharded": is_distributed(value),
        "held": held,
        "unplaced": piece.unplaced,
        "same_elsewhere": piece.same_elsewhere,
        "over": over(value),
    }


def numbers_of(pieces: Sequence[NumberedPart]) -> dict[int, Numbers]:
    """Return the summary of each part that has numbers, by its number in the trace."""
    summarized = summaries([piece.parameter for piece in pieces], [piece.part.cut for piece in pieces])
    return {piece.number: numbers for piece, numbers in zip(pieces, summarized, strict=True) if numbers is not None}


class Parameters:
    """The known parameters, each recorded in the trace on first use.
    `ScriptRecorder` makes it once, and asks it for the parts of an optimizer's parameters at each step. It keeps the
    parameters alive, because their ids are its keys."""

    def __init__(self, writer: Writer, parameter_names: Names) -> None:
        self.placing = Placing(parameter_names, None)
        self._writer, self._names = writer, parameter_names
        self._number = 0
        self._parts: dict[int, list[NumberedPart]] = {}  # by the id of a parameter
        self._held: list[torch.Tensor] = []  # keeps objects alive whose ids are keys
        self._groups: dict[int, list[dict[str, Any]]] = {}
        self._unread: set[str] = set()

    def parts(self, optimizer: Any, number: int) -> list[NumberedPart]:
        """Return the parts of an optimizer's parameters. `number`: the number of the optimizer."""
        fresh: dict[int, tuple[torch.Tensor, str]] = {}
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                if id(parameter) not in self._parts:
                    fresh[id(parameter)] = parameter, f"optimizer{number}.group{g}.parameter{p}"
        if fresh:
            self._names.look_around()
            for (parameter, _), pieces in zip(fresh.values(), self.placing.parts(list(fresh.values())), strict=True):
                self._held.append(parameter)
                self._parts[id(parameter)] = [self._numbered(parameter, piece) for piece in pieces]
            self._names.look_around()  # releases the references to all modules
        return [numbered for parameter in parameters_of(optimizer) for numbered in self._parts[id(parameter)]]

    def _numbered(self, parameter: torch.Tensor, piece: TracePart) -> NumberedPart:
        held = None if piece.cut is None or piece.cut.is_whole else dataclasses.asdict(piece.cut.held)
        self._writer.write("parameter", **_described(piece.label, piece, parameter, held))
        if readable(parameter) is None:
            self.note_unread(piece.label, "", parameter)
        self._number += 1
        return NumberedPart(self._number - 1, parameter, piece)

    def note_unread(self, name: str, owner: str, value: object) -> None:
        """Record a tensor or state whose values cannot be read.
        `owner`: the parameter that has the state; "" for a parameter or a gradient."""
        if name not in self._unread:
            self._unread.add(name)
            self._writer.write("unread", after=0, name=name, of=owner, type=type(value).__name__)

    def note_groups(self, optimizer: Any, number: int) -> None:
        """Record learning rates and other options of each group, if any has changed since the last step."""
        groups = [
            {
                "options": {k: _plain(v) for k, v in group.items() if k not in _OF_IMPLEMENTATIONS and _is_plain(v)},
                "members": [piece.number for parameter in group["params"] for piece in self._parts[id(parameter)]],
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


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def _is_plain(value: Any) -> bool:
    kinds = bool, int, float, str, type(None)
    numbers = value if isinstance(value, (tuple, list)) else [value]
    return all(isinstance(n, kinds) or (isinstance(n, torch.Tensor) and n.numel() == 1) for n in numbers)


def entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of an optimizer's state with its name: "old_dirs[0]" for a value in a list or a dict."""
    if isinstance(value, (list, tuple, Mapping)):
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from entries(entry, f"{name}[{key}]" if name else str(key))
    else:
        yield name, value


def flat_parts(value: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the part of each parameter in a state that is flat over all of them; None for any other state.
    `parameters`: all parameters of the optimizer."""
    if value.dim() != 1 or is_distributed(value) or any(map(is_distributed, parameters)):
        return None
    counts = [parameter.numel() for parameter in parameters]
    if sum(counts) != value.numel():
        return None
    return [chunk.view(p.shape) for chunk, p in zip(value.split(counts), parameters, strict=True)]


def statistic(value: torch.Tensor, local: torch.Size, slice_: Slice, shape: Sequence[int]) -> Cut | None:
    """Return the elements of a whole statistic that a rank has; None if it is unclear which dimensions were reduced.

    The statistic may cover only a part of the reduced dimensions: that of the rank's slice.

    `local`: shape of the parameter on this rank, which is the slice `slice_` of the whole parameter. `shape`: shape of
    the statistic on one device.
    """
    reductions = set(_reductions(local, value.shape)) & set(_reductions(slice_.shape, shape))
    indices = _indices(local, slice_)
    if len(reductions) != 1 or indices is None:
        return None
    ((reduced, _),) = reductions
    kept = [size for dim, size in enumerate(slice_.shape) if dim not in reduced]
    chosen = [own for dim, own in enumerate(indices) if dim not in reduced]
    at = indexed(kept, torch.meshgrid(*chosen, indexing="ij")) if kept else torch.zeros(1, dtype=torch.int64)
    cut = Cut(Slice(slice_.whole, tuple(shape), at))
    covers, share = [], 1.0
    for dim in sorted(reduced):
        along = Slice("", slice_.shape[dim : dim + 1], indices[dim])
        if not bool(along.mask.all()):
            covers.append(str(along).replace("dim 0", f"dim {dim}"))
            share *= len(indices[dim]) / slice_.shape[dim]
    cut.held = replace(cut.held, covers=", ".join(covers), share=share)
    return cut


def _reductions(full_shape: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[frozenset[int], bool]]:
    """Yield the dimensions whose reduction gives a shape, and whether they stay as dimensions of size 1."""
    for count in range(1, len(full_shape) + 1):
        for reduced in itertools.combinations(range(len(full_shape)), count):
            if [1 if dim in reduced else size for dim, size in enumerate(full_shape)] == list(shape):
                yield frozenset(reduced), True
            if [size for dim, size in enumerate(full_shape) if dim not in reduced] == list(shape):
                yield frozenset(reduced), False


def _indices(local: torch.Size, slice_: Slice) -> list[torch.Tensor] | None:
    """Return the indices of a slice along each dimension of the whole; None if it is not a block of them."""
    at = slice_.at
    if at is None or slice_.within is not None or len(local) != len(slice_.shape) or at.numel() != local.numel():
        return None
    rest, indices = at.view(local), []
    for dim, size in enumerate(slice_.shape):
        stride = math.prod(slice_.shape[dim + 1 :])
        index = (rest // stride) % size
        own = index.movedim(dim, 0).reshape(local[dim], -1)
        if not own.numel() or not torch.equal(own, own[:, :1].expand_as(own)):
            return None
        indices.append(own[:, 0])
    return indices


_Entry = tuple[int, Cut | None]  # the number of a state or buffer, and its slice
_Changed = tuple[int, Cut | None, torch.Tensor]


class States:
    """The known states and buffers, each recorded in the trace when first seen.

    `ScriptRecorder` makes it once, calls `begin` before a model's first call, and `after` at the end of each step.

    `keep`: returns the file descriptor that receives initial buffers; None: they are not stored.
    """

    def __init__(
        self, writer: Writer, parameter_names: Names, parameters: Parameters, keep: Callable[[], int | None]
    ) -> None:
        self._writer, self._names, self._known, self._keep = writer, parameter_names, parameters, keep
        self.shapes: Mapping[str, Sequence[int]] = MappingProxyType({})  # of states on one device, if known
        self._number = 0
        self._entries: dict[object, _Entry | None] = {}
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
                initial = None if value is None else whole(value)
                if initial is not None:
                    self._buffers.append((weakref.ref(module), key, copied(initial)))

    def after(self, optimizers: Sequence[Any], pieces: Iterable[NumberedPart], called: Any) -> dict[int, Numbers]:
        """Return the numbers of each state and buffer after a step.
        `optimizers`: the optimizer of the step, and its inner optimizers. `called`: the modules called so far."""
        entries = [*self._of_optimizers(optimizers, pieces), *self._of_buffers(called)]
        numbers = summaries([value for _, _, value in entries], [cut for _, cut, _ in entries])
        return {number: own for (number, _, _), own in zip(entries, numbers, strict=True) if own is not None}

    def _of_optimizers(self, optimizers: Sequence[Any], pieces: Iterable[NumberedPart]) -> Iterator[_Changed]:
        pieces_of: dict[int, list[NumberedPart]] = {}
        for piece in pieces:
            pieces_of.setdefault(id(piece.parameter), []).append(piece)
        for own in pieces_of.values():
            parameter, label = own[0].parameter, own[0].part.label
            states = [(optimizer, getattr(optimizer, "state", None)) for optimizer in optimizers]
            kept = [(optimizer, state.get(parameter)) for optimizer, state in states if isinstance(state, Mapping)]
            nonempty = ((optimizer, state) for optimizer, state in kept if isinstance(state, Mapping) and state)
            optimizer, state = next(nonempty, (None, MappingProxyType({})))
            for key, value in entries(state):
                read = _as_tensor(value)
                if read is None:
                    if value is not None:
                        self._known.note_unread(named_state(key, label), label, value)
                    continue
                together = parameters_of(optimizer)
                flat = None if read.shape == parameter.shape else flat_parts(read, together)
                for owner, state_value in [(parameter, read)] if flat is None else zip(together, flat, strict=True):
                    yield from self._of(pieces_of.get(id(owner), ()), key, state_value)

    def _of(self, pieces: Iterable[NumberedPart], key: str, value: torch.Tensor) -> Iterator[_Changed]:
        for numbered in pieces:
            if (numbered.number, key) not in self._entries:
                self._entries[numbered.number, key] = self._state(numbered, key, value)
            entry = self._entries[numbered.number, key]
            if entry is not None:
                yield (*entry, value)

    def _state(self, numbered: NumberedPart, key: str, value: torch.Tensor) -> _Entry:
        piece = numbered.part
        reference_shape = None if piece.cut is None else self.shapes.get(named_state(key, piece.cut.held.whole))
        like = value.shape == numbered.parameter.shape and reference_shape in (None, piece.shape)
        shape, cut, unplaced = (piece.shape, piece.cut, piece.unplaced) if like else (shape_of(value), None, None)
        if not like and value.numel() == 1 and (reference_shape is None or math.prod(reference_shape) == 1):
            shape = []  # such as the number of steps
        elif not like and piece.cut is not None and reference_shape is not None:
            cut = statistic(value, numbered.parameter.shape, piece.cut.part, reference_shape)
            shape = shape if cut is None else cut.shape
        if not like and shape and cut is None and (piece.cut is not None or piece.unplaced):
            unplaced = f"its shape {list(value.shape)} is not that of the slice that the rank trains"
        return self._note(piece.label, key, TracePart("", piece.order, shape, cut, unplaced), value)

    def _note(
        self, owner: str, key: str, piece: TracePart, value: torch.Tensor, start: Numbers | None = None
    ) -> _Entry:
        name, held = named_state(key, owner), None
        if piece.cut is not None and (not piece.cut.is_whole or piece.cut.held.covers):
            held = dataclasses.asdict(piece.cut.held) | {"whole": named_state(key, piece.cut.held.whole)}
        if key and (keep := self._keep()) is not None:
            write_shape(keep, name, piece.shape)
        self._writer.write("state", of=owner, key=key, start=start, **_described(name, piece, value, held))
        self._number += 1
        return self._number - 1, piece.cut

    def _of_buffers(self, called: Any) -> Iterator[_Changed]:
        """Yield the buffers of called modules that may have changed since the last step."""
        fresh = False
        for index, (reference, key, initial) in enumerate(self._buffers):
            module = reference()
            value = None if module is None else module._buffers.get(key)
            now = None if value is None else readable(value)
            if module is None or now is None or module not in called:
                continue
            if index not in self._entries:
                self._entries[index] = self._buffer(module, key, initial, now)
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

    def _buffer(self, module: nn.Module, key: str, initial: torch.Tensor, value: torch.Tensor) -> _Entry | None:
        named = self._names.of_key(module, key)
        if named is None:
            return None
        if (keep := self._keep()) is not None:
            write_tensor(keep, "buffer", named[0], initial)
        piece = self._known.placing.buffer(*named, initial)
        (start,) = summaries([_widened(initial)], [piece.cut])
        return self._note(named[0], "", piece, value, start)


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a state as a tensor that can be summed; None if it is neither a readable tensor nor a number.
    Integers and 8-bit floating-point numbers become float64."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    read = readable(value) if isinstance(value, torch.Tensor) else None
    return None if read is None else _widened(read)


def _widened(value: torch.Tensor) -> torch.Tensor:
    small = value.is_floating_point() and value.element_size() == 1
    return value.double() if small or not (value.is_floating_point() or value.is_complex()) else value
