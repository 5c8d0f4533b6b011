"""Measure the speed of collectives, by the formulas of nccl-tests.

The algorithm bandwidth is S / t, where S is the size in bytes of the largest tensor of a rank, and t the time of one
call. The bus bandwidth multiplies it by a factor that depends on the number n of ranks, so that it is the same for each
n if links are the bottleneck. `Transfer.share_of_link` returns the factor: 2 (n - 1) / n for all_reduce, 1 for
broadcast and reduce, and (n - 1) / n for the others.

In a collective of all GPUs each rank waits for the slowest, so its time does not show which one that is. Therefore
pairs are measured, too. Each GPU is in one pair at a time, so all pairs have the same load.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from mgpu_check.devices.observations import Measurement, Subject
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.collectives.repeated_calls import Cases, RepeatedCollective, groups_of, runner
from mgpu_check.suite.common.timing import measured, seconds_of
from mgpu_check.torch_hooks.table import TRANSFERS

LATENCY_BYTES = 64
"""A collective of this size or less is measured by its time."""


def measure_collectives(rank: Rank, cases: Cases, repeats: int) -> list[Measurement]:
    """Measure `cases` on all ranks; rank 0 returns the measurements, others none.

    The subject of a pair with a root is the copy from or to the root, else the group. Like in nccl-tests, a time is the
    mean over ranks.
    """
    results: list[list[list[float]]] = [[] for _ in range(rank.size)]
    dist.all_gather_object(results, time_collectives(rank, cases.all, repeats))  # over the host
    if rank.index:
        return []
    found: list[Measurement] = []
    for number, case in enumerate(cases.all):
        members = case.members or tuple(range(rank.size))
        times = [statistics.fmean(one) for one in zip(*(results[member][number] for member in members), strict=True)]
        found += _speeds(case, members, times)
    return found


def _speeds(case: RepeatedCollective, members: Sequence[int], times: Sequence[float]) -> Iterator[Measurement]:
    row, pair = TRANSFERS[case.operation], len(members) == 2
    subject = Subject("group", tuple(members))
    if pair and row.root:
        pair_of_root = (members[case.root], members[1 - case.root])
        subject = Subject("copy", pair_of_root if row.givers == "root" else pair_of_root[::-1])
    name = f"{case.operation} of a pair" if pair else case.operation
    if case.bytes <= LATENCY_BYTES:
        yield from measured("collectives", subject, f"{name}, latency", "s", 0, times, case.bytes)
        return
    ways = [("bus", row.share_of_link(len(members)))]
    for way, factor in ways if pair else [("algorithm", 1.0), *ways]:
        quantity = f"{name} {way} bandwidth"
        yield from measured("collectives", subject, quantity, "B/s", case.bytes * factor, times, case.bytes)


def time_collectives(rank: Rank, cases: Sequence[RepeatedCollective], repeats: int) -> list[list[float]]:
    """Return for each case `repeats` measurements of the seconds of a call; empty for a group without this rank."""
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
