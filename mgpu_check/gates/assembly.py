"""Assemble the slices that ranks hold, for the comparison with the whole tensors of one device."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mgpu_check.diagnosis.observed import HeldPiece, ObservedRun
from mgpu_check.diagnosis.results import Result
from mgpu_check.numerics.placement.slices import Slice, indexed
from mgpu_check.numerics.placement.slices import assembled as joined
from mgpu_check.processes.rank_lists import named
from mgpu_check.torch_hooks.tensors import digest_of

_CLOSE = 1e-3
"""Tolerance, as a fraction of the magnitude: replicas of a slice of an optimizer's state differ by rounding only."""

Parts = dict[Result, list[tuple[int, Slice, torch.Tensor]]]
"""By result: the rank that holds a slice, the slice, and the local tensor that has it."""


@dataclass(frozen=True)
class _Whole:
    """A result assembled from slices, once per rank: its own slices, and slices of others in the gaps."""

    views: list[torch.Tensor]
    own: list[torch.Tensor]
    placement: str
    gap: str


def holders_of(seen: Sequence[ObservedRun]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for name in set().union(*(one.unused for one in seen)):
        found[name] |= {rank for rank, one in enumerate(seen) if name not in one.unused or not _trains(one)}
    return found


def assembled(
    seen: Sequence[ObservedRun],
    holders: Mapping[str, set[int]] | None = None,
    returns: Callable[[int], bool] | None = None,
) -> list[ObservedRun]:
    """Return the observations of ranks, with every divided result assembled on every rank."""
    held = {name: ranks for name, ranks in (holders or {}).items() if 0 < len(ranks) < len(seen)}
    divided = any(one.pieces or one.unplaced for one in seen) or bool(held)
    divided |= len(seen) > 1 and (_names_differ(seen) or any(one.idle != seen[0].idle for one in seen))
    if not divided and returns is None:
        return list(seen)
    found = [
        replace(one, values=dict(one.values), digests=dict(one.digests), others=dict(one.others), snapshots=[])
        for one in seen
    ]
    values = [one.values for one in seen]
    pieces = [one.pieces for one in seen]
    if returns is not None:
        _take_returned(found, values, returns)
    idle = [one.idle for one in seen]
    for name, whole in _wholes(values, pieces, held, idle):
        for rank, one in enumerate(found):
            one.values[name], one.own[name] = whole.views[rank], whole.own[rank]
            one.digests[name] = digest_of(whole.views[rank])
            one.placements[name] = whole.placement
            if whole.gap:
                one.gaps[name] = whole.gap
    steps = max((len(one.snapshots) for one in seen), default=0)
    for step in range(steps):
        there = [one.snapshots[step] if step < len(one.snapshots) else {} for one in seen]
        slices = [one.pieces_of_steps[step] if step < len(one.pieces_of_steps) else [] for one in seen]
        stages = [dict(stage) for stage in there]
        for name, whole in _wholes(there, slices, held, idle):
            for stage, view in zip(stages, whole.views, strict=True):
                stage[name] = view
        for one, stage in zip(found, stages, strict=True):
            one.snapshots.append(stage)
    return _alike(found)


def _trains(one: ObservedRun) -> bool:
    return bool(one.trained or one.pieces)


def _names_differ(seen: Sequence[ObservedRun]) -> bool:
    """Return whether ranks with digests have results of different names, except returned ones."""
    names = [one.digests.keys() for one in seen if one.digests]
    return any(name.kind != "returned" for one in names for name in one ^ names[0])


def _take_returned(
    found: Sequence[ObservedRun], values: Sequence[Mapping[Result, torch.Tensor]], returns: Callable[[int], bool]
) -> None:
    """Replace the returned values of ranks that do not count by the values of the first rank that counts."""
    telling = [rank for rank in range(len(found)) if returns(rank)] or list(range(len(found)))
    for rank, one in enumerate(found):
        source = found[telling[0]] if rank not in telling else None
        if source is None:
            continue
        for name in [name for name in one.digests.keys() | one.values.keys() if name.kind == "returned"]:
            one.values.pop(name, None)
            one.digests.pop(name, None)
        one.others = {name: text for name, text in one.others.items() if name.kind != "returned"}
        for name, value in values[telling[0]].items():
            if name.kind == "returned":
                one.values[name] = value
                if name in source.digests:  # absent in a varied run
                    one.digests[name] = source.digests[name]
                one.own[name] = torch.zeros(value.shape, dtype=torch.bool)
        one.others |= {name: text for name, text in source.others.items() if name.kind == "returned"}


def _wholes(
    values: Sequence[Mapping[Result, torch.Tensor]],
    pieces: Sequence[Sequence[HeldPiece]],
    held: Mapping[str, set[int]],
    idle: Sequence[set[str]],
) -> Iterator[tuple[Result, _Whole]]:
    """Yield each result that is divided among ranks, assembled.

    Args:
        held: the ranks that use a parameter or buffer, if some ranks do not.
        idle: by rank, the parameters that no optimizer of the rank steps. Their gradients count only if no other rank's
            do.
    """
    parts: Parts = defaultdict(list)
    for rank, some in enumerate(pieces):
        for piece in some:
            parts[piece.name].append((rank, piece.slice, piece.value))
    shapes: dict[str, tuple[int, ...]] = {
        name.of: part.shape for name, several in parts.items() for _, part, _ in several if name.kind == "params"
    }
    names = dict.fromkeys(itertools.chain(parts, *values))
    for name in names:
        if name.kind in ("returned", "rng"):
            continue
        owner = name.parameter
        users = held.get(owner, set(range(len(values))))
        if name.kind == "grads":
            users = {rank for rank in users if owner not in idle[rank]} or users
        mine = [entry for entry in parts.get(name, ()) if entry[0] in users]
        with_pieces = {rank for rank, _, _ in mine}
        shape = shapes.get(owner) or next((tuple(v.shape) for v in _of_owner(values, owner)), None)
        whole = [
            (rank, value)
            for rank, one in enumerate(values)
            if (value := one.get(name)) is not None and rank in users and rank not in with_pieces
        ]
        if name.kind == "optimizer" and not mine and shape is not None and _is_state_in_chunks(whole, shape):
            mine, whole = _in_order(name, whole, shape, len(values)), []
        if not mine and (len(whole) in (0, len(values)) or any(not one for one in values)):
            continue
        if mine and _all_hold_the_same(mine, len(values)):
            continue
        mine += [(rank, Slice(name.of, tuple(value.shape)), value) for rank, value in whole]
        size = mine[0][1].shape
        mine = [entry for entry in mine if entry[1].shape == size]
        yield name, _put_together(mine, len(values))


def _of_owner(values: Sequence[Mapping[Result, torch.Tensor]], owner: str) -> Iterator[torch.Tensor]:
    return (one[Result("params", owner)] for one in values if Result("params", owner) in one)


def _all_hold_the_same(mine: Sequence[tuple[int, Slice, torch.Tensor]], size: int) -> bool:
    """Return whether every rank holds the same part of a tensor: then the step has cut the tensor, not divided it."""
    first = mine[0][1]
    return (
        size > 1
        and len(mine) == size
        and first.at is not None
        and not bool(first.mask.all())
        and all(part.at is not None and torch.equal(part.at, first.at) for _, part, _ in mine)
    )


def _put_together(mine: Sequence[tuple[int, Slice, torch.Tensor]], size: int) -> _Whole:
    base = joined([(part, local) for _, part, local in mine])
    views, own = [], []
    for rank in range(size):
        held = [(part, local) for other, part, local in mine if other == rank]
        mask = torch.zeros(base.value.shape, dtype=torch.bool)
        view = base.value
        if held:
            view = base.value.clone()
        for part, local in held:
            part.put(local, view)
            mask |= part.mask
        views.append(view)
        own.append(mask)
    told: dict[str, list[int]] = defaultdict(list)
    for rank, mask in enumerate(own):
        at = mask.view(-1).nonzero().flatten()
        told[str(Slice("", tuple(mask.shape), None if bool(mask.all()) else at))].append(rank)
    placement = "; ".join(f"{what} on {named(ranks)}" for what, ranks in told.items())
    gap = ""
    if base.missing is not None:
        gap = str(Slice("", tuple(base.missing.shape), base.missing.view(-1).nonzero().flatten()))
    return _Whole(views, own, placement, gap)


def _is_state_in_chunks(whole: Sequence[tuple[int, torch.Tensor]], shape: tuple[int, ...]) -> bool:
    """Return whether ranks hold chunks of a state along one dimension, as optimizers with sharded states do."""
    return bool(whole) and all(
        value.dim() == len(shape)
        and len(cut := [d for d in range(len(shape)) if value.shape[d] != shape[d]]) == 1
        and value.shape[cut[0]] < shape[cut[0]]
        for _, value in whole
    )


def _in_order(
    name: Result, whole: Sequence[tuple[int, torch.Tensor]], shape: tuple[int, ...], size: int
) -> list[tuple[int, Slice, torch.Tensor]]:
    """Return the chunks of a state by rank; with replicas, in the order that makes replicas agree."""
    first = whole[0][1]
    dim = next(d for d in range(len(shape)) if first.shape[d] != shape[d])
    count = -(-shape[dim] // max(1, first.shape[dim]))
    orders = [[rank % count for rank, _ in whole], [rank // max(1, size // count) for rank, _ in whole]]
    chunks = torch.arange(shape[dim]).chunk(count)
    best: list[tuple[int, Slice, torch.Tensor]] = []
    for order in orders:
        if any(
            index >= len(chunks) or len(chunks[index]) != value.shape[dim]
            for index, (_, value) in zip(order, whole, strict=True)
        ):
            continue
        found = [
            (rank, Slice(name.of, shape, indexed(shape, (*[slice(None)] * dim, chunks[index]))), value)
            for index, (rank, value) in zip(order, whole, strict=True)
        ]
        by_chunk = {index: value for index, (_, value) in zip(order, whole, strict=True)}
        if all(_near(value, by_chunk[index]) for index, (_, value) in zip(order, whole, strict=True)):
            return found
        best = best or found
    return best


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one - other).abs() <= _CLOSE * other.abs().max()).all()) if one.numel() else True


def _alike(found: list[ObservedRun]) -> list[ObservedRun]:
    """Give each rank the touched and trained names of all ranks, since parts of one model are trained together."""
    touched, trained = set().union(*(one.touched for one in found)), set().union(*(one.trained for one in found))
    unplaced = {label: why for one in found for label, why in one.unplaced.items()}
    optimizers = max(one.optimizers for one in found)
    settings = {name: known for one in reversed(found) for name, known in one.settings.items()}
    for one in found:
        one.settings = settings | one.settings
        one.touched, one.trained, one.unplaced, one.optimizers = touched, trained, unplaced, optimizers
    return found
