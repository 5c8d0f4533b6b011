"""Find the slices of single-device tensors that ranks hold, describe them, and put them together.

Some placements are declared: by the user, or by the library that divides the model, such as FullyShardedDataParallel
(FSDP1), whose flat parameters name their slices. Others are found by content: ranks build a model from one seed, so
before training, what a rank holds has the very values of a part of the model that one device holds. A match counts
only if there is one place for it: values that come twice decide nothing. A tensor of constants, such as a bias of
zeros, is placed by its neighbours in the same module, or by the axis of the mesh over which other tensors of the rank
are divided.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mgpu_check.torch_hooks.tensors import bytes_of, digest_of


class Unplaced(Enum):
    """Why it is not known which slice a tensor is."""

    AMBIGUOUS = "its values are in several places of the single-device model"
    NOWHERE = "its values before the first step are nowhere in the single-device model"
    OF_OTHER_SHAPE = "it is a DTensor of a shape that no tensor of the single-device model has"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Slice:
    """Elements of a whole tensor that a local tensor holds."""

    whole: str  # name of the whole tensor: that of the parameter on one device
    shape: tuple[int, ...]  # shape of the whole tensor
    # for each element, in the order of the local tensor, its position in the flattened whole, int64; None where the
    # local tensor is the whole
    at: torch.Tensor | None = None
    # first and last + 1 element of the flattened local tensor that belong to this slice; None for all
    within: tuple[int, int] | None = None

    @property
    def mask(self) -> torch.Tensor:
        """The elements of the whole that are held: bool, in the shape of the whole."""
        if self.at is None:
            return torch.ones(self.shape, dtype=torch.bool)
        mask = torch.zeros(self.shape, dtype=torch.bool)
        mask.view(-1)[self.at] = True
        return mask

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the elements of a local tensor that belong to this slice, flattened."""
        flat = local.reshape(-1)
        return flat if self.within is None else flat[slice(*self.within)]

    def put(self, local: torch.Tensor, full_tensor: torch.Tensor) -> None:
        """Write the elements of a local tensor to their places in a contiguous whole."""
        flat = full_tensor.view(-1)
        flat[slice(None) if self.at is None else self.at] = self.of(local).to(full_tensor.dtype)

    def __str__(self) -> str:
        """Describe it: "all", "dim 0: 4 to 7 of 16", "elements 16 to 31 of 64"."""
        if self.at is None:
            return "all"
        if not self.at.numel():
            return "nothing"
        mask = box = self.mask
        cut = {dim: held for dim in range(mask.dim()) if len(held := _held_indices(mask, dim)) < mask.shape[dim]}
        for dim, indices in cut.items():
            box = box.index_select(dim, indices)
        if bool(box.all()):  # all is held that has a used index in each dimension
            return ", ".join(f"dim {dim}: {_ranges(own)} of {mask.shape[dim]}" for dim, own in cut.items()) or "all"
        return f"elements {_ranges(mask.view(-1).nonzero().flatten())} of {mask.numel()}"


@dataclass(frozen=True)
class Assembled:
    """A whole tensor that was put together from slices."""

    value: torch.Tensor  # the whole; of an element that several hold, what the first of them has
    missing: torch.Tensor | None  # the elements that no slice holds, bool; None if there are no such elements


def assembled(slices: Sequence[tuple[Slice, torch.Tensor]]) -> Assembled:
    """Put slices of one whole together. `slices`: at least one; each slice with the local tensor that has it."""
    head, local = slices[0]
    value = torch.zeros(head.shape, dtype=local.dtype)
    covered = torch.zeros(head.shape, dtype=torch.bool)
    for piece, tensor in reversed(slices):
        piece.put(tensor, value)
        covered |= piece.mask
    return Assembled(value, None if bool(covered.all()) else ~covered)


def indexed(shape: Sequence[int], index: object) -> torch.Tensor:
    """Return the positions in a flattened tensor that an index selects: a slice, integers, or several."""
    positions: torch.Tensor = torch.arange(math.prod(shape)).view(tuple(shape))[index]  # type: ignore[index]
    return positions.reshape(-1)


def _held_indices(mask: torch.Tensor, dim: int) -> torch.Tensor:
    others = [axis for axis in range(mask.dim()) if axis != dim]
    return (mask.any(others) if others else mask).nonzero().flatten()


def _ranges(indices: torch.Tensor) -> str:
    """Return "4 to 7", or "0 to 1 and 8 to 9"."""
    ranges: list[tuple[int, int]] = []
    for index in indices.tolist():
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1] = ranges[-1][0], index
        else:
            ranges.append((index, index))
    shown = [f"{low} to {high}" if high > low else str(low) for low, high in ranges[:3]]
    remainder = f" and {len(ranges) - 3} more ranges" if len(ranges) > 3 else ""
    return " and ".join(shown) + remainder


_MANY = 256  # places of one value above which it is a constant, such as the zeros of a bias


class Wholes:
    """The tensors of a freshly built model, to look slices up. `named`: dense tensors on the CPU by name.

    A gate or a comparison makes it from the single-device model before training, and asks it for the tensors of ranks.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self._named = dict(named)
        self._by_digest: dict[str, list[str]] = defaultdict(list)
        for name, full_tensor in self._named.items():
            self._by_digest[digest_of(full_tensor)].append(name)
        self._flats: dict[torch.dtype, tuple[torch.Tensor, list[tuple[int, str]]]] = {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a whole tensor; None if the model has no tensor with this name."""
        return tuple(self._named[name].shape) if name in self._named else None

    def whole(self, name: str) -> torch.Tensor | None:
        """Return a whole tensor; None if the model has no tensor with this name."""
        return self._named.get(name)

    def find(self, local: torch.Tensor, hint: str = "", *, trusted: bool = False) -> list[Slice] | Unplaced:
        """Return the slices that a local tensor consists of, or why they are not known.

        `local`: dense, on the CPU, with the values from before the first step. `hint`: the likely name. Of several
        places, the only one in the tensor of this name counts. `trusted`: a tensor that equals the one of this name is
        that one, even if others are equal, too.
        """
        local = local.contiguous()
        if not local.numel():
            return []
        if same := self._by_digest.get(digest_of(local), []):
            if trusted and hint in same:
                return [Slice(hint, tuple(local.shape))]
            alone = len(same) == 1 and not self._is_constant_elsewhere(local, same[0])
            return [Slice(same[0], tuple(local.shape))] if alone else Unplaced.AMBIGUOUS
        for names in ([hint] if hint in self._named else [], [name for name in self._named if name != hint]):
            places = [(name, at) for name in names for at in _boxes(self._named[name], local)]
            if places:
                name, at = places[0]
                alone = len(places) == 1 and at is not None
                return [Slice(name, tuple(self._named[name].shape), at)] if alone else Unplaced.AMBIGUOUS
        return self._pieces(local)

    def _is_constant_elsewhere(self, local: torch.Tensor, but: str) -> bool:
        """Return whether a constant tensor may be a slice of another whole, which has as many such elements."""
        value = local.reshape(-1)[0]
        if not bool((local == value).all()):
            return False
        return any(
            name != but and full_tensor.dtype == local.dtype and int((full_tensor == value).sum()) >= local.numel()
            for name, full_tensor in self._named.items()
        )

    def _pieces(self, local: torch.Tensor) -> list[Slice] | Unplaced:
        """Return the ranges of flattened tensors in a flat buffer, or in a fused weight.

        Zeros at the end are padding.
        """
        everything, starts = self._flat(local.dtype)
        flat = local.reshape(-1)
        slices: list[Slice] = []
        offset = 0

        def common(position: int) -> int:
            """Return how many elements are the same from both places on, up to the end of one whole."""
            end = min((start for start, _ in starts if start > position), default=len(everything))
            count = min(end - position, len(flat) - offset)
            same = everything[position : position + count] == flat[offset : offset + count]
            return count if bool(same.all()) else int(same.to(torch.uint8).argmin())

        while offset < len(flat):
            positions = (everything == flat[offset]).nonzero().flatten().tolist()
            if len(positions) > _MANY:
                return Unplaced.AMBIGUOUS
            runs = [(common(position), position) for position in positions]
            length, position = max(runs, default=(0, 0))
            if not length:
                return slices if slices and not bool(flat[offset:].any()) else Unplaced.NOWHERE
            if sum(own == length for own, _ in runs) > 1:
                return Unplaced.AMBIGUOUS
            start, name = max(entry for entry in starts if entry[0] <= position)
            at = torch.arange(position - start, position - start + length)
            slices.append(Slice(name, tuple(self._named[name].shape), at, (offset, offset + length)))
            offset += length
        return slices

    def _flat(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[tuple[int, str]]]:
        if dtype not in self._flats:
            flats = {name: own.reshape(-1) for name, own in self._named.items() if own.dtype == dtype and own.numel()}
            starts = itertools.accumulate(map(len, flats.values()), initial=0)
            flat = torch.cat([torch.empty(0, dtype=dtype), *flats.values()])
            self._flats[dtype] = flat, list(zip(starts, flats, strict=False))
        return self._flats[dtype]


def _boxes(full_tensor: torch.Tensor, local: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """Yield the positions of a tensor that is a box or rows of a whole, or its transpose; None if ambiguous."""
    if full_tensor.dtype != local.dtype or full_tensor.numel() < local.numel() or not full_tensor.dim():
        return
    shape = tuple(full_tensor.shape)
    if full_tensor.dim() == local.dim():
        cut = [dim for dim in range(full_tensor.dim()) if full_tensor.shape[dim] != local.shape[dim]]
        if all(full_tensor.shape[dim] >= local.shape[dim] for dim in cut):
            if len(cut) == 1:
                rows = _rows(full_tensor, local, cut[0])
                if rows is not None:
                    index = tuple(rows if dim == cut[0] else slice(None) for dim in range(full_tensor.dim()))
                    yield indexed(shape, index) if len(rows) else None
                    return
            elif len(cut) > 1 and (corner := _corner(full_tensor, local)) is not None:
                yield indexed(shape, corner)
                return
    turned = full_tensor.T if full_tensor.dim() == local.dim() == 2 else local
    cut = [dim for dim in range(turned.dim()) if turned.shape[dim] != local.shape[dim]]
    if turned is local or len(cut) > 1:
        return
    at = torch.arange(full_tensor.numel()).view(shape).T.contiguous().view(-1)
    if not cut and torch.equal(turned, local):
        yield at
    elif cut and (rows := _rows(turned, local, cut[0])) is not None:
        index = (rows, slice(None)) if cut[0] == 0 else (slice(None), rows)
        yield at[indexed(tuple(turned.shape), index)] if len(rows) else None


def _rows(full_tensor: torch.Tensor, local: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return the indices of the rows of a local tensor along one dimension of a whole: a chunk, or interleaved rows.

    Empty if some row is in several places, and the rows together are, too. None if some row is nowhere.
    """
    places: dict[bytes, list[int]] = defaultdict(list)
    for index, row in enumerate(full_tensor.movedim(dim, 0)):
        places[bytes_of(row)].append(index)
    positions = [places.get(bytes_of(row), []) for row in local.movedim(dim, 0)]
    if not all(positions):
        return None
    if all(len(indices) == 1 for indices in positions):
        return torch.tensor([indices[0] for indices in positions])
    # The neighbours of a row that comes twice, such as one of zeros, decide.
    starts = [start for start in positions[0] if all(start + n in own for n, own in enumerate(positions))]
    start, count = (starts[0], len(positions)) if len(starts) == 1 else (0, 0)
    return torch.arange(start, start + count)


def _corner(full_tensor: torch.Tensor, local: torch.Tensor) -> tuple[slice, ...] | None:
    """Return where a box of several shorter dimensions is; None if it is nowhere, or in several places."""
    boxes = []
    for corner in (full_tensor == local.reshape(-1)[0]).nonzero().tolist():
        box = tuple(slice(low, low + size) for low, size in zip(corner, local.shape, strict=True))
        if full_tensor[box].shape == local.shape and torch.equal(full_tensor[box], local):
            boxes.append(box)
    return boxes[0] if len(boxes) == 1 else None


_NOISE = 0.02
"""Of the magnitude of a tensor: enough to make its elements distinct, and too little to change how a model trains."""


def make_distinct(tensor: torch.Tensor, size: float, generator: torch.Generator) -> None:
    """Add noise to a tensor, in place.

    `size`: the magnitude of its elements; 0 for zeros. `generator`: on the CPU; the same state gives the same noise.
    """
    noise = torch.randn(tensor.shape, generator=generator, device="cpu")
    with torch.no_grad():
        tensor.add_((_NOISE * (size or 1.0) * noise).to(tensor.device, tensor.dtype))


Coordinates = Mapping[str, tuple[int, int]]
"""By mesh axis: index of this rank along it, and size. The world, with the global rank, has the name ""."""

Placement = Mapping[str, Any] | Callable[..., Any] | None
"""A declaration by the user; see `by_user`."""

_WORLD = ""


def by_user(
    placement: Placement, name: str, rank: Any, coordinates: Coordinates, shapes: Mapping[str, tuple[int, ...]]
) -> list[Slice] | None:
    """Return the slices that a user has declared for a parameter; None if nothing is declared for it.

    Args:
        placement: a mapping from patterns of names, as of `fnmatch`, to specifications, the first that matches counts;
            or a function ``(name, rank)`` that returns one, or None. A specification is one of

            - an int, or `Shard(dim)`: chunked along this dimension over all ranks;
            - a mapping from mesh axes to ints or `Shard`: chunked over these axes, one after the other;
            - "whole", or `Replicate()`;
            - what selects the slice from the whole tensor: a slice, a list of rows, a tuple of these;
            - a tuple of a name on one device and one of these.
        shapes: of the tensors on one device, by name.

    Raises:
        ValueError: a specification has another form, or names an axis or tensor that does not exist.
    """
    if callable(placement):
        spec = placement(name, rank)
    else:
        spec = next((value for key, value in (placement or {}).items() if fnmatch.fnmatchcase(name, key)), None)
    if spec is None:
        return None
    parameter = name
    if isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[0], str):
        parameter, spec = spec
    if parameter not in shapes:
        raise ValueError(
            f"placement of {name!r} names {parameter!r}, which build() does not make; choose of {', '.join(shapes)}"
        )
    shape = shapes[parameter]
    try:
        at = _positions(spec, shape, coordinates)
    except (IndexError, TypeError, KeyError) as error:
        axes = [axis for axis in coordinates if axis] or ["(none)"]
        raise ValueError(
            f"placement of {name!r} is {spec!r}, which does not fit shape {list(shape)} and mesh axes "
            f"{axes}: {error}; give a dimension, a mapping from mesh axes to dimensions, "
            '"whole", or an index of the whole tensor'
        ) from None
    return [Slice(parameter, shape, at)]


def check_placement(gate: str, placement: object) -> None:
    """Raise a ValueError unless `placement` is a mapping by patterns, a function, or None."""
    if placement is not None and not callable(placement) and not isinstance(placement, Mapping):
        raise ValueError(
            f"{gate}: placement={placement!r}; give a mapping from patterns of names to dimensions, "
            'such as {"*.fc1.weight": {"tp": 0}}, or a function (name, rank)'
        )


def by_attributes(
    tensor: torch.Tensor, parameter: str, shape: tuple[int, ...], coordinates: Coordinates
) -> list[Slice] | None:
    """Return the slice that Megatron's attributes declare.

    Those are `tensor_model_parallel`, `partition_dim` and `partition_stride`, and `allreduce`, which is False for the
    parameters of experts. With a stride of s, a rank holds s equal parts, one of each s-th of the dimension, as of a
    fused weight. Experts are divided over the axes "ep" and "etp". None where the attributes declare nothing, or the
    rank's place among those that share the tensor is not known.
    """
    if is_of_expert(tensor):
        return _of_expert(tensor, parameter, shape, coordinates)
    dim = getattr(tensor, "partition_dim", -1)
    if not getattr(tensor, "tensor_model_parallel", False) or not 0 <= dim < len(shape):
        return None
    chunks, rest = divmod(shape[dim], max(1, tensor.shape[dim]))
    places = [coordinates[axis] for axis in ("tp", _WORLD) if axis in coordinates and coordinates[axis][1] == chunks]
    if rest or not places:
        return None
    stride = max(1, getattr(tensor, "partition_stride", 1))
    rows = torch.arange(shape[dim]).chunk(stride * chunks)[places[0][0] :: chunks]
    return [Slice(parameter, shape, indexed(shape, (*[slice(None)] * dim, torch.cat(rows))))]


def is_of_expert(tensor: torch.Tensor) -> bool:
    """Return whether Megatron's attribute `allreduce` says that a parameter belongs to an expert.

    Its gradient is reduced over the ranks with the same experts only. So it is not what has its name on other ranks.
    """
    return getattr(tensor, "allreduce", True) is False


def _of_expert(
    tensor: torch.Tensor, parameter: str, shape: tuple[int, ...], coordinates: Coordinates
) -> list[Slice] | None:
    if tensor.dim() != len(shape):
        return None
    positions = indexed(shape, ...).view(shape)
    used_axes: set[str] = set()
    within = "etp" if "etp" in coordinates else "tp"
    for dim, (size, local_size) in enumerate(zip(shape, tensor.shape, strict=True)):
        chunks, rest = divmod(size, max(1, local_size))
        if rest:
            return None
        if chunks > 1:
            inside = getattr(tensor, "tensor_model_parallel", False) and getattr(tensor, "partition_dim", -1) == dim
            axes = [axis for axis in ("ep", *[within] * inside) if axis not in used_axes]
            fitting = [axis for axis in axes if axis in coordinates and coordinates[axis][1] == chunks]
            if not fitting and coordinates.get(_WORLD, (0, 0))[1] == chunks:
                fitting = [_WORLD]
            if len({coordinates[axis] for axis in fitting}) != 1:
                return None  # or two axes have as many ranks
            positions = positions.chunk(chunks, dim)[coordinates[fitting[0]][0]]
            used_axes.add(fitting[0])
    return [Slice(parameter, shape, positions.reshape(-1))] if used_axes else None


def _positions(spec: Any, shape: tuple[int, ...], coordinates: Coordinates) -> torch.Tensor | None:
    if spec == "whole" or type(spec).__name__ == "Replicate":
        return None
    if isinstance(spec, (slice, list, tuple, torch.Tensor)):
        return indexed(shape, spec)
    by_axis = spec if isinstance(spec, Mapping) else {_WORLD: spec}
    positions = indexed(shape, ...).view(shape)
    for axis, along in by_axis.items():
        if type(along).__name__ == "Replicate" or along is None:
            continue
        dim = getattr(along, "dim", along)
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"{along!r} is no dimension")
        index, count = coordinates[axis]
        chunks = positions.chunk(count, dim)
        positions = chunks[index] if index < len(chunks) else positions.narrow(dim, 0, 0)
    return positions.reshape(-1)


class Ranges(NamedTuple):
    """The parameters that a flat parameter is made of."""

    owners: list[tuple[Any, str]]  # of each the module, and its name there
    shapes: list[tuple[int, ...]]  # of each, whole
    # of each the positions of the elements that this rank holds, and where these are in the local shard, first and last
    # + 1; (None, None) where it holds none
    parts: list[tuple[torch.Tensor | None, tuple[int, int] | None]]


def flat_ranges(flat: torch.Tensor) -> Ranges | None:
    """Return what a flat parameter is made of; None if the tensor is no sharded flat parameter."""
    infos, shards = getattr(flat, "_param_infos", None), getattr(flat, "_shard_param_infos", None)
    if infos is None or shards is None:
        return None
    owners, shapes = [(info.module, info.param_name) for info in infos], [tuple(shape) for shape in flat._shapes]  # type: ignore[attr-defined]
    return Ranges(owners, shapes, [_part(shard) for shard in shards])


class ZeroPart(NamedTuple):
    """The elements of a parameter that a partition of DeepSpeed's ZeRO holds."""

    parameter: torch.Tensor  # in the user's module
    shape: tuple[int, ...]  # whole
    at: torch.Tensor  # positions in the flattened whole
    within: tuple[int, int]  # first and last + 1 element of the partition


def zero_parts(flat: torch.Tensor, modules: Iterable[Any]) -> list[ZeroPart] | None:
    """Return what a flat partition of DeepSpeed's ZeRO is made of; None if no parameter of the modules refers to it.

    The stages 1 and 2 keep a mapping in each parameter (deepspeed/utils/tensor_fragment.py, 0.19), stage 3 keeps the
    place of each parameter in its optimizer (deepspeed/runtime/zero/stage3.py, set_grad_positions). Padding between and
    after the parameters belongs to no part.
    """
    if flat.dim() != 1:
        return None
    parts: dict[int, ZeroPart] = {}
    for parameter in (value for module in modules for value in module._parameters.values() if value is not None):
        mapping, zero = getattr(parameter, "_hp_mapping", None), getattr(parameter, "_z3_optimizer", None)
        if mapping is not None and _is_part(mapping.hp_fragment, flat):
            whole, here = mapping.lp_fragment_address, mapping.hp_fragment_address
            start, count, offset, shape = whole.start, whole.numel, here.start, tuple(parameter.shape)
        elif zero is not None:
            group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
            if zero.fp32_partitioned_groups_flat[group] is not flat:
                continue
            start = parameter.ds_tensor.ds_numel * dist.get_rank(parameter.ds_process_group)
            count = min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start)
            shape = tuple(parameter.ds_shape)
        else:
            continue
        if count > 0:
            at = torch.arange(start, start + count)
            parts[id(parameter)] = ZeroPart(parameter, shape, at, (offset, offset + count))
    return [*parts.values()] or None


def _is_part(fragment: torch.Tensor | None, flat: torch.Tensor) -> bool:
    return fragment is not None and fragment.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def local_ranges(view: torch.Tensor, called: Iterable[Any]) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return the positions that an original parameter has here (``use_orig_params=True``), and its shape.

    None if the tensor is no such parameter of any of the FSDP modules among `called`.
    """
    for module in called:
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        views, shards = getattr(flat, "_params", None) or (), getattr(flat, "_shard_param_infos", ())
        for candidate, shard, shape in zip(views, shards, getattr(flat, "_shapes", ()), strict=False):
            if candidate is view:
                at = _part(shard)[0]
                return torch.empty(0, dtype=torch.int64) if at is None else at, tuple(shape)
    return None


def _part(shard: Any) -> tuple[torch.Tensor | None, tuple[int, int] | None]:
    if not shard.in_shard:
        return None, None
    start = shard.offset_in_shard
    at = torch.arange(shard.intra_param_start_idx, shard.intra_param_end_idx + 1)
    return at, (start, start + shard.numel_in_shard)


def along_axes(
    name: str, local: torch.Tensor, wholes: Wholes, coordinates: Coordinates, others: Iterable[tuple[torch.Size, Slice]]
) -> Slice | None:
    """Return the chunk of the whole of this name that is this rank's along an axis; None if that is not known.

    `local`: dense, on the CPU, with the values from before the first step. `coordinates`: of this rank. `others`: the
    shapes and slices of other tensors of this rank. They must be chunks along the same axis.
    """
    full_tensor = wholes.whole(name)
    cut = None if full_tensor is None else _cut(tuple(full_tensor.shape), local.shape)
    if full_tensor is None or cut is None:
        return None
    shape, cuts = tuple(full_tensor.shape), [(own, _cut(own.shape, local_shape)) for local_shape, own in others]
    alike = [(own, own_cut) for own, own_cut in cuts if own_cut is not None and own_cut[1] == cut[1]]

    def is_place(index: int) -> bool:
        chunks = [(own.at, _chunk(own.shape, own_cut, index)) for own, own_cut in alike]
        return bool(chunks) and all(at is not None and torch.equal(at, chunk) for at, chunk in chunks)

    places = {index for index, size in coordinates.values() if size == cut[1] and is_place(index)}
    if len(places) != 1:
        return None
    at = _chunk(shape, cut, places.pop())
    return Slice(name, shape, at) if torch.equal(full_tensor.reshape(-1)[at], local.reshape(-1)) else None


def _cut(full_shape: tuple[int, ...], local: tuple[int, ...] | torch.Size) -> tuple[int, int] | None:
    """Return the one dimension that is divided, and into how many equal parts; None if there is no such dimension."""
    if len(full_shape) != len(local):
        return None
    cut = [dim for dim, (size, local_size) in enumerate(zip(full_shape, local, strict=True)) if size != local_size]
    if len(cut) != 1 or not local[cut[0]] or full_shape[cut[0]] % local[cut[0]]:
        return None
    return cut[0], full_shape[cut[0]] // local[cut[0]]


def _chunk(shape: tuple[int, ...], cut: tuple[int, int], index: int) -> torch.Tensor:
    dim, chunks = cut
    width = shape[dim] // chunks
    return indexed(shape, (*[slice(None)] * dim, slice(index * width, (index + 1) * width)))


def beside(
    name: str, local: torch.Tensor, neighbours: Iterable[tuple[torch.Size, Slice]], wholes: Wholes
) -> Slice | None:
    """Return the slice that has the same rows as a neighbour; None if no neighbour fits.

    `name`: of the local tensor. `local`: dense, on the CPU, with the values from before the first step. `neighbours`:
    the shapes and slices of other tensors of the same module.
    """
    matches = {}
    for shape, neighbour in neighbours:
        parameter = neighbour.whole.rpartition(".")[0] + "." * ("." in neighbour.whole) + name.rpartition(".")[2]
        value, rows = wholes.whole(parameter), _rows_beside(shape, neighbour)
        if value is None or rows is None or value.shape[1:] != local.shape[1:] or len(rows) != len(local):
            continue
        if value.shape[0] == neighbour.shape[0] and torch.equal(value[rows], local):
            matches[parameter, tuple(rows.tolist())] = Slice(parameter, tuple(value.shape), indexed(value.shape, rows))
    return next(iter(matches.values())) if len(matches) == 1 else None


def _rows_beside(shape: torch.Size, neighbour: Slice) -> torch.Tensor | None:
    """Return the indices of the rows of the whole that a slice consists of; None if it has parts of rows."""
    if neighbour.at is None or neighbour.within is not None or not shape or not neighbour.shape:
        return None
    width = torch.Size(neighbour.shape[1:]).numel()
    if not len(neighbour.at) or len(neighbour.at) != shape[0] * width:
        return None
    at = neighbour.at.view(shape[0], width)
    return at[:, 0] // width if torch.equal(at, at[:, :1] // width * width + torch.arange(width)) else None
