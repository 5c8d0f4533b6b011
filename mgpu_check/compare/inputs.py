"""Combine the hashes of a model's inputs into hashes of samples.

Tensors beside the batch, such as a mask for all samples, have as many rows on a rank as on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Inputs(NamedTuple):
    """The tensors that a module received, as hashes of their slices along the first and the second dimension."""

    module: str
    rows: list[list[int]]
    columns: list[list[int]]


def samples_of(tensors: Sequence[list[int]], chosen: Sequence[int] | None = None) -> list[int]:
    """Return a hash of each sample, which consists of its slices in several tensors.

    Args:
        chosen: positions of these tensors; None: the first tensor that has slices, and all with as many.
    """
    if chosen is None:
        count = next((len(rows) for rows in tensors if rows), 0)
        chosen = [position for position, rows in enumerate(tensors) if len(rows) == count]
    parts = [tensors[position] for position in chosen if position < len(tensors)]
    sums = (sum(part * (2 * n + 1) for n, part in enumerate(sample)) for sample in zip(*parts, strict=False))
    return [(total + 2**63) % 2**64 - 2**63 for total in sums]


def divided_tensors(runs: Sequence[Sequence[list[int]]]) -> list[int] | None:
    """Return the positions of the tensors that have a slice for each sample; None if the runs have other tensors.

    Args:
        runs: the tensors on one device, then those on each rank.
    """
    if len({len(tensors) for tensors in runs}) > 1:
        return None
    counts = [tuple(map(len, tensors)) for tensors in zip(*runs, strict=True)]
    whole = [count for count in counts if all(count)]
    split = [count for count in whole if len(set(count)) > 1] or [count for count in whole if count[0] > 1] or whole
    return [position for position, count in enumerate(counts) if count == split[0]] if split else None
