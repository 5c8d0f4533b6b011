"""Detect values that each rank computes from its own shard, although they need all shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.diagnosis.registry import Precedence, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.processes.rank_lists import named

if TYPE_CHECKING:
    from mgpu_check.diagnosis.observed import CallEvent, Division
    from mgpu_check.diagnosis.results import Result
    from mgpu_check.diagnosis.tensors import Tensors

_SAME = 1e-4
"""Relative tolerance between two computations of one norm."""
_SEVERAL = 3
"""Fewest elements of a buffer, so that one multiple does not fit all of them by chance."""


@on_tensors(Precedence.AMBIGUOUS + 10)
def norm_of_shards(tensors: Tensors) -> Finding | None:
    """Detect a gradient norm that ranks combine wrongly from the norms of their shards.

    On one device the step returns the norm that clipping finds; on ranks it returns another value.
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
                    f"{name} is the norm of the gradient, {norm:.6g} on one device, and {float(got):.6g} on "
                    f"ranks{where}: the norm of the whole is not that combination of the norms of the shards",
                    site=(line or event).site,
                )
    return None


@on_tensors(Precedence.AMBIGUOUS + 20)
def buffers_of_one_part(tensors: Tensors) -> Finding | None:
    """Detect buffers with statistics of one rank's samples: one device gives the same values for these samples alone.

    A buffer counts as a statistic if the batch gives the sum or the mean of the parts: a queue of samples does not.
    """
    for name in tensors.wrong("buffers"):
        exact = tensors.expected.exact.get(name)
        if exact is None:
            continue
        for division in tensors.hypotheses.divisions:
            if not _is_statistic(tensors, name, division):
                continue
            own = [
                rank
                for rank, (one, part) in enumerate(zip(tensors.seen, division.parts, strict=False))
                if (got := one.values.get(name)) is not None
                and (value := part[0].get(name) if part else None) is not None
                and division.windows == 1
                and value.shape == got.shape == exact.shape
                and tensors.same(got.double(), value.double(), exact)
                and not tensors.same(value.double(), exact, exact)
            ]
            if own:
                return Finding(
                    "batch-statistics-per-rank",
                    f"{name} on {named(own)} is what one device gives for that rank's samples alone ({division.name})",
                    tuple(own),
                )
    return None


def _is_statistic(tensors: Tensors, name: Result, division: Division) -> bool:
    """Return whether a buffer is the sum or mean of the parts, plus a multiple of its initial value.

    A moving average keeps a share of its old value, once for the batch and once for each part.
    """
    exact, before = tensors.expected.exact[name], tensors.expected.single.initial.get(name.of)
    parts = [part[0].get(name) if part else None for part in division.parts]
    if before is None or before.shape != exact.shape or exact.numel() < _SEVERAL:
        return False
    known = [part.double() for part in parts if part is not None and part.shape == exact.shape]
    if len(known) < len(parts):
        return False
    old = before.double()
    for count in (1, len(known)):
        rest = sum(known, exact.new_zeros(exact.shape)) / count - exact
        share = float((rest * old).sum() / old.square().sum().clamp_min(1e-300))
        if tensors.same(rest + exact, share * old + exact, exact):
            return True
    return False


def _scalar_reduction(tensors: Tensors) -> CallEvent | None:
    """Return the first reduction of single numbers on rank 0."""
    for event in tensors.traces[0].of("collective") if tensors.traces else ():
        if event.name == "all_reduce" and all("value" in tensor for tensor in event.tensors):
            return event
    return None
