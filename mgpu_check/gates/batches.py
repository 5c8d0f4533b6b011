"""Make the global batches of a scenario on every rank from one seed, and change them to provoke mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mgpu_check.torch_hooks.nested import tensors_of, with_tensors
from mgpu_check.torch_hooks.seeds import seed_everything

_REDRAWS = 32
"""Most draws of lengths.

Two samples with four possible lengths tie in a quarter of the draws, so 32 draws hardly all tie.
"""
_IGNORED = -100
"""The label that torch's losses ignore by default."""


def make_batches(
    batch: Callable[[int], Any] | None,
    drawn: Sequence[Any],
    samples: int,
    steps: int,
    change: str,
    factor: float,
    seed: int,
) -> list[Any]:
    """Return the global batch of each step.

    Equal arguments give equal batches if the user's function is deterministic.
    """
    batches = []
    for step in range(steps):
        seed_everything(1000 * seed + step)
        made = drawn[step] if batch is None else batch(samples)
        batches.append(changed(made, change, factor=factor, seed=1000 * seed + step) if change else made)
    return batches


def samples_in(batch: Any) -> int:
    """Return the most frequent length of the first dimension among the tensors of a batch.

    On a tie the first tensor decides. 0 for a batch without tensors that have a dimension.
    """
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
    """Cut the valid positions of each sample to a random number, the same one in all masks and padded labels."""
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
        # Keep the first valid positions of each sample; positions that were never valid do not change.
        beyond = valid & (valid.cumsum(1) > lengths.view(-1, *[1] * (leaf.dim() - 1)))
        new.append(leaf.masked_fill(beyond, _IGNORED if labels else 0))
    return new


def _valid(leaf: torch.Tensor) -> torch.Tensor:
    return (leaf != 0) if _is_mask(leaf) else (leaf != _IGNORED)


def _most_valid(leaf: torch.Tensor) -> int:
    """Return the largest number of valid positions in one sample."""
    return int(_valid(leaf).sum(1).max()) if len(leaf) else 0


def _lengths(longest: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw lengths whose sums differ between ranks, for batches split in blocks or in strides."""
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
    """Return whether some tensor is a mask, or has padded labels."""
    return any(_is_padded(leaf) for leaf in tensors_of(batch))


def has_equal_lengths(batches: Sequence[Any]) -> bool | None:
    """Return whether all samples have as many valid positions; None without tokens, labels or masks of positions."""
    leaves = [leaf for leaf in tensors_of(batches) if leaf.dim() > 1 and (_is_padded(leaf) or not _is_number(leaf))]
    if not leaves:
        return None
    return all(len(set(_valid(leaf).flatten(1).sum(1).tolist())) <= 1 for leaf in leaves)


def _is_number(leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


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
