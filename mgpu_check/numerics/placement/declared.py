"""Placements that somebody has declared: the user, or the library that divides the model."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mgpu_check.numerics.placement.slices import Slice, indexed

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
    whole = name
    if isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[0], str):
        whole, spec = spec
    if whole not in shapes:
        raise ValueError(
            f"placement of {name!r} names {whole!r}, which build() does not make; choose of {', '.join(shapes)}"
        )
    shape = shapes[whole]
    try:
        at = _positions(spec, shape, coordinates)
    except (IndexError, TypeError, KeyError) as error:
        raise ValueError(
            f"placement of {name!r} is {spec!r}, which does not fit shape {list(shape)} and mesh axes "
            f"{_axes(coordinates)}: {error}; give a dimension, a mapping from mesh axes to dimensions, "
            '"whole", or an index of the whole tensor'
        ) from None
    return [Slice(whole, shape, at)]


def check_placement(gate: str, placement: object) -> None:
    """Raise a ValueError unless `placement` is a mapping by patterns, a function, or None."""
    if placement is not None and not callable(placement) and not isinstance(placement, Mapping):
        raise ValueError(
            f"{gate}: placement={placement!r}; give a mapping from patterns of names to dimensions, "
            'such as {"*.fc1.weight": {"tp": 0}}, or a function (name, rank)'
        )


def by_attributes(
    tensor: torch.Tensor, whole: str, shape: tuple[int, ...], coordinates: Coordinates
) -> list[Slice] | None:
    """Return the slice that Megatron's attributes declare.

    Those are `tensor_model_parallel`, `partition_dim` and `partition_stride`, and `allreduce`, which is False for the
    parameters of experts. With a stride of s, a rank holds s equal parts, one of each s-th of the dimension, as of a
    fused weight. Experts are divided over the axes "ep" and "etp". None where the attributes declare nothing, or the
    rank's place among those that share the tensor is not known.
    """
    if is_of_expert(tensor):
        return _of_expert(tensor, whole, shape, coordinates)
    dim = getattr(tensor, "partition_dim", -1)
    if not getattr(tensor, "tensor_model_parallel", False) or not 0 <= dim < len(shape):
        return None
    parts, rest = divmod(shape[dim], max(1, tensor.shape[dim]))
    if rest:
        return None
    place = next((place for axis in ("tp", _WORLD) if (place := coordinates.get(axis)) and place[1] == parts), None)
    if place is None:
        return None
    stride = max(1, getattr(tensor, "partition_stride", 1))
    rows = torch.arange(shape[dim]).chunk(stride * parts)[place[0] :: parts]
    return [Slice(whole, shape, indexed(shape, (*[slice(None)] * dim, torch.cat(rows))))]


def is_of_expert(tensor: torch.Tensor) -> bool:
    """Return whether Megatron's attribute `allreduce` says that a parameter belongs to an expert.

    Its gradient is reduced over the ranks with the same experts only. So it is not what has its name on other ranks.
    """
    return getattr(tensor, "allreduce", True) is False


def _of_expert(
    tensor: torch.Tensor, whole: str, shape: tuple[int, ...], coordinates: Coordinates
) -> list[Slice] | None:
    if tensor.dim() != len(shape):
        return None
    positions = indexed(shape, ...).view(shape)
    used: set[str] = set()
    within = "etp" if "etp" in coordinates else "tp"
    for dim, (size, here) in enumerate(zip(shape, tensor.shape, strict=True)):
        parts, rest = divmod(size, max(1, here))
        if rest:
            return None
        if parts > 1:
            inside = getattr(tensor, "tensor_model_parallel", False) and getattr(tensor, "partition_dim", -1) == dim
            axes = [axis for axis in ("ep", *[within] * inside) if axis not in used]
            fitting = [axis for axis in axes if axis in coordinates and coordinates[axis][1] == parts]
            if not fitting and coordinates.get(_WORLD, (0, 0))[1] == parts:
                fitting = [_WORLD]
            if len({coordinates[axis] for axis in fitting}) != 1:
                return None  # or two axes have as many ranks
            positions = positions.chunk(parts, dim)[coordinates[fitting[0]][0]]
            used.add(fitting[0])
    return [Slice(whole, shape, positions.reshape(-1))] if used else None


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


def _axes(coordinates: Coordinates) -> Sequence[str]:
    return [axis for axis in coordinates if axis] or ["(none)"]
