"""Combine the views of all ranks on collectives into observations, and name suspects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch.distributed as dist

from mgpu_check.devices.observations import Observation, Subject, Work
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.processes.rank_lists import grouped, named
from mgpu_check.suite.collectives.repeated_calls import Cases, RepeatedCollective, View, views_of
from mgpu_check.torch_hooks.table import TRANSFERS

_CHECK = "collectives"


def examine_collectives(rank: Rank, cases: Cases) -> list[Observation]:
    """Call collectives in all their groups; rank 0 returns the observations of all ranks, others none.

    Subjects name ranks in place of GPUs. Sends and receives have an observation for each ordered pair too.
    """
    results: list[Sequence[View]] = [()] * rank.size
    dist.all_gather_object(results, views_of(rank, cases.all))  # over the host
    return observations_of_views(cases.all, results) if rank.index == 0 else []


def observations_of_views(cases: Sequence[RepeatedCollective], results: Iterable[Sequence[View]]) -> list[Observation]:
    views = grouped(((view.case, view.members), view) for seen in results for view in seen)
    found: list[Observation] = []
    for (number, members), group in sorted(views, key=lambda one: one[0]):
        # A case may be drawn without regard to the size of its group.
        case = dataclasses.replace(cases[number], root=cases[number].root % len(members))
        found += _of_group(case, members, group)
    return found


def _of_group(case: RepeatedCollective, members: tuple[int, ...], views: Sequence[View]) -> Iterator[Observation]:
    subject = Subject("group", members)
    work = Work(bytes=views[0].bytes * case.iterations, operations=case.iterations)
    bad = {view.rank: view for view in views if view.failed}
    if not bad:
        yield Observation(_CHECK, subject, "passed", case=str(case), work=work)
        if case.operation == "send_recv":
            yield from _pairs_that_passed(case, members, work)
        return
    ways = _ways(bad)
    evidence = {
        "collective": dataclasses.asdict(case),
        "wrong": [
            {"rank": rank, "failed": view.failed, "first": dataclasses.asdict(view.wrong[0])}
            for rank, view in bad.items()
        ],
    }
    if case.operation == "send_recv":
        for pair, view in ways.items():
            yield Observation(_CHECK, Subject("copy", pair), "failed", _seen(view), str(case), work, evidence)
        return
    suspects = tuple(sorted(_suspects(case, members, bad, set(ways))))
    first = next(iter(bad.values()))
    text = f"wrong on {named(sorted(bad))}: {_seen(first)}"
    yield Observation(_CHECK, subject, "failed", text, str(case), work, evidence, suspects)


def _pairs_that_passed(case: RepeatedCollective, members: Sequence[int], work: Work) -> Iterator[Observation]:
    count = len(members)
    for step in {iteration % max(1, count - 1) + 1 for iteration in range(case.iterations)}:
        for place, source in enumerate(members):
            pair = (source, members[(place + step) % count])
            if pair[0] != pair[1]:
                share = Work(work.bytes // case.iterations, 1)
                yield Observation(_CHECK, Subject("copy", pair), "passed", case=str(case), work=share)


def _ways(bad: Mapping[int, View]) -> dict[tuple[int, int], View]:
    found: dict[tuple[int, int], View] = {}
    for receiver, view in bad.items():
        for wrong in view.wrong:
            for source in wrong.sources:
                found.setdefault((source, receiver), view)
    return found


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
    first = view.wrong[0]
    return (
        f"{view.failed} of {view.checked} results are wrong; in iteration {first.iteration} {first.count} of "
        f"{first.of} from {first.first} on: {first.looks}"
    )
