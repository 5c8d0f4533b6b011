"""Check the data of collectives on all ranks, name suspects, and measure speed, by the formulas of nccl-tests.

The algorithm bandwidth is S / t, where S is the size in bytes of the largest tensor of a rank, and t the time of one
call. The bus bandwidth multiplies it by a factor that depends on the number n of ranks, so that it is the same for each
n if links are the bottleneck. `Transfer.share_of_link` returns the factor: 2 (n - 1) / n for all_reduce, 1 for
broadcast and reduce, and (n - 1) / n for the others.

In a collective of all GPUs each rank waits for the slowest, so its time does not show which one that is. Therefore
pairs are measured, too. Each GPU is in one pair at a time, so all pairs have the same load.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from mgpu_check.devices.observations import Measurement, Observation, Subject, Work
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.collectives.repeated_calls import Cases, RepeatedCollective, View, groups_of, runner, views_of
from mgpu_check.oracles.devices.operations import measured, second_longest, seconds_of
from mgpu_check.processes.rank_lists import grouped, named
from mgpu_check.torch_hooks.collective_table import TRANSFERS

_CHECK = "collectives"


def examine_collectives(rank: Rank, cases: Cases) -> list[Observation]:
    """Call collectives in all their groups; rank 0 returns the observations of all ranks, others none.
    Subjects name ranks in place of GPUs. Sends and receives have an observation for each ordered pair too."""
    results: list[Sequence[View]] = [()] * rank.size
    dist.all_gather_object(results, views_of(rank, cases.all))  # over the host
    return observations_of_views(cases.all, results) if rank.index == 0 else []


def observations_of_views(cases: Sequence[RepeatedCollective], results: Iterable[Sequence[View]]) -> list[Observation]:
    views = grouped(((view.case, view.members), view) for rank_views in results for view in rank_views)
    observations: list[Observation] = []
    for (number, members), group in sorted(views, key=lambda group: group[0]):
        # A case may be drawn without regard to the size of its group.
        case = dataclasses.replace(cases[number], root=cases[number].root % len(members))
        observations += _of_group(case, members, group)
    return observations


def _of_group(case: RepeatedCollective, members: tuple[int, ...], views: Sequence[View]) -> Iterator[Observation]:
    subject = Subject("group", members)
    work = Work(bytes=views[0].bytes * case.iterations, operations=case.iterations)
    bad = {view.rank: view for view in views if view.failed}
    if not bad:
        yield Observation(_CHECK, subject, "passed", case=str(case), work=work)
        if case.operation == "send_recv":
            yield from _pairs_that_passed(case, members, work)
        return
    ways: dict[tuple[int, int], View] = {}
    for receiver, view in bad.items():
        for mismatch in view.wrong:
            for source in mismatch.sources:
                ways.setdefault((source, receiver), view)
    failures = [
        {"rank": rank, "failed": view.failed, "first": dataclasses.asdict(view.wrong[0])} for rank, view in bad.items()
    ]
    evidence = {"collective": dataclasses.asdict(case), "wrong": failures}
    if case.operation == "send_recv":
        for pair, view in ways.items():
            yield Observation(_CHECK, Subject("copy", pair), "failed", _seen(view), str(case), work, evidence)
        return
    suspects = tuple(sorted(_suspects(case, members, bad, set(ways))))
    sample_view = next(iter(bad.values()))
    text = f"wrong on {named(sorted(bad))}: {_seen(sample_view)}"
    yield Observation(_CHECK, subject, "failed", text, str(case), work, evidence, suspects)


def _pairs_that_passed(case: RepeatedCollective, members: Sequence[int], work: Work) -> Iterator[Observation]:
    count = len(members)
    for step in {iteration % max(1, count - 1) + 1 for iteration in range(case.iterations)}:
        for index, source in enumerate(members):
            pair = (source, members[(index + step) % count])
            if pair[0] != pair[1]:
                share = Work(work.bytes // case.iterations, 1)
                yield Observation(_CHECK, Subject("copy", pair), "passed", case=str(case), work=share)


def _suspects(
    case: RepeatedCollective, members: Sequence[int], bad: Mapping[int, View], ways: set[tuple[int, int]]
) -> set[int]:
    """Return the ranks that the evidence accuses; empty if it accuses no rank.

    In a ring, data that is wrong on one link is wrong on all ranks behind it. So a single rank with a wrong result has
    spoiled it itself. This does not follow if only one rank has a result, or if the ranks before it in the ring have
    no result.
    """
    if len(members) < 3:
        return set()
    sources, receivers = {source for source, _ in ways}, set(bad)
    all_agree = len(sources) == 1 and {receiver for _, receiver in ways} == receivers
    transfer = TRANSFERS[case.operation]
    if transfer.direct:
        if len(sources) == 1 and len(receivers) == 1:
            return sources | receivers
        if len(receivers) == 1:
            return receivers
        return sources if len(sources) == 1 else set()
    if all_agree and len(receivers) == len(members) and transfer.reduces and transfer.takers == "all":
        return sources
    return receivers if len(receivers) == 1 and not transfer.root else set()


def _seen(view: View) -> str:
    mismatch = view.wrong[0]
    return (
        f"{view.failed} of {view.checked} results are wrong; in iteration {mismatch.iteration} {mismatch.count} of "
        f"{mismatch.of} from {mismatch.first} on: {mismatch.looks}"
    )


LATENCY_BYTES = 64  # a collective of this size or less is measured by its time


def measure_collectives(rank: Rank, cases: Cases, repeats: int, stalls: bool = False) -> list[Measurement]:
    """Measure `cases` on all ranks, or with `stalls` the second longest of their calls.
    Rank 0 returns the measurements, others none.

    The subject of a pair with a root is the copy from or to the root, else the group. Like in nccl-tests, a time is the
    mean over ranks.
    """
    results: list[list[list[float]]] = [[] for _ in range(rank.size)]
    dist.all_gather_object(results, time_collectives(rank, cases.all, repeats))  # over the host
    if rank.index:
        return []
    measurements: list[Measurement] = []
    for number, case in enumerate(cases.all):
        members = case.members or tuple(range(rank.size))
        times = [statistics.fmean(laps) for laps in zip(*(results[member][number] for member in members), strict=True)]
        measurements += _speeds(case, members, times, stalls)
    return measurements


def _speeds(
    case: RepeatedCollective, members: Sequence[int], times: Sequence[float], stalls: bool
) -> Iterator[Measurement]:
    row, pair = TRANSFERS[case.operation], len(members) == 2
    subject = Subject("group", tuple(members))
    if pair and row.root:
        pair_of_root = (members[case.root], members[1 - case.root])
        subject = Subject("copy", pair_of_root if row.givers == "root" else pair_of_root[::-1])
    name = f"{case.operation} of a pair" if pair else case.operation
    if stalls:
        yield from second_longest("collectives", subject, name, times, case.bytes)
        return
    if case.bytes <= LATENCY_BYTES:
        yield from measured("collectives", subject, f"{name}, latency", "s", 0, times, case.bytes)
        return
    ways = [("bus", row.share_of_link(len(members)))]
    for way, factor in ways if pair else [("algorithm", 1.0), *ways]:
        quantity = f"{name} {way} bandwidth"
        yield from measured("collectives", subject, quantity, "B/s", case.bytes * factor, times, case.bytes)


def time_collectives(rank: Rank, cases: Sequence[RepeatedCollective], repeats: int) -> list[list[float]]:
    """Return for each case `repeats` measurements of the seconds of a call; empty for a group without this rank."""
    timings: list[list[float]] = []
    with groups_of(rank, (case.members for case in cases)) as groups:
        for case in cases:
            members = case.members or tuple(range(rank.size))
            if rank.index not in members:
                timings.append([])
                continue
            dtype: torch.dtype = getattr(torch, case.dtype)
            count = len(members)
            inputs = torch.ones(case.elements(count), dtype=dtype, device=rank.device)
            root = members[case.root % count]
            collective = runner(case.operation, case.reduction, inputs, groups[case.members], count, root)
            timings.append(seconds_of(collective.call, rank.device, repeats, inner=case.iterations))
    return timings
