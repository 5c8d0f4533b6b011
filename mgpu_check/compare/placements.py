"""Find, in the script's process, the slices of one device's tensors that its parameters hold.

FullyShardedDataParallel (FSDP1) declares the slices in its flat parameters. Other slices are found by their values
before the first step, in a file from the run on one device, which has the initial parameters and buffers: for each
tensor a line of JSON, followed by the elements. States of optimizers have no elements there: ranks need only their
shapes.

The slices that a rank holds are stored in a file, for the same rank in another run: for each slice a line of JSON,
followed by the positions of the elements.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from mgpu_check.compare.models import Names
from mgpu_check.compare.summaries import Cut, shape_of
from mgpu_check.compare.trace import named_state, write_all
from mgpu_check.numerics.placement import (
    Coordinates,
    Slice,
    Unplaced,
    Wholes,
    along_axes,
    beside,
    by_attributes,
    flat_ranges,
    local_ranges,
)
from mgpu_check.torch_hooks.tensors import copied, is_distributed, memory_of, name_of


class Files(NamedTuple):
    """File descriptors of a run; None for files that it neither reads nor writes.

    Attributes:
        keep: receives the initial parameters and buffers of this run.
        wholes: has the initial parameters and buffers of another run, to find slices in.
        found: receives the slices that this run places.
        placed: has the slices that another run placed.
        tape: receives what this rank was given; see `mgpu_check.compare.replay`.
        replay: has what all ranks were given, for one device.
        kept: receives what a trace file has besides the trace; see `mgpu_check.compare.traces.attachments`.
    """

    keep: int | None = None
    wholes: int | None = None
    found: int | None = None
    placed: int | None = None
    tape: int | None = None
    replay: int | None = None
    kept: int | None = None


def write_placement(fd: int, label: str, parts: Sequence[Slice]) -> None:
    """Append the slices of a tensor to the file."""
    for part in parts:
        count = None if part.at is None else len(part.at)
        head = {"label": label, "whole": part.whole, "shape": part.shape, "within": part.within, "count": count}
        at = b"" if part.at is None or not count else bytes(memory_of(part.at.to(torch.int64).contiguous()))
        write_all(fd, json.dumps(head).encode() + b"\n", at)


def read_placements(fd: int) -> dict[str, list[Slice]]:
    """Return the slices of each tensor, by its name on this rank."""
    size = os.fstat(fd).st_size
    data, start = os.pread(fd, size, 0), 0
    found: dict[str, list[Slice]] = defaultdict(list)
    while start < size:
        end = data.index(b"\n", start)
        head, start = json.loads(data[start:end]), end + 1
        at = None
        if head["count"] is not None:
            stop = start + 8 * head["count"]
            own = bytearray(data[start:stop])
            at = torch.frombuffer(own, dtype=torch.int64) if own else torch.empty(0, dtype=torch.int64)
            start = stop
        within = None if head["within"] is None else (head["within"][0], head["within"][1])
        found[head["label"]].append(Slice(head["whole"], tuple(head["shape"]), at, within))
    return dict(found)


@dataclass(frozen=True)
class TracePart:
    """A tensor of the trace: a whole parameter, or the part of it that is a slice of one whole tensor.

    Attributes:
        label: its name in the trace of this rank.
        cut: the slice; None for a whole tensor.
        unplaced: why its place is unknown, if a place was searched for; "" otherwise.
        same_elsewhere: its values, like those of a constant, occur in several places.
    """

    label: str
    order: int
    shape: list[int]
    cut: Cut | None = None
    unplaced: str = ""
    same_elsewhere: bool = False


class Placing:
    """Places the parameters of a rank.

    Args:
        wholes, buffers: the parameters and buffers of one device; None if unknown.
        known: name of a tensor on this rank -> its slices, as found in another run.
        note: file descriptor that receives the slices found; None: they are not stored.
    """

    def __init__(
        self,
        names: Names,
        wholes: Wholes | None,
        buffers: Wholes | None = None,
        known: Mapping[str, list[Slice]] = MappingProxyType({}),
        note: int | None = None,
    ) -> None:
        self._names, self._wholes, self._buffers, self._known, self._note = names, wholes, buffers, known, note
        self.coordinates: Coordinates = {}
        self._found: dict[str, list[tuple[torch.Size, Slice]]] = {}
        self._open: set[str] = set()

    def parts(self, parameters: Sequence[tuple[torch.Tensor, str]]) -> list[list[TracePart]]:
        """Return the parts of each parameter, before it is trained.

        Args:
            parameters: pairs of a parameter and its name if no model contains it.
        """
        found = [self._parts(parameter, otherwise) for parameter, otherwise in parameters]
        # If values are ambiguous, the neighbours, which are placed by now, may decide.
        for index, (parameter, _) in enumerate(parameters):
            if found[index] and found[index][0].label in self._open:
                found[index] = [self._beside(parameter, found[index][0])]
        return found

    def buffer(self, name: str, order: int, first: torch.Tensor) -> TracePart:
        """Return the part of a buffer, from its values before the first call of its model. Call it after `parts`."""
        whole = TracePart(name, order, shape_of(first))
        if self._buffers is None or self._buffers.shape(name) == tuple(first.shape):
            return whole
        found = self._find(self._buffers, first, name, named_state("", name), trusted=False)
        if isinstance(found, list) and len(found) == 1:
            return _part(name, order, first, found[0])
        if (near := self._near(name, order, first, self._buffers)) is not None:
            return near
        # A whole tensor under another name is matched later, by the modules around it.
        return whole if isinstance(found, list) else _unplaced(whole, found)

    def _find(
        self, wholes: Wholes, value: torch.Tensor, hint: str, key: str, *, trusted: bool
    ) -> list[Slice] | Unplaced:
        """Find a tensor by its values, or among the slices that another run found for `key`."""
        found = wholes.find(value, hint, trusted=trusted)
        if found is Unplaced.AMBIGUOUS and key in self._known:
            return self._known[key]
        if self._note is not None and not isinstance(found, Unplaced):
            write_placement(self._note, key, found)
        return found

    def _parts(self, parameter: torch.Tensor, otherwise: str) -> list[TracePart]:
        ranges = flat_ranges(parameter)
        if ranges is not None:
            names = [self._names.of_key(module, key) for module, key in ranges.owners]
            if None not in names:
                return [
                    _part(name[0], name[1], parameter, Slice(name[0], shape, at, within))
                    for name, shape, (at, within) in zip(names, ranges.shapes, ranges.parts, strict=True)
                    if name is not None and at is not None
                ]
        name, order = self._names.name(parameter, otherwise)
        if getattr(parameter, "_fsdp_flattened", False):
            here = local_ranges(parameter, self._names.modules())
            if here is not None:
                at, shape = here
                return [_part(name, order, parameter, Slice(name, shape, at))] if len(at) else []
        whole = TracePart(name, order, shape_of(parameter))
        if self._wholes is None or is_distributed(parameter) or parameter.layout is not torch.strided:
            return [whole]
        declared = self._declared(parameter, name)
        if declared is not None:
            self._note_found(name, parameter.shape, declared)
            return [_part(name, order, parameter, declared)]
        return list(self._by_content(parameter, whole))

    def _declared(self, parameter: torch.Tensor, name: str) -> Slice | None:
        """Return the slice that Megatron's attributes declare, if its values equal the parameter; None otherwise."""
        whole = None if self._wholes is None else self._wholes.whole(name)
        found = None if whole is None else by_attributes(parameter, name, tuple(whole.shape), self.coordinates)
        if whole is None or not found or (at := found[0].at) is None or len(at) != parameter.numel():
            return None
        same = torch.equal(whole.reshape(-1)[at], copied(parameter).reshape(-1))
        return found[0] if same else None

    def _note_found(self, label: str, shape: torch.Size, part: Slice) -> None:
        self._found.setdefault(label.rpartition(".")[0], []).append((shape, part))

    def _by_content(self, parameter: torch.Tensor, whole: TracePart) -> Iterator[TracePart]:
        assert self._wholes is not None
        found = self._find(self._wholes, copied(parameter), whole.label, whole.label, trusted=True)
        # A tensor with a known name and shape may be whole: it started from other values, or is constant.
        known = self._wholes.shape(whole.label) == tuple(parameter.shape)
        if isinstance(found, Unplaced):
            if found is Unplaced.AMBIGUOUS:
                self._open.add(whole.label)
            yield whole if known else _unplaced(whole, found)
            return
        if len(found) == 1 and found[0].at is None:
            if not known and whole.label not in self._known:
                self._open.add(whole.label)  # other tensors, such as biases, may also be zeros
            yield whole
            return
        for index, part in enumerate(found):
            if part.within is None:
                self._note_found(whole.label, parameter.shape, part)
            label = whole.label if len(found) == 1 else f"{whole.label}[{index}]"
            yield _part(label, whole.order, parameter, part)

    def _beside(self, parameter: torch.Tensor, part: TracePart) -> TracePart:
        assert self._wholes is not None
        return self._near(part.label, part.order, copied(parameter), self._wholes) or part

    def _near(self, name: str, order: int, value: torch.Tensor, wholes: Wholes) -> TracePart | None:
        """Place a constant by other tensors: neighbours in its module, or tensors divided along an axis."""
        if not value.dim():
            return None
        near = beside(name, value, self._found.get(name.rpartition(".")[0], ()), wholes)
        if near is not None:
            return _part(name, order, value, near)
        others = [one for some in self._found.values() for one in some]
        along = along_axes(name, value, wholes, self.coordinates, others)
        # The rows may be arranged differently, which distinct values would show.
        return None if along is None else replace(_part(name, order, value, along), same_elsewhere=True)


def _unplaced(whole: TracePart, why: Unplaced) -> TracePart:
    return replace(whole, unplaced=str(why), same_elsewhere=why is Unplaced.AMBIGUOUS)


def _part(label: str, order: int, parameter: torch.Tensor, part: Slice) -> TracePart:
    cut = Cut(part, parameter.is_complex())
    return TracePart(label, order, cut.shape, None if cut.is_whole and part.within is None else cut)


class Kept(NamedTuple):
    """The tensors of one device.

    Attributes:
        parameters, buffers: their initial values.
        states: name of a state of an optimizer -> its shape.
    """

    parameters: Wholes
    buffers: Wholes
    states: Mapping[str, Sequence[int]]


def write_whole(fd: int, name: str, tensor: torch.Tensor) -> None:
    """Append a parameter to the file."""
    _write(fd, name, tensor, "parameter")


def write_buffer(fd: int, name: str, tensor: torch.Tensor) -> None:
    """Append a buffer to the file."""
    _write(fd, name, tensor, "buffer")


def write_shape(fd: int, name: str, shape: Sequence[int]) -> None:
    """Append the shape of a state of an optimizer to the file."""
    _append(fd, {"name": name, "kind": "state", "shape": list(shape)})


def _write(fd: int, name: str, tensor: torch.Tensor, kind: str) -> None:
    here = copied(tensor)
    head = {"name": name, "kind": kind, "shape": list(here.shape), "dtype": name_of(here.dtype)}
    _append(fd, head, bytes(memory_of(here)))


def _append(fd: int, head: Mapping[str, object], elements: bytes = b"") -> None:
    write_all(fd, json.dumps(head).encode() + b"\n", elements)


def read_wholes(fd: int) -> Kept:
    """Return the tensors in a file."""
    size = os.fstat(fd).st_size
    if not size:
        return Kept(Wholes({}), Wholes({}), {})
    data = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    found: dict[str, dict[str, torch.Tensor]] = {"parameter": {}, "buffer": {}}
    states: dict[str, Sequence[int]] = {}
    while data.tell() < size:
        head = json.loads(data.readline())
        if head["kind"] == "state":
            states[head["name"]] = head["shape"]
            continue
        dtype = getattr(torch, head["dtype"])
        count, start = math.prod(head["shape"]), data.tell()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = (
                torch.frombuffer(data, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
                if count
                else torch.empty(0, dtype=torch.uint8)
            )
        # Cloned, because a view as another dtype must be aligned.
        found[head["kind"]][head["name"]] = value.clone().view(dtype).view(head["shape"])
        data.seek(start + count * dtype.itemsize)
    return Kept(Wholes(found["parameter"]), Wholes(found["buffer"]), states)
