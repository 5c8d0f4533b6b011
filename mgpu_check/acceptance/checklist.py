"""The checks of an acceptance: their order, the properties that the verdict depends on, and the least work of each.

With less work a check is unknown, so a check that returns at once never passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from mgpu_check.acceptance.run_report import CheckRun, Gpu
from mgpu_check.devices.observations import Observation, Outcome, Subject, Work
from mgpu_check.option_values import Depth, Level, depth_of


@dataclass(frozen=True)
class Check:
    """Static properties of a check."""

    # least number of operations for each subject at the levels quick, standard and long; None if its floor does not
    # count operations
    least: tuple[int, int, int] | None = None
    glance: int = 0  # the same at the level glance; 0 if this level does not have the check
    alone: bool = False  # its ranks neither wait for each other nor exchange data
    # its data cross the link between host and GPU, so a bad link to the host makes it fail, too
    over_the_host: bool = False
    # it reports what the driver says; an observation of a GPU accuses that GPU, however many have one
    of_driver: bool = False
    # it compares facts; an observation of the host accuses the host, and explains no failure of another check
    of_facts: bool = False
    counts: str = ""  # what an operation of a subject is, if each is an independent chance to see a fault that is rare


CHECKLIST: Mapping[str, Check] = {
    "inventory": Check((1, 1, 1), 1, alone=True, of_driver=True, of_facts=True),
    "memory": Check(alone=True),
    "compute": Check((40, 400, 4000), 20, alone=True, over_the_host=True, counts="results of a GPU"),
    "links": Check((4, 20, 200), 4, counts="copies on a link"),
    "collectives": Check((20, 200, 2000), over_the_host=True, counts="collectives"),
    "training": Check((12, 150, 4000), over_the_host=True, counts="steps of training"),
    "soak": Check(over_the_host=True),
    "performance": Check(alone=True),
    "dcgm": Check(alone=True, of_driver=True, of_facts=True),
    "machine": Check(of_facts=True),
    "health": Check((2, 2, 2), 2, alone=True, of_driver=True),
}
"""All checks in the order they run. The soak and the results of DCGM run only on request."""

CHECKS = tuple(CHECKLIST)


_SHARE_OF_MEMORY = 0.75
"""Share of the requested memory that must be tested: other programs may have allocated some since it was counted."""
_PASSES = (1, 2, 8)
_HOST_MEMORY = 1 << 20  # bytes; a host with little free memory tests little of it
_RESULTS_OF_CORES = (20, 200, 2000)  # a core has 20 results in a round


def floors(
    gpus: Sequence[Gpu], level: Level, memory_share: float, soak: float | None, dcgm: bool = False
) -> dict[str, dict[Subject, Work]]:
    """Return the least work that passes, by check and subject.

    Args:
        soak: requested seconds of load; None without a soak.
        dcgm: whether results of DCGM's diagnostic were given.
    """
    glance, depth_index = level == "glance", get_args(Depth).index(depth_of(level))
    each = [Subject("gpu", (gpu.number,)) for gpu in gpus]
    least_work: dict[str, dict[Subject, Work]] = {}
    for name, check in CHECKLIST.items():
        if check.least is not None:
            least = Work(operations=check.glance if glance else check.least[depth_index])
            least_work[name] = dict.fromkeys(_ways(gpus) if name == "links" else each, least)
    least_work["memory"] = {
        subject: Work(bytes=int(gpu.memory * memory_share * _SHARE_OF_MEMORY * _PASSES[depth_index]))
        for subject, gpu in zip(each, gpus, strict=True)
    }
    least_work["performance"] = dict.fromkeys(each, Work())
    hosts = [Subject("host", (host,)) for host in sorted({gpu.host for gpu in gpus})]
    least_work["machine"] = dict.fromkeys(hosts, Work(_HOST_MEMORY, _RESULTS_OF_CORES[depth_index]))
    if dcgm:
        least_work["dcgm"] = dict.fromkeys(each, Work(operations=1))
    if soak:
        least_work["soak"] = dict.fromkeys(each, Work(seconds=0.9 * soak))
    return least_work


def _ways(gpus: Sequence[Gpu]) -> list[Subject]:
    pairs = (pair for pair in itertools.permutations(gpus, 2) if pair[0].host == pair[1].host)
    return [
        *(Subject(direction, (gpu.number,)) for gpu in gpus for direction in ("upload", "download")),
        *(Subject("copy", (source.number, target.number)) for source, target in pairs),
    ]


def check_runs(
    observations: Iterable[Observation],
    needed: Mapping[str, Mapping[Subject, Work]],
    times: Callable[[str], tuple[float, float]],
) -> dict[str, CheckRun]:
    """Return the work and the outcome of each check of `needed`.

    Work on a group counts for each of its GPUs.

    Args:
        times: returns when a check began, and how many seconds it took.
    """
    done: dict[tuple[str, Subject], Work] = {}
    outcomes: dict[str, set[Outcome]] = {check: set() for check in needed}
    reasons: dict[str, list[str]] = {}
    for entry in observations:
        outcomes.setdefault(entry.check, set()).add(entry.outcome)
        if entry.outcome == "unknown":
            reasons.setdefault(entry.check, []).append(f"{entry.subject}: {entry.seen}")
        members = entry.subject.members if entry.subject.kind == "group" else ()
        for subject in (entry.subject, *(Subject("gpu", (member,)) for member in members)):
            key = (entry.check, subject)
            done[key] = done.get(key, Work()) + entry.work
    return {
        check: _check_run(check, times(check), subjects, done, outcomes[check], reasons.get(check, []))
        for check, subjects in needed.items()
    }


def _check_run(
    check: str,
    when: tuple[float, float],
    subjects: Mapping[Subject, Work],
    done: Mapping[tuple[str, Subject], Work],
    outcomes: set[Outcome],
    reasons: Sequence[str],
) -> CheckRun:
    work_by_subject = {subject: done.get((check, subject)) for subject in subjects}
    gaps = {subject: gap for subject, floor in subjects.items() if (gap := _gap(work_by_subject[subject], floor))}
    floor = next(iter(subjects.values()), Work())
    works = (work or Work() for work in work_by_subject.values())
    least = min(works, key=lambda work: (work.operations, work.bytes), default=Work())
    if "failed" in outcomes:
        return CheckRun(check, *when, "failed", floor, least)
    explanation = reasons[0] + (f", and {len(reasons) - 1} more" if len(reasons) > 1 else "") if reasons else ""
    if gaps:
        short = [*map(str, gaps)]
        named = ", ".join(short[:3]) + (f" and {len(short) - 3} more" if len(short) > 3 else "")
        reason = f"{check} did less than its least work on {named}: {next(iter(gaps.values()))}"
        reason += f"; {explanation}" if explanation else ""
        return CheckRun(check, *when, "unknown", floor, least, reason)
    if "unknown" in outcomes:
        return CheckRun(check, *when, "unknown", floor, least, f"{check}: {explanation}")
    return CheckRun(check, *when, "passed" if "passed" in outcomes else "skipped", floor, least)


def _gap(work: Work | None, floor: Work) -> str:
    """Return what is missing to the floor, or "" if nothing is."""
    done = work or Work()
    shortfalls = [
        f"{getattr(done, name):g} of {getattr(floor, name):g} {name}"
        for name in ("bytes", "operations", "seconds")
        if getattr(done, name) < getattr(floor, name)
    ]
    return ", ".join(shortfalls) or ("" if work else "nothing was checked")
