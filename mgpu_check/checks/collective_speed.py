"""How fast collectives are, by the formulas of nccl-tests: algorithm bandwidth is S / t, bus bandwidth that times a factor.

S are the bytes of the largest tensor of a rank, t the time of one call. The factor makes the bus bandwidth the same for each number n of
ranks, where links are what limits it: 2 (n - 1) / n for all_reduce; (n - 1) / n for all_gather, reduce_scatter, all_to_all, gather and
scatter; 1 for broadcast and reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_check.checks.collective_runner import runner
from mgpu_check.checks.collectives import Collective, groups_of
from mgpu_check.checks.timing import seconds_of
from mgpu_check.rank_side.rank import Rank

__all__ = ["bus_factor", "time_collectives"]

_ONCE = ("broadcast", "reduce")


def bus_factor(operation: str, count: int) -> float:
    """Return by what an algorithm bandwidth is multiplied for the bus bandwidth."""
    if operation in _ONCE:
        return 1.0
    share = (count - 1) / count
    return 2 * share if operation == "all_reduce" else share


def time_collectives(rank: Rank, cases: Sequence[Collective], repeats: int) -> list[list[float]]:
    """Return for each case the seconds of one call on this rank, so many times; nothing where it is not in the group.

    Each time is the mean of ``case.iterations`` calls that are queued at once.
    """
    found: list[list[float]] = []
    with groups_of(rank, (case.members for case in cases)) as groups:
        for case in cases:
            members = case.members or tuple(range(rank.size))
            if rank.index not in members:
                found.append([])
                continue
            dtype: torch.dtype = getattr(torch, case.dtype)
            count = len(members)
            given = torch.ones(case.elements(count), dtype=dtype, device=rank.device)
            made = runner(
                case.operation, case.reduction, given, groups[case.members], count, members.index(rank.index),
                members[case.root % count],
            )  # fmt: skip
            found.append(seconds_of(made.call, rank.device, repeats, inner=case.iterations))
    return found
