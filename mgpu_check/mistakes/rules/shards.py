"""Mistakes in what each rank computes of its own shard, where all ranks together have to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.mistakes.report import Finding
from mgpu_check.processes.rank_lists import named

if TYPE_CHECKING:
    from mgpu_check.mistakes.observed import Event
    from mgpu_check.mistakes.tensors import Tensors

__all__ = ["buffers_of_one_part", "norm_of_shards"]

_SAME = 1e-4
"""Relative: two computations of one norm."""


def norm_of_shards(tensors: Tensors) -> Finding | None:
    """Name a gradient norm that ranks combine wrongly from the norms of their shards.

    The step returns what clipping finds on one device, and on ranks something else.
    """
    clips = [] if tensors.alone is None else [event for event in tensors.alone.of("clip") if "norm" in event.details]
    for name in tensors.wrong("returned"):
        right = tensors.expected.exact.get(name)
        got = tensors.seen[0].values.get(name)
        if right is None or got is None or right.numel() != 1 or got.numel() != 1:
            continue
        for event in clips:
            norm = event.details["norm"]
            if norm and abs(float(right) - norm) <= _SAME * abs(norm):
                line = _scalar_reduction(tensors)
                where = f", combined by {line.where}" if line is not None else ""
                return Finding(
                    "wrong-reduction",
                    f"{name} is the norm of the gradient, {norm:.6g} on one device, and {float(got):.6g} on ranks{where}: "
                    "the norm of the whole is not that combination of the norms of the shards",
                )
    return None


def buffers_of_one_part(tensors: Tensors) -> Finding | None:
    """Name buffers that hold statistics of one rank's samples: what one device gives for these samples alone."""
    for name in tensors.wrong("buffers"):
        exact = tensors.expected.exact.get(name)
        if exact is None:
            continue
        for division in tensors.hypotheses.divisions:
            own = [
                rank
                for rank, (one, part) in enumerate(zip(tensors.seen, division.parts, strict=True))
                if (got := one.values.get(name)) is not None
                and (value := part[0].get(name)) is not None
                and division.windows == 1
                and value.shape == got.shape == exact.shape
                and tensors.same(got.double(), value.double(), exact)
                and not tensors.same(value.double(), exact, exact)
            ]
            if own:
                return Finding(
                    "batch-statistics-per-rank",
                    f"{name} on {named(own)} is what one device has for {division.name} alone, those of that rank",
                    tuple(own),
                )
    return None


def _scalar_reduction(tensors: Tensors) -> Event | None:
    """Return the first reduction of single numbers on rank 0."""
    for event in tensors.traces[0].of("collective") if tensors.traces else ():
        if event.name == "all_reduce" and all("value" in tensor for tensor in event.tensors):
            return event
    return None
