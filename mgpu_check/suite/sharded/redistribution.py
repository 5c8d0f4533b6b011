"""Check redistribution of DTensors: each rank must hold its part of the whole afterwards, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import rand as uniform_tensor
from torch.distributed.tensor import randn as random_tensor
from torch.nn import functional

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ShardError
from mgpu_check.oracles.agreement import difference
from mgpu_check.oracles.pairs import near_square
from mgpu_check.torch_hooks.tensors import name_of, plain

_MOVED = ("float32", "bfloat16", "int64", "bool", "complex64", "float64", "uint8", "float16", "int32")
_REDUCED = ("float32", "int64", "bfloat16", "float64", "int32", "float16")
_FLOATS = ("float32", "float64")
_WHOLE = (Shard(0), Shard(1), Replicate())


_Pairs = list[tuple[tuple[Placement, ...], tuple[Placement, ...]]]
_PAIRS: _Pairs = [
    ((Shard(0), Shard(0)), (Replicate(), Replicate())),
    ((Replicate(), Replicate()), (Shard(0), Shard(0))),
    ((Shard(0), Shard(1)), (Shard(1), Shard(0))),
    ((Shard(0), Shard(0)), (Shard(0), Shard(1))),
    ((Shard(1), Shard(0)), (Replicate(), Shard(0))),
    ((Replicate(), Shard(0)), (Shard(0), Replicate())),
    ((Shard(0), Replicate()), (Shard(0), Shard(0))),
    ((Partial("sum"), Partial("sum")), (Replicate(), Replicate())),
    ((Partial("sum"), Partial("sum")), (Shard(0), Shard(0))),
    ((Partial("sum"), Shard(0)), (Shard(0), Shard(1))),
    ((Shard(1), Partial("sum")), (Shard(1), Shard(0))),
    ((Partial("max"), Replicate()), (Shard(1), Shard(0))),
    ((Replicate(), Partial("min")), (Replicate(), Shard(1))),
]
"""Pairs of placements on a mesh of two dimensions that move data across both."""

_AVERAGES: _Pairs = [
    ((Replicate(), Partial("avg")), (Replicate(), Replicate())),
    ((Shard(0), Partial("avg")), (Shard(0), Shard(1))),
    ((Partial("avg"), Partial("avg")), (Replicate(), Replicate())),
]
"""Pairs from averages, which are exact on powers of two ranks only."""


def _every_pair(partial: Sequence[Partial]) -> _Pairs:
    """Return every pair of placements on a mesh of two dimensions. Sums and maxima do not occur together."""
    places = (*_WHOLE, *partial)
    sources = [
        (outer, inner)
        for outer, inner in itertools.product(places, repeat=2)
        if outer == inner or not (isinstance(outer, Partial) and isinstance(inner, Partial))
    ]
    return list(itertools.product(sources, itertools.product(_WHOLE, repeat=2)))


@dataclass(frozen=True)
class _RedistributionCase:
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: tuple[Placement, ...]
    target: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{name_of(self.dtype)}{list(self.shape)} from {text_of(self.source)} to {text_of(self.target)}"


def assert_redistribution_agrees(rank: Rank, seed: int, *, dimensions: int) -> None:
    """Assert that redistributed DTensors have the right parts, over a mesh of one or two dimensions. A collective.

    In one dimension every pair of placements is tried; in two, all of `_PAIRS` and others by `seed`, which rotates the
    dtypes. Partial tensors have exact sums. Random numbers must differ between shards, and be equal between replicas.
    """
    mesh = init_device_mesh("cuda", (rank.size,) if dimensions == 1 else near_square(rank.size))
    messages = []
    for number, case in enumerate(_cases(rank.size, seed, dimensions)):
        full_tensor = _whole(case, seed + number)
        dtensor = placed(full_tensor, case.source, mesh).redistribute(mesh, case.target)
        messages.append(_wrong(dtensor, part_of(full_tensor, case.target, mesh), case))
        if number % 8 == 0 or case.target == (Shard(0), Shard(0)):
            messages.append(compared(dtensor.full_tensor(), full_tensor, f"{case}, full_tensor"))
    messages += list(_distributed(rank, mesh, seed))
    messages += list(_drawn(rank, mesh, seed))
    require_none_wrong(messages, rank)


def require_none_wrong(messages: Iterable[str | None], rank: Rank) -> None:
    """Require that `messages` describes no error of a DTensor on this rank; None means that a DTensor is right.
    The ShardError has the first description, and the number of the others."""
    texts = [text for text in messages if text]
    if texts:
        suffix = f"; and {len(texts) - 1} more are wrong" if texts[1:] else ""
        raise ShardError(f"DTensor on {rank.device}, rank {rank.index}: {texts[0]}{suffix}", ranks=[rank.index])


def _cases(ranks: int, seed: int, dimensions: int) -> list[_RedistributionCase]:
    shapes = [(2 * ranks + 1, ranks + 2), (2 * ranks, 3 * ranks), (max(1, ranks - 1), 5), (5, ranks, 3)]
    partial = [Partial("sum"), Partial("max"), Partial("min")]
    # NCCL multiplies by 1/n before it sums, which rounds unless n is a power of two.
    if ranks & (ranks - 1) == 0:
        partial.append(Partial("avg"))
    pairs: _Pairs
    if dimensions == 1:
        pairs = [((source,), (target,)) for source in (*_WHOLE, *partial) for target in _WHOLE]
    else:
        pairs = _PAIRS + _AVERAGES * (Partial("avg") in partial) + _every_pair(partial[:3])[seed % 90 :: 90]
    cases = []
    for number, (source, target) in enumerate(pairs):
        reduces = any(isinstance(placement, Partial) for placement in source)
        dtype_names: tuple[str, ...] = _FLOATS if Partial("avg") in source else _REDUCED if reduces else _MOVED
        dtype = getattr(torch, dtype_names[(seed + number) % len(dtype_names)])
        cases.append(_RedistributionCase(shapes[(seed + number) % len(shapes)], dtype, source, target))
        if number % 5 == 0:  # so that every example has some uneven shapes
            cases.append(_RedistributionCase(shapes[0], torch.float32, source, target))
    outer = (Replicate(),) * (dimensions - 1)
    large = (4 * ranks + 1, 65_537 // (4 * ranks) + 3)
    for own, wanted in ((Shard(0), Replicate()), (Partial("sum"), Shard(0)), (Shard(0), Shard(1))):
        cases.append(_RedistributionCase(large, torch.float32, (*outer, own), (*outer, wanted)))
    return cases


def _whole(case: _RedistributionCase, seed: int) -> torch.Tensor:
    """Return whole numbers, exact in every dtype, that differ from their neighbours (booleans alternate)."""
    index = torch.arange(torch.Size(case.shape).numel()).reshape(case.shape)
    values = (index * 7 + seed) % 97 + 1
    if case.dtype.is_complex:
        return torch.complex(values.double(), -(values % 13).double()).to(case.dtype)
    return (values % 2 == 0) if case.dtype == torch.bool else values.to(case.dtype)


def part_of(tensor: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> torch.Tensor:
    """Return the part that this rank must hold, by taking its chunk for each dimension of the mesh in order."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh"
    for dim, (placement, position) in enumerate(zip(placements, coordinate, strict=True)):
        if isinstance(placement, Shard):
            whole = tensor.shape[placement.dim]
            size = -(-whole // mesh.size(dim))
            start = min(size * position, whole)
            tensor = tensor.narrow(placement.dim, start, min(size, whole - start))
    return tensor


def placed(full_tensor: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> DTensor:
    """Make a DTensor from local parts, without a collective."""
    shard = part_of(full_tensor, placements, mesh).clone()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh"
    for dim, (placement, position) in enumerate(zip(placements, coordinate, strict=True)):
        if not isinstance(placement, Partial):
            continue
        size = mesh.size(dim)
        if placement.reduce_op == "sum":
            # Parts differ between ranks and elements; the last rank holds the remainder.
            places = torch.arange(shard.numel()).reshape(shard.shape)
            parts = [((places + index) % 3 + index + 1).to(shard.dtype) for index in range(size - 1)]
            shard = shard - sum(parts) if position == size - 1 else parts[position]
        elif placement.reduce_op == "avg":
            shard = shard * size - sum(range(size - 1)) if position == size - 1 else torch.full_like(shard, position)
        else:
            # For each element one rank holds the extreme; the others hold values off by 1 + their coordinate.
            holder = torch.arange(shard.numel()).reshape(shard.shape) % size
            off = (holder != position) * (1 + position)
            shard = shard - off.to(shard.dtype) if placement.reduce_op == "max" else shard + off.to(shard.dtype)
    device = torch.device(mesh.device_type, torch.cuda.current_device())
    return _of_part(shard.to(device), full_tensor, placements, mesh)


def _of_part(own: torch.Tensor, whole: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _targets(mesh: DeviceMesh, seed: int) -> list[tuple[Placement, ...]]:
    """Return placements of whole tensors: all in one dimension, one by `seed` in two."""
    if mesh.ndim == 1:
        return [(placement,) for placement in _WHOLE]
    return [((Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Shard(1)))[seed % 3]]


def _distributed(rank: Rank, mesh: DeviceMesh, seed: int) -> Iterator[str | None]:
    """Distribute the tensor of one rank, while the others pass different values, and yield the errors.
    Some ranks get several rows and others fewer or none."""
    rows = 2 * rank.size + 1, max(1, rank.size - 1)
    for number, (target, long) in enumerate(itertools.product(_targets(mesh, seed), rows)):
        case = _RedistributionCase((long, rank.size + 1), torch.float32, (), target)
        full_tensor = _whole(case, seed + number)
        # With None each rank keeps its part of its own tensor.
        source = (0, mesh.size() - 1 if mesh.ndim == 1 else 0, None)[(seed + number) % 3]
        dtensor = distribute_tensor((full_tensor + rank.index).to(rank.device), mesh, target, src_data_rank=source)
        expected = full_tensor + (rank.index if source is None else source)
        text = _wrong(dtensor, part_of(expected, target, mesh), case)
        yield text and f"distribute_tensor, src_data_rank={source}: {text}"


def _drawn(rank: Rank, mesh: DeviceMesh, seed: int) -> Iterator[str | None]:
    """Draw random numbers in each placement, apply dropout to shards, and yield the errors."""
    for number, target in enumerate(_targets(mesh, seed)):
        draw = (random_tensor, uniform_tensor)[(seed + number) % 2]
        dtype, trained = getattr(torch, _FLOATS[(seed + number) % 2]), (seed + number) % 3 == 0
        options: dict[str, Any] = {"dtype": dtype, "requires_grad": trained, "placements": target}
        dtensor: Any = draw(2 * rank.size, 64 * rank.size, device_mesh=mesh, **options).detach()
        subject = f"random numbers as {text_of(target)}"
        local = plain(dtensor.to_local())
        if not torch.equal(part_of(plain(dtensor.full_tensor()), target, mesh), local):
            yield f"{subject}: the whole does not have this rank's part"
        yield _wrongly_shared(dtensor.to_local(), target, mesh, subject)
        if mesh.ndim == 1 and isinstance(target[0], Shard):
            dropped: Any = functional.dropout(torch.ones_like(dtensor), 0.5)
            yield _wrongly_shared(dropped.to_local(), target, mesh, f"elements kept by dropout of {text_of(target)}")


def _wrongly_shared(own: torch.Tensor, target: Sequence[Placement], mesh: DeviceMesh, subject: str) -> str | None:
    """Describe two ranks that hold one part but not equal numbers, or two parts but equal numbers; None without any.
    With 128 elements or more, equal parts are no coincidence. A collective."""
    shards = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(shards, own.contiguous())
    divided = [dim for dim, placement in enumerate(target) if isinstance(placement, Shard)]
    coordinates = itertools.product(*map(range, mesh.shape))
    places = {int(mesh.mesh[at]): [at[dim] for dim in divided] for at in coordinates}
    for rank, peer in itertools.combinations(sorted(places), 2):
        alike = places[rank] == places[peer]
        if torch.equal(shards[rank], shards[peer]) != alike:
            return f"{subject}: ranks {rank} and {peer} hold {'different' if alike else 'the same'} ones"
    return None


def _wrong(dtensor: DTensor, expected: torch.Tensor, case: _RedistributionCase) -> str | None:
    if tuple(dtensor.placements) != case.target or tuple(dtensor.shape) != case.shape:
        return f"{case} is {text_of(dtensor.placements)} of {tuple(dtensor.shape)}"
    return compared(dtensor.to_local(), expected, f"{case}, own part")


def compared(got: torch.Tensor, expected: torch.Tensor, subject: str) -> str | None:
    """Describe how a rank's tensor differs from the right one; None if all bits are equal."""
    text = difference(got, expected, "bits")
    return text and f"{subject}: {text}"


def text_of(placements: Sequence[Placement]) -> str:
    """Return placements as text, as torch writes them, in parentheses."""
    return f"({', '.join(str(placement) for placement in placements)})"


def assert_gradients_are_redistributed(rank: Rank, seed: int) -> None:
    """Assert that redistribution passes gradients back. A collective. The gradient of a gathered tensor must be reduced
    and scattered, and the gradient of a shard gathered or resharded."""
    mesh = init_device_mesh("cuda", (rank.size,))
    messages = []
    for number, rows in enumerate((2 * rank.size + 1, 2 * rank.size, max(1, rank.size - 1))):
        shape = (rows, 5)
        any_case = _RedistributionCase(shape, torch.float32, (), ())
        factors = [_whole(any_case, seed + number + 11 * peer) % 8 for peer in range(rank.size)]
        total, own = torch.stack(factors).sum(0), factors[rank.index]
        for source, target, grad_placement, back in (
            (Shard(0), Replicate(), Partial(), total),
            (Shard(1), Replicate(), Partial(), total),
            (Replicate(), Shard(0), None, factors[0]),
            (Shard(0), Shard(1), None, factors[0]),
        ):
            case = _RedistributionCase(shape, torch.float32, (source,), (target,))
            full_tensor = _whole(case, seed)
            leaf = part_of(full_tensor, [source], mesh).to(rank.device, copy=True).requires_grad_()
            moved = _of_part(leaf, full_tensor, [source], mesh).redistribute(mesh, [target])
            local = moved.to_local() if grad_placement is None else moved.to_local(grad_placements=[grad_placement])
            factor = own if grad_placement is not None else part_of(factors[0], [target], mesh)
            (local * factor.to(rank.device)).sum().backward()
            assert leaf.grad is not None
            messages.append(compared(leaf.grad, part_of(back, [source], mesh), f"gradient of {case}"))
    require_none_wrong(messages, rank)
