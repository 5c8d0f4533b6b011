"""Find, in the script's process, the slices of one device's tensors that its parameters hold.

FullyShardedDataParallel (FSDP1) declares the slices in its flat parameters, and DeepSpeed's ZeRO in the parameters that
its flat partitions are made of. Other slices are found by their values
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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from mgpu_check.compare.in_script.models import Names
from mgpu_check.compare.in_script.summaries import Cut, shape_of
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
    zero_parts,
)
from mgpu_check.torch_hooks.tensors import copied, is_distributed, memory_of, name_of


class Files(NamedTuple):
    """File descriptors of a run; None for files that it neither reads nor writes."""

    keep: int | None = None  # receives the initial parameters and buffers of this run
    wholes: int | None = None  # has the initial parameters and buffers of another run, to find slices in
    found: int | None = None  # receives the slices that this run places
    placed: int | None = None  # has the slices that another run placed
    tape: int | None = None  # receives what this rank was given; see `mgpu_check.compare.in_script.replay`
    replay: int | None = None  # has what all ranks were given, for one device
    kept: int | None = None  # receives what a trace file has besides the trace; see `traces/attachments.py`


def tensor_at(data: Any, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of so many bytes that a writable buffer has at a place."""
    if not size:
        return torch.empty(0, dtype=dtype)
    # Cloned, because a view as another dtype must be aligned.
    return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start).clone().view(dtype)


def write_placement(fd: int, label: str, slices: Sequence[Slice]) -> None:
    """Append the slices of a tensor to the file."""
    for slice_ in slices:
        count = None if slice_.at is None else len(slice_.at)
        head = {"label": label, "whole": slice_.whole, "shape": slice_.shape, "within": slice_.within, "count": count}
        at = b"" if slice_.at is None or not count else bytes(memory_of(slice_.at.to(torch.int64).contiguous()))
        _append(fd, head, at)


def read_placements(fd: int) -> dict[str, list[Slice]]:
    """Return the slices of each tensor, by its name on this rank."""
    size = os.fstat(fd).st_size
    data, start = bytearray(os.pread(fd, size, 0)), 0
    slices: dict[str, list[Slice]] = defaultdict(list)
    while start < size:
        end = data.index(b"\n", start)
        head, start = json.loads(data[start:end]), end + 1
        size_of_at = 8 * (head["count"] or 0)
        at = None if head["count"] is None else tensor_at(data, start, size_of_at, torch.int64)
        start += size_of_at
        within = None if head["within"] is None else (head["within"][0], head["within"][1])
        slices[head["label"]].append(Slice(head["whole"], tuple(head["shape"]), at, within))
    return dict(slices)


@dataclass(frozen=True)
class TracePart:
    """A tensor of the trace: a whole parameter, or the part of it that is a slice of one whole tensor."""

    label: str  # its name in the trace of this rank
    order: int
    shape: list[int]
    cut: Cut | None = None  # the slice; None for a whole tensor
    unplaced: str | None = None  # why its place is unknown, if a place was searched for; None otherwise
    same_elsewhere: bool = False  # its values, like those of a constant, occur in several places


class Placing:
    """Places the parameters of a rank.

    `Parameters` has one without known tensors; `recorder.install` replaces it if another run has written its tensors.
    It places each tensor once, before it is trained.

    `wholes`, `buffers`: the parameters and buffers of one device; None if unknown. `placements`: name of a tensor on
    this rank -> its slices, as found in another run. `note`: file descriptor that receives the slices found; None: they
    are not stored.
    """

    def __init__(
        self,
        parameter_names: Names,
        wholes: Wholes | None,
        buffers: Wholes | None = None,
        placements: Mapping[str, list[Slice]] = MappingProxyType({}),
        note: int | None = None,
    ) -> None:
        self._names, self._wholes, self._buffers = parameter_names, wholes, buffers
        self._known, self._note = placements, note
        self.coordinates: Coordinates = {}
        self._found: dict[str, list[tuple[torch.Size, Slice]]] = defaultdict(list)
        self._open: set[str] = set()

    def parts(self, parameters: Sequence[tuple[torch.Tensor, str]]) -> list[list[TracePart]]:
        """Return the parts of each parameter, before it is trained.
        `parameters`: pairs of a parameter and its name if no model contains it."""
        pieces = [self._parts(parameter, otherwise) for parameter, otherwise in parameters]
        # If values are ambiguous, the neighbours, which are placed by now, may decide.
        for index, (parameter, _) in enumerate(parameters):
            if self._wholes is not None and pieces[index] and (head := pieces[index][0]).label in self._open:
                pieces[index] = [self._near(head.label, head.order, copied(parameter), self._wholes) or head]
        return pieces

    def buffer(self, name: str, order: int, initial: torch.Tensor) -> TracePart:
        """Return the part of a buffer, from its values before the first call of its model. Call it after `parts`."""
        unsliced = TracePart(name, order, shape_of(initial))
        if self._buffers is None or self._buffers.shape(name) == tuple(initial.shape):
            return unsliced
        slices = self._find(self._buffers, initial, name, named_state("", name), trusted=False)
        if isinstance(slices, list) and len(slices) == 1:
            return _part(name, order, initial, slices[0])
        if (near := self._near(name, order, initial, self._buffers)) is not None:
            return near
        # A whole tensor under another name is matched later, by the modules around it.
        return unsliced if isinstance(slices, list) else _unplaced(unsliced, slices)

    def _find(
        self, wholes: Wholes, value: torch.Tensor, hint: str, key: str, *, trusted: bool
    ) -> list[Slice] | Unplaced:
        """Find a tensor by its values, or among the slices that another run found for `key`."""
        slices = wholes.find(value, hint, trusted=trusted)
        if slices is Unplaced.AMBIGUOUS and key in self._known:
            return self._known[key]
        if self._note is not None and not isinstance(slices, Unplaced):
            write_placement(self._note, key, slices)
        return slices

    def _parts(self, parameter: torch.Tensor, otherwise: str) -> list[TracePart]:
        ranges = flat_ranges(parameter)
        if ranges is not None:
            owners = [self._names.of_key(module, key) for module, key in ranges.owners]
            if None not in owners:
                return [
                    _part(name[0], name[1], parameter, Slice(name[0], shape, at, within))
                    for name, shape, (at, within) in zip(owners, ranges.shapes, ranges.parts, strict=True)
                    if name is not None and at is not None
                ]
        partition = zero_parts(parameter, self._names.modules())
        if partition is not None:
            named = [self._names.name(part.parameter, otherwise) for part in partition]
            return [
                _part(name, order, parameter, Slice(name, part.shape, part.at, part.within))
                for (name, order), part in zip(named, partition, strict=True)
            ]
        name, order = self._names.name(parameter, otherwise)
        flattened = getattr(parameter, "_fsdp_flattened", False)
        if flattened and (local := local_ranges(parameter, self._names.modules())) is not None:
            at, shape = local
            return [_part(name, order, parameter, Slice(name, shape, at))] if len(at) else []
        unsliced = TracePart(name, order, shape_of(parameter))
        if self._wholes is None or is_distributed(parameter) or parameter.layout is not torch.strided:
            return [unsliced]
        declared = self._declared(parameter, name, self._wholes)
        if declared is not None:
            self._found[name.rpartition(".")[0]].append((parameter.shape, declared))
            return [_part(name, order, parameter, declared)]
        return list(self._by_content(parameter, unsliced, self._wholes))

    def _declared(self, parameter: torch.Tensor, name: str, wholes: Wholes) -> Slice | None:
        """Return the slice that Megatron's attributes declare, if its values equal the parameter; None otherwise."""
        if (full_tensor := wholes.whole(name)) is None:
            return None
        slices = by_attributes(parameter, name, tuple(full_tensor.shape), self.coordinates)
        if not slices or (at := slices[0].at) is None or len(at) != parameter.numel():
            return None
        same = torch.equal(full_tensor.reshape(-1)[at], copied(parameter).reshape(-1))
        return slices[0] if same else None

    def _by_content(self, parameter: torch.Tensor, unsliced: TracePart, wholes: Wholes) -> Iterator[TracePart]:
        slices = self._find(wholes, copied(parameter), unsliced.label, unsliced.label, trusted=True)
        # A tensor with a known name and shape may be whole: it started from other values, or is constant.
        is_known = wholes.shape(unsliced.label) == tuple(parameter.shape)
        if isinstance(slices, Unplaced):
            if slices is Unplaced.AMBIGUOUS:
                self._open.add(unsliced.label)
            yield unsliced if is_known else _unplaced(unsliced, slices)
            return
        if len(slices) == 1 and slices[0].at is None:
            if not is_known and unsliced.label not in self._known:
                self._open.add(unsliced.label)  # other tensors, such as biases, may also be zeros
            yield unsliced
            return
        for index, slice_ in enumerate(slices):
            if slice_.within is None:
                self._found[unsliced.label.rpartition(".")[0]].append((parameter.shape, slice_))
            label = unsliced.label if len(slices) == 1 else f"{unsliced.label}[{index}]"
            yield _part(label, unsliced.order, parameter, slice_)

    def _near(self, name: str, order: int, value: torch.Tensor, wholes: Wholes) -> TracePart | None:
        """Place a constant by other tensors: neighbours in its module, or tensors divided along an axis."""
        if not value.dim():
            return None
        near = beside(name, value, self._found.get(name.rpartition(".")[0], ()), wholes)
        if near is not None:
            return _part(name, order, value, near)
        others = [placed_slice for module_slices in self._found.values() for placed_slice in module_slices]
        along = along_axes(name, value, wholes, self.coordinates, others)
        # The rows may be arranged differently, which distinct values would show.
        return None if along is None else replace(_part(name, order, value, along), same_elsewhere=True)


def _unplaced(piece: TracePart, reason: Unplaced) -> TracePart:
    return replace(piece, unplaced=str(reason), same_elsewhere=reason is Unplaced.AMBIGUOUS)


def _part(label: str, order: int, parameter: torch.Tensor, slice_: Slice) -> TracePart:
    cut = Cut(slice_, parameter.is_complex())
    return TracePart(label, order, cut.shape, None if cut.is_whole and slice_.within is None else cut)


class Kept(NamedTuple):
    """The tensors of one device."""

    parameters: Wholes  # their initial values
    buffers: Wholes
    states: Mapping[str, Sequence[int]]  # name of a state of an optimizer -> its shape


def write_shape(fd: int, name: str, shape: Sequence[int]) -> None:
    """Append the shape of a state of an optimizer to the file."""
    _append(fd, {"name": name, "kind": "state", "shape": list(shape)})


def write_tensor(fd: int, kind: Literal["parameter", "buffer"], name: str, tensor: torch.Tensor) -> None:
    """Append a parameter or a buffer to the file."""
    local = copied(tensor)
    head = {"name": name, "kind": kind, "shape": list(local.shape), "dtype": name_of(local.dtype)}
    _append(fd, head, bytes(memory_of(local)))


def _append(fd: int, head: Mapping[str, object], elements: bytes = b"") -> None:
    write_all(fd, json.dumps(head).encode() + b"\n", elements)


def read_wholes(fd: int) -> Kept:
    """Return the tensors in a file."""
    size = os.fstat(fd).st_size
    if not size:
        return Kept(Wholes({}), Wholes({}), {})
    data = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    tensors: dict[str, dict[str, torch.Tensor]] = {"parameter": {}, "buffer": {}}
    states: dict[str, Sequence[int]] = {}
    while data.tell() < size:
        head = json.loads(data.readline())
        if head["kind"] == "state":
            states[head["name"]] = head["shape"]
            continue
        dtype = getattr(torch, head["dtype"])
        count, start = math.prod(head["shape"]), data.tell()
        value = tensor_at(data, start, count * dtype.itemsize, dtype)
        tensors[head["kind"]][head["name"]] = value.view(head["shape"])
        data.seek(start + count * dtype.itemsize)
    return Kept(Wholes(tensors["parameter"]), Wholes(tensors["buffer"]), states)
