"""The least work of each check. With less work a check is unknown, so a check that returns at once never passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from mgpu_check.acceptance.checklist import CHECKLIST
from mgpu_check.acceptance.run_report import CheckRun, Gpu
from mgpu_check.devices.observations import Observation, Outcome, Subject, Work
from mgpu_check.option_values import Depth, Level, depth_of

_SHARE_OF_MEMORY = 0.75
"""Share of the requested memory that must be tested.

Other programs may have allocated some of it since it was counted.
"""

_PASSES = (1, 2, 8)

_HOST_MEMORY = 1 << 20
"""Bytes of host memory; a host with little free memory tests little of it."""
_RESULTS_OF_CORES = (20, 200, 2000)
"""A core has 20 results in a round."""


def floors(
    gpus: Sequence[Gpu], level: Level, memory_share: float, soak: float | None, dcgm: bool = False
) -> dict[str, dict[Subject, Work]]:
    """Return the least work that passes, by check and subject.

    Args:
        soak: requested seconds of load; None without a soak.
        dcgm: whether results of DCGM's diagnostic were given.
    """
    glance, place = level == "glance", get_args(Depth).index(depth_of(level))
    each = [Subject("gpu", (gpu.number,)) for gpu in gpus]
    found: dict[str, dict[Subject, Work]] = {}
    for name, check in CHECKLIST.items():
        if check.least is not None:
            subjects = _ways(gpus) if name == "links" else each
            found[name] = dict.fromkeys(subjects, Work(operations=check.glance if glance else check.least[place]))
    found["memory"] = {
        subject: Work(bytes=int(gpu.memory * memory_share * _SHARE_OF_MEMORY * _PASSES[place]))
        for subject, gpu in zip(each, gpus, strict=True)
    }
    found["performance"] = dict.fromkeys(each, Work())
    hosts = [Subject("host", (host,)) for host in sorted({gpu.host for gpu in gpus})]
    found["machine"] = dict.fromkeys(hosts, Work(_HOST_MEMORY, _RESULTS_OF_CORES[place]))
    if dcgm:
        found["dcgm"] = dict.fromkeys(each, Work(operations=1))
    if soak:
        found["soak"] = dict.fromkeys(each, Work(seconds=0.9 * soak))
    return found


def _ways(gpus: Sequence[Gpu]) -> list[Subject]:
    ways = [Subject(kind, (gpu.number,)) for gpu in gpus for kind in ("upload", "download")]
    for one, other in itertools.permutations(gpus, 2):
        if one.host == other.host:
            ways.append(Subject("copy", (one.number, other.number)))
    return ways


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
        for subject in _counted(entry.subject):
            key = (entry.check, subject)
            done[key] = done.get(key, Work()) + entry.work
    return {
        check: _check_run(check, times(check), subjects, done, outcomes[check], reasons.get(check, []))
        for check, subjects in needed.items()
    }


def _counted(subject: Subject) -> list[Subject]:
    return (
        [subject, *(Subject("gpu", (member,)) for member in subject.members)] if subject.kind == "group" else [subject]
    )


def _check_run(
    check: str,
    when: tuple[float, float],
    subjects: Mapping[Subject, Work],
    done: Mapping[tuple[str, Subject], Work],
    outcomes: set[Outcome],
    reasons: Sequence[str],
) -> CheckRun:
    seen = {subject: done.get((check, subject)) for subject in subjects}
    short = [subject for subject, floor in subjects.items() if not _reached(seen[subject], floor)]
    floor = next(iter(subjects.values()), Work())
    least = min(
        (work or Work() for work in seen.values()), key=lambda work: (work.operations, work.bytes), default=Work()
    )
    if "failed" in outcomes:
        return CheckRun(check, *when, "failed", floor, least)
    told = reasons[0] + (f", and {len(reasons) - 1} more" if len(reasons) > 1 else "") if reasons else ""
    if short:
        named = ", ".join(map(str, short[:3])) + (f" and {len(short) - 3} more" if len(short) > 3 else "")
        gap = _gap(seen[short[0]], subjects[short[0]])
        why = f"{check} did less than its least work on {named}: {gap}" + (f"; {told}" if told else "")
        return CheckRun(check, *when, "unknown", floor, least, why)
    if "unknown" in outcomes:
        return CheckRun(check, *when, "unknown", floor, least, f"{check}: {told}")
    return CheckRun(check, *when, "passed" if "passed" in outcomes else "skipped", floor, least)


def _reached(work: Work | None, floor: Work) -> bool:
    if work is None:
        return False
    return work.bytes >= floor.bytes and work.operations >= floor.operations and work.seconds >= floor.seconds


def _gap(work: Work | None, floor: Work) -> str:
    work = work or Work()
    parts = [
        f"{getattr(work, name):g} of {getattr(floor, name):g} {name}"
        for name in ("bytes", "operations", "seconds")
        if getattr(work, name) < getattr(floor, name)
    ]
    return ", ".join(parts) or "nothing was checked"
