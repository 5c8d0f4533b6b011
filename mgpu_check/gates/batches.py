"""The global batches of a scenario, made on every rank from one seed, and what is done to them to provoke."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mgpu_check.torch_hooks.nested import tensors_of, with_tensors
from mgpu_check.torch_hooks.seeds import seed_everything

__all__ = [
    "changed",
    "has_padding",
    "make_batches",
    "samples_in",
    "wider",
]

_REDRAWS = 32
"""Most draws of lengths: two samples have equal lengths in one of four cases, where four lengths are possible."""
_IGNORED = -100
"""What torch's losses take for "no label" unless told otherwise."""


def make_batches(
    batch: Callable[[int], Any] | None,
    drawn: Sequence[Any],
    samples: int,
    steps: int,
    change: str,
    factor: float,
    seed: int,
) -> list[Any]:
    """Return the global batch of each step. Equal arguments give equal batches, as far as the user's function does."""
    batches = []
    for step in range(steps):
        seed_everything(1000 * seed + step)
        made = drawn[step] if batch is None else batch(samples)
        batches.append(changed(made, change, factor=factor, seed=1000 * seed + step) if change else made)
    return batches


def samples_in(batch: Any) -> int:
    """Return the length of the first dimension that the tensors of a batch have in common, mostly.

    That of the most of them; of the first tensor where none is more frequent. 0 for a batch without tensors.
    """
    lengths = [leaf.shape[0] for leaf in tensors_of(batch) if leaf.dim()]
    return max(lengths, key=lengths.count) if lengths else 0


def changed(batch: Any, change: str, *, factor: float = 1024.0, seed: int = 0) -> Any:
    """Return `batch` with its samples in another order, repeated, of another size, or padded; see `CHANGES`.

    Only tensors whose first dimension is that of the samples change. A batch that has nothing to be changed in that
    way (no floating-point data to scale, no padding) comes back as it is.

    - "scaled": floating-point values times `factor`, so that limits on norms, or of narrow dtypes, are reached.
    - "ragged": in labels that have padding (-100), or masks, each sample keeps another part of its positions.
    - "sorted": by the first value of each sample, so that ranks get samples of different size.
    - "duplicated": the second half of the samples repeats the first.
    - "permuted": in random order.
    """
    leaves = tensors_of(batch)
    count = samples_in(batch)
    generator = torch.Generator().manual_seed(seed)
    mine = [leaf.dim() > 0 and leaf.shape[0] == count for leaf in leaves]
    if change == "scaled":
        new = [
            leaf * factor if own and leaf.is_floating_point() else leaf for leaf, own in zip(leaves, mine, strict=True)
        ]
    elif change == "ragged":
        new = _ragged(leaves, mine, count, generator)
    else:
        order = _order(change, leaves, mine, count, generator)
        new = [leaf[order] if own else leaf for leaf, own in zip(leaves, mine, strict=True)]
    return with_tensors(batch, new)


def _order(
    change: str, leaves: Sequence[Any], mine: Sequence[bool], count: int, generator: torch.Generator
) -> torch.Tensor:
    if change == "permuted":
        return torch.randperm(count, generator=generator)
    if change == "duplicated":
        return torch.arange(count) % max(1, (count + 1) // 2)
    assert change == "sorted", change
    first = next((leaf for leaf, own in zip(leaves, mine, strict=True) if own), None)
    if first is None or not first.numel() or first.is_complex():
        return torch.arange(count)
    order: torch.Tensor = first.reshape(count, -1)[:, 0].argsort(stable=True)
    return order


def _ragged(leaves: Sequence[Any], mine: Sequence[bool], count: int, generator: torch.Generator) -> list[Any]:
    """Return the same valid length for each sample in all that tells which positions count, by what is valid there
    already.
    """
    padded = [own and _is_padded(leaf) for leaf, own in zip(leaves, mine, strict=True)]
    longest = max((_most_valid(leaf) for leaf, has in zip(leaves, padded, strict=True) if has), default=0)
    if not longest:
        return list(leaves)
    lengths = _lengths(longest, count, generator)
    new = []
    for leaf, has in zip(leaves, padded, strict=True):
        if not has:
            new.append(leaf)
            continue
        labels, valid = not _is_mask(leaf), _valid(leaf)
        # Of the positions that count, the first ones; those that count nowhere are left as they are.
        beyond = valid & (valid.cumsum(1) > lengths.view(-1, *[1] * (leaf.dim() - 1)))
        new.append(leaf.masked_fill(beyond, _IGNORED if labels else 0))
    return new


def _valid(leaf: torch.Tensor) -> torch.Tensor:
    return (leaf != 0) if _is_mask(leaf) else (leaf != _IGNORED)


def _most_valid(leaf: torch.Tensor) -> int:
    """Return the largest number of positions that count in one sample."""
    return int(_valid(leaf).sum(1).max()) if len(leaf) else 0


def _lengths(longest: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return random lengths that add up to unequal numbers on ranks, in blocks and in strides, where that can be drawn."""
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    for _ in range(_REDRAWS):
        parts = [
            part
            for k in (2, 3, 4)
            if k <= count
            for part in ([lengths[i::k] for i in range(k)], lengths.tensor_split(k))
        ]
        if all(len({int(one.sum()) for one in part}) > 1 for part in parts):
            break
        lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    return lengths


def has_padding(batch: Any) -> bool:
    """Return whether some tensor tells which positions of each sample count."""
    return any(_is_padded(leaf) for leaf in tensors_of(batch))


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
    """Return `value` with float32 tensors in float64, and complex64 in complex128, in any structure."""
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return with_tensors(value, [leaf.to(wide.get(leaf.dtype, leaf.dtype)) for leaf in tensors_of(value)])
