"""Measure the speed of collectives, by the formulas of nccl-tests.

The algorithm bandwidth is S / t, where S is the size in bytes of the largest tensor of a rank, and t the time of one
call. The bus bandwidth multiplies it by a factor that depends on the number n of ranks, so that it is the same for each
n if links are the bottleneck. `Transfer.share_of_link` returns the factor: 2 (n - 1) / n for all_reduce, 1 for
broadcast and reduce, and (n - 1) / n for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.collectives.exact import RepeatedCollective, groups_of
from mgpu_check.suite.collectives.runner import runner
from mgpu_check.suite.common.timing import seconds_of

__all__ = ["time_collectives"]


def time_collectives(rank: Rank, cases: Sequence[RepeatedCollective], repeats: int) -> list[list[float]]:
    """Return for each case `repeats` measurements of the seconds of one call; empty if this rank is not in the group.

    Each measurement is the mean of ``case.iterations`` calls that are queued at once.
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
