"""One case that a gate runs a step on: the mesh of its ranks, its options, and its global batches.

Every rank makes the batches from one seed. Some are changed to provoke mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.gate_arguments import is_count
from mgpu_check.numerics.placement import Coordinates
from mgpu_check.torch_hooks.nested import tensors_of, with_tensors
from mgpu_check.torch_hooks.switches import seed_everything

Mesh = tuple[tuple[str, int], ...]  # axes in order, the outermost first, with their sizes

Place = tuple[int, Mesh]  # a number of ranks, and their mesh, which may be empty


def check_meshes(
    gate: str, meshes: Iterable[Mapping[str, int]], largest: int, world_sizes: object, single_process: bool
) -> list[Mesh]:
    """Return the meshes that a user gives, without duplicates, the smallest first."""
    wanted = 'give mappings from axes to sizes, such as [{"dp": 2, "tp": 2}]'
    if world_sizes is not None:
        raise ValueError(f"{gate}: meshes and world_sizes are both given; the sizes of a mesh are its world size")
    if single_process:
        raise ValueError(
            f"{gate}: meshes and single_process=True are both given; a mesh needs a process for each device"
        )
    if isinstance(meshes, str | Mapping) or not isinstance(meshes, Iterable):
        raise ValueError(f"{gate}: meshes={meshes!r}; {wanted}")
    checked = [_checked(gate, "meshes", mesh, largest, wanted) for mesh in meshes]
    if not checked:
        raise ValueError(f"{gate}: meshes is empty; {wanted}")
    return sorted(dict.fromkeys(checked), key=size_of)


def check_places(gate: str, argument: str, worlds: object, largest: int) -> list[Place]:
    """Return the world sizes and meshes that a user gives, one or several, without duplicates, the smallest first."""
    wanted = f'give ints from 1 to {largest}, or mappings from axes to sizes, such as [2, {{"dp": 2, "tp": 2}}]'
    several = [worlds] if isinstance(worlds, str | Mapping) or not isinstance(worlds, Iterable) else list(worlds)
    places: list[Place] = []
    for world in several:
        if isinstance(world, int) and not isinstance(world, bool):
            if not 1 <= world <= largest:
                raise ValueError(f"{gate}: {argument} has {world}; {wanted} (more with --gpus=N)")
            places.append((world, ()))
        else:
            mesh = _checked(gate, argument, world, largest, wanted)
            places.append((size_of(mesh), mesh))
    if not places:
        raise ValueError(f"{gate}: {argument} is empty; {wanted}")
    return sorted(dict.fromkeys(places))


def _checked(gate: str, argument: str, axes: object, largest: int, wanted: str) -> Mesh:
    if not isinstance(axes, Mapping) or not axes:
        raise ValueError(f"{gate}: {argument} has {axes!r}; {wanted}")
    invalid = [axis for axis, size in axes.items() if not isinstance(axis, str) or not axis or not is_count(size)]
    if invalid:
        raise ValueError(f"{gate}: {argument} has {dict(axes)!r}; {wanted}, each size an int of at least 1")
    mesh = tuple(axes.items())
    if size_of(mesh) > largest:
        raise ValueError(
            f"{gate}: mesh {dict(axes)!r} needs {size_of(mesh)} ranks, and this run has {largest} devices; "
            "give smaller ones, or more devices with --gpus=N"
        )
    return mesh


def described(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh)


def where_is(world_size: int, mesh: Mesh) -> str:
    return f"mesh {described(mesh)}" if mesh else f"world size {world_size}"


def size_of(mesh: Sequence[tuple[str, int]]) -> int:
    return math.prod(size for _, size in mesh)


def mesh_of(rank: Rank, mesh: Mesh) -> DeviceMesh:
    """Make the mesh on this rank; every axis has size 1 if the rank is alone in its world."""
    shape = tuple(1 if rank.size == 1 else size for _, size in mesh)
    return init_device_mesh(rank.device.type, shape, mesh_dim_names=tuple(axis for axis, _ in mesh))


def place_in(mesh: Mesh, index: int) -> dict[str, int]:
    """Return the coordinates of a rank: the last axis varies fastest."""
    coordinates: dict[str, int] = {}
    for axis, size in reversed(mesh):
        index, coordinates[axis] = divmod(index, size)
    return {axis: coordinates[axis] for axis, _ in mesh}


def coordinates_of(rank: Rank) -> Coordinates:
    """Return the place of a rank in the world, and along each axis of its mesh."""
    coordinates = {"": (rank.index, rank.size)}
    if rank.mesh is not None and rank.mesh.mesh_dim_names:
        for axis in rank.mesh.mesh_dim_names:
            coordinates[axis] = rank.mesh.get_local_rank(axis), rank.mesh[axis].size()
    return coordinates


CHANGES = ("scaled", "ragged", "sorted", "duplicated", "permuted")
"""The ways to change a batch; see `mgpu_check.gates.search.scenarios`."""


@dataclass(frozen=True)
class Scenario:
    """One case: the ranks, the batches and the seed of a run.

    Hypothesis draws it in the pytest process (`families`), `Trials` may adapt it, and ranks make their batches from it.
    """

    world_size: int
    samples: int  # samples in each global batch; in the first one if batches are drawn
    steps: int = 1  # number of calls of the step, each with another batch
    change: str = ""  # one of `CHANGES`, or "" for unchanged batches
    factor: float = 1024.0  # factor of "scaled" batches
    seed: int = 0
    batches: tuple[Any, ...] = field(default=(), compare=False)  # the drawn batches, if the user gives a strategy
    mesh: Mesh = ()  # axes of the mesh and their sizes, if the user gives meshes
    apart: bool = False  # whether elements of parameters are made distinct, so that their values identify slices
    rewritten: bool = False  # whether gradients are read after the optimizer's step, instead of before it

    @property
    def place(self) -> tuple[int, Mesh]:
        return self.world_size, self.mesh

    @property
    def described(self) -> dict[str, object]:
        case: dict[str, object] = {"world size": self.world_size}
        if self.mesh:
            case["mesh"] = described(self.mesh)
        if self.samples:
            case["samples"] = self.samples
        case["steps"] = self.steps
        case["batch"] = f"scaled by {self.factor:g}" if self.change == "scaled" else self.change or "as made"
        case["seed"] = self.seed
        return case


_REDRAWS = 32  # of lengths: two samples with four possible lengths tie in a quarter of the draws, so hardly all 32 tie
_IGNORED = -100  # the label that torch's losses ignore by default


def make_batches(
    batch: Callable[[int], Any] | None,
    drawn: Sequence[Any],
    samples: int,
    steps: int,
    change: str,
    factor: float,
    seed: int,
) -> list[Any]:
    """Return the global batch of each step: the same for equal arguments, if the user's function is deterministic."""
    batches = []
    for step in range(steps):
        seed_everything(1000 * seed + step)
        global_batch = drawn[step] if batch is None else batch(samples)
        batches.append(
            changed(global_batch, change, factor=factor, seed=1000 * seed + step) if change else global_batch
        )
    return batches


def samples_in(batch: Any) -> int:
    """Return the most frequent length of the first dimension among the tensors of a batch, the first one on a tie."""
    lengths = [leaf.shape[0] for leaf in tensors_of(batch) if leaf.dim()]
    return max(lengths, key=lengths.count) if lengths else 0


def changed(batch: Any, change: str, *, factor: float = 1024.0, seed: int = 0) -> Any:
    """Return `batch` with its samples reordered, repeated, scaled or padded; see `CHANGES`.

    Only tensors whose first dimension counts the samples change. A batch without anything to change (no floating-point
    data to scale, no padding) is returned unchanged.

    - "scaled": multiply floating-point values by `factor`, to reach limits on norms and of narrow dtypes.
    - "ragged": in masks, and in labels with padding (-100), keep a different number of positions for each sample.
    - "sorted": sort the samples by their first value, so that ranks get samples of different size.
    - "duplicated": repeat the first half of the samples as the second half.
    - "permuted": reorder the samples at random.
    """
    leaves = tensors_of(batch)
    count = samples_in(batch)
    generator = torch.Generator().manual_seed(seed)
    mine = {number: leaf for number, leaf in enumerate(leaves) if leaf.dim() > 0 and leaf.shape[0] == count}
    if change == "scaled":
        new = {number: leaf * factor for number, leaf in mine.items() if leaf.is_floating_point()}
    elif change == "ragged":
        new = _ragged({number: leaf for number, leaf in mine.items() if _is_padded(leaf)}, count, generator)
    else:
        order = _order(change, next(iter(mine.values()), None), count, generator)
        new = {number: leaf[order] for number, leaf in mine.items()}
    return with_tensors(batch, [new.get(number, leaf) for number, leaf in enumerate(leaves)])


def _order(change: str, leaf: torch.Tensor | None, count: int, generator: torch.Generator) -> torch.Tensor:
    if change == "permuted":
        return torch.randperm(count, generator=generator)
    if change == "duplicated":
        return torch.arange(count) % max(1, (count + 1) // 2)
    assert change == "sorted", change
    if leaf is None or not leaf.numel() or leaf.is_complex():
        return torch.arange(count)
    return leaf.reshape(count, -1)[:, 0].argsort(stable=True)


def _ragged(padded: Mapping[int, torch.Tensor], count: int, generator: torch.Generator) -> dict[int, torch.Tensor]:
    """Cut the valid positions of each sample to a random number, the same one in all masks and padded labels."""
    longest = max((int(_valid(leaf).sum(1).max()) for leaf in padded.values() if len(leaf)), default=0)
    if not longest:
        return {}
    lengths, new = _lengths(longest, count, generator), {}
    for number, leaf in padded.items():
        valid = _valid(leaf)
        # Keep the first valid positions of each sample; positions that were never valid do not change.
        beyond = valid & (valid.cumsum(1) > lengths.view(-1, *[1] * (leaf.dim() - 1)))
        new[number] = leaf.masked_fill(beyond, 0 if _is_mask(leaf) else _IGNORED)
    return new


def _valid(leaf: torch.Tensor) -> torch.Tensor:
    return (leaf != 0) if _is_mask(leaf) else (leaf != _IGNORED)


def _lengths(longest: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw lengths whose sums differ between ranks, for batches split in blocks or in strides."""
    for _ in range(_REDRAWS + 1):
        lengths = torch.randint(1, longest + 1, (count,), generator=generator)
        world_sizes = [k for k in (2, 3, 4) if k <= count]
        strides = ([lengths[i::k] for i in range(k)] for k in world_sizes)
        divisions = [*strides, *map(lengths.tensor_split, world_sizes)]
        if all(len({int(share.sum()) for share in division}) > 1 for division in divisions):
            break
    return lengths


def has_padding(batch: Any) -> bool:
    """Return whether some tensor is a mask, or has padded labels."""
    return any(_is_padded(leaf) for leaf in tensors_of(batch))


def has_equal_lengths(batches: Sequence[Any]) -> bool | None:
    """Return whether all samples have as many valid positions; None without tokens, labels or masks of positions."""
    several = [leaf for leaf in tensors_of(batches) if leaf.dim() > 1]
    leaves = [leaf for leaf in several if _is_padded(leaf) or not (leaf.is_floating_point() or leaf.is_complex())]
    return all(len(set(_valid(leaf).flatten(1).sum(1).tolist())) <= 1 for leaf in leaves) if leaves else None


def _is_padded(leaf: torch.Tensor) -> bool:
    if leaf.dim() < 2 or (leaf.is_floating_point() and not _is_mask(leaf)):
        return False
    return _is_mask(leaf) or bool((leaf == _IGNORED).any())


def _is_mask(leaf: torch.Tensor) -> bool:
    if leaf.dtype == torch.bool:
        return True
    binary = bool(((leaf == 0) | (leaf == 1)).all())
    return binary and leaf.shape[-1] > 2 and bool((leaf == 1).any())


def wider(value: Any) -> Any:
    """Return `value`, of any structure, with float32 tensors widened to float64 and complex64 to complex128."""
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return with_tensors(value, [leaf.to(wide.get(leaf.dtype, leaf.dtype)) for leaf in tensors_of(value)])
