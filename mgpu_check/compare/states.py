"""Record, in the script's process, the state of optimizers and the buffers, which training changes besides parameters.

A state with the shape of its parameter has the placement of its parameter. A state that is flat over all parameters is
one state of each parameter. A statistic over some dimensions of a parameter is placed in the other dimensions. A single
number, such as a step count, is not divided, and all ranks must agree on it.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mgpu_check.compare.factored import entries, flat_parts, statistic
from mgpu_check.compare.naming import Names
from mgpu_check.compare.parameters import NumberedPart, Parameters, parameters_of
from mgpu_check.compare.placing import TracePart
from mgpu_check.compare.summaries import Cut, Numbers, over, shape_of, summaries, whole
from mgpu_check.compare.trace import Writer, named_state
from mgpu_check.compare.wholes import write_buffer, write_shape
from mgpu_check.torch_hooks.nested import named_modules
from mgpu_check.torch_hooks.tensors import copied, is_distributed, name_of, readable


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
