"""Show each GPU over its reports: speeds, error counters, places and verdicts over time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from mgpu_check.acceptance.comparison import amount, beside_peers, least_shortfall, useless
from mgpu_check.acceptance.health.checks import allowed_growth
from mgpu_check.acceptance.report.sightings import Sighting, same_host, sightings
from mgpu_check.acceptance.report.values import read
from mgpu_check.acceptance.report.view import what
from mgpu_check.acceptance.robust import LEAST_PEERS, shortfall
from mgpu_check.acceptance.run_report import Kind, RunReport
from mgpu_check.devices.observations import MeasuredKind
from mgpu_check.devices.telemetry.fields import FIELDS, names
from mgpu_check.processes.rank_lists import grouped

_OF_CHIPS = 0.5
"""Share of `least_shortfall` that counts here: a GPU is compared with itself, so chips do not differ."""

_WIDTH = 12
"""Most values of one GPU in a line."""


@dataclass(frozen=True)
class Point:
    """One GPU in one report.

    Attributes:
        place: host, index and slot.
        findings: ids of the findings about the GPU.
        accused: whether the verdict accuses the GPU or a link of it.
        counters: last value of each error counter, and the number of times of each Xid; without unknown ones.
    """

    file: str
    started: str
    place: str
    verdict: Kind
    findings: tuple[str, ...]
    accused: bool
    counters: Mapping[str, int]
    software: Mapping[str, str]


@dataclass(frozen=True)
class GpuChange:
    """A change on a GPU between its reports.

    Attributes:
        outcome: "worse"; "undecided": it would be worse, but nothing shows that the GPU is the cause; "note".
        values: one for each report; None where a report has no value.
    """

    kind: Literal["speed", "counter", "place", "software", "verdict"]
    outcome: Literal["worse", "undecided", "note"]
    text: str
    values: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class GpuHistory:
    """A GPU over its reports, in order of time.

    Attributes:
        key: serial number, or the UUID of a GPU without one of its own.
    """

    key: str
    uuid: str
    name: str
    points: tuple[Point, ...]
    changes: tuple[GpuChange, ...]


@dataclass(frozen=True)
class FleetHistory:
    """The GPUs of a directory of reports.

    Attributes:
        broken: files that are no readable report -> the reason.
        nameless: number of GPUs in reports without serial number and UUID, which cannot be followed.
    """

    directory: str
    reports: int
    broken: Mapping[str, str]
    nameless: int
    gpus: tuple[GpuHistory, ...]

    def have(self, outcome: str) -> list[GpuHistory]:
        return [gpu for gpu in self.gpus if any(change.outcome == outcome for change in gpu.changes)]


def history(directory: Path) -> FleetHistory:
    """Read all reports in a directory and below it, or raise ValueError if they cannot be compared."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give one with JSON reports of mgpu-check accept")
    named: dict[str, RunReport] = {}
    broken: dict[str, str] = {}
    for path in sorted(directory.rglob("*.json")):
        name = str(path.relative_to(directory))
        try:
            named[name] = read(path)
        except ValueError as error:
            broken[name] = str(error)
    if not named:
        some = "; ".join(broken.values())
        raise ValueError(f"{directory} has no report{f': {some}' if some else ', and no file that ends in .json'}")
    if len({bool(report.simulated) for report in named.values()}) > 1:
        one = next(name for name, report in named.items() if report.simulated)
        raise ValueError(f"{directory}: {one} is of a SIMULATED node, and others are not; keep them in two directories")
    seen = sightings(named)
    drifts = _drifts(seen)
    gpus = tuple(_followed(key, mine, drifts.get(key, [])) for key, mine in sorted(seen.items()))
    every = sum(len(report.gpus) for report in named.values())
    return FleetHistory(str(directory), len(named), broken, every - sum(map(len, seen.values())), gpus)


def _followed(key: str, mine: Sequence[Sighting], drifts: Sequence[GpuChange]) -> GpuHistory:
    points = [_point(one) for one in mine]
    changes = [*_verdicts(points), *drifts, *_counters(mine, points)]
    for (one, before), (later, after) in itertools.pairwise(zip(mine, points, strict=True)):
        if not same_host(one.host, later.host) or one.gpu.pci != later.gpu.pci:
            changes.append(GpuChange("place", "note", f"moved from {before.place} to {after.place} by {after.started}"))
        for name in sorted(before.software.keys() & after.software.keys()):
            old, new = before.software[name], after.software[name]
            if old != new:
                changes.append(GpuChange("software", "note", f"{name} from {old} to {new} by {after.started}"))
    return GpuHistory(key, mine[-1].gpu.uuid, mine[-1].gpu.name, tuple(points), tuple(changes))


def _point(one: Sighting) -> Point:
    report, number = one.report, one.gpu.number
    verdict = report.verdicts.get(one.host.number, report.verdict)
    accused = any(part.kind != "host" and number in part.members for part in (a.part for a in verdict.accusations))
    findings = [f.id for f in report.findings if f.subject.kind != "host" and number in f.subject.members]
    counters: dict[str, int] = {}
    for sample in report.samples:
        if sample.gpu == number:
            known = {name: value for name in names("counter") if isinstance(value := sample.values.get(name), int)}
            counters.update({name: value for name, value in known.items() if FIELDS[name].unit != "ns"})
    for entry in report.observations:
        if entry.evidence.get("kind") in ("xid", "past xid") and entry.subject.members == (number,):
            name = f"Xid {entry.evidence.get('code')}"
            counters[name] = counters.get(name, 0) + int(entry.evidence.get("times", entry.times))
    return Point(
        one.file,
        report.started,
        one.place,
        verdict.kind,
        tuple(dict.fromkeys(findings)),
        accused,
        counters,
        one.host.software,
    )


def _verdicts(points: Sequence[Point]) -> Iterator[GpuChange]:
    for before, after in itertools.pairwise(points):
        if before.accused != after.accused:
            text = f"{'accused' if after.accused else 'no longer accused'} since {after.started}"
            yield GpuChange("verdict", "worse" if after is points[-1] and after.accused else "note", text)


def _counters(mine: Sequence[Sighting], points: Sequence[Point]) -> Iterator[GpuChange]:
    """Yield the counters that grew. A counter that fell was cleared, so its new value is all growth."""
    for name in dict.fromkeys(name for point in points for name in point.counters):
        xid = name not in FIELDS
        values = tuple(point.counters.get(name, 0 if xid else None) for point in points)
        known = [(one, value) for one, value in zip(mine, values, strict=True) if value is not None]
        grown = 0
        outcome: Literal["worse", "note"] = "note"
        for (one, first), (later, last) in itertools.pairwise(known):
            more = last - first if last >= first else last
            grown += more
            seconds = max(0.0, (later.began - one.ended).total_seconds())
            if more > (0 if xid else allowed_growth(name, seconds, {})):
                outcome = "worse"
        if grown:
            text = f"{name if xid else FIELDS[name].text}: {grown} more ({_row(values)})"
            yield GpuChange("counter", outcome, text, values)


def _drifts(seen: Mapping[str, Sequence[Sighting]]) -> dict[str, list[GpuChange]]:
    """Compare the last speed of each GPU with its earlier ones, and this ratio with those of the others of its model.

    The others are the control: if all became slower, the cause is not one GPU.
    """
    ratios: dict[tuple[str, MeasuredKind], dict[str, float]] = {}
    speeds: dict[tuple[str, MeasuredKind], tuple[float | None, ...]] = {}
    for key, mine in seen.items():
        of_reports = [_speeds(one) for one in mine]
        for kind in dict.fromkeys(itertools.chain(*of_reports)):
            values = tuple(found.get(kind) for found in of_reports)
            *earlier, last = [value for value in values if value is not None]
            if earlier and values[-1] is not None:
                speeds[key, kind] = values
                ratios.setdefault((mine[-1].gpu.name, kind), {})[key] = last / median(earlier)
    found: dict[str, list[GpuChange]] = {}
    for (_, kind), group in ratios.items():
        least, unit = _OF_CHIPS * least_shortfall(kind), kind.unit
        for key, ratio in group.items():
            others = [value for other, value in group.items() if other != key]
            comparison = beside_peers(ratio, others, unit, least)
            own = shortfall(ratio, 1.0, unit)
            if own <= least or comparison.outcome == "passed":
                continue
            worse = comparison.outcome == "failed"
            why = (
                f"the {what(len(others), 'other')} of its model by {shortfall(median(others), 1.0, unit):.0%}"
                if worse
                else comparison.why
                if others
                else f"fewer than {LEAST_PEERS} others of its model have two reports, so nothing shows the cause"
            )
            values = speeds[key, kind]
            told = " -> ".join("-" if one is None else amount(one, unit) for one in values[-_WIDTH:])
            text = f"{kind.quantity} ({kind.subject}), size {kind.size}: {own:.0%} slower than before, {why} ({told})"
            found.setdefault(key, []).append(GpuChange("speed", "worse" if worse else "undecided", text, values))
    return found


def _speeds(one: Sighting) -> dict[MeasuredKind, float]:
    """Return the speeds of a GPU in a report: its own, and the median of its copies to other GPUs."""
    mine = (
        (m.kind, m.value)
        for m in one.report.measurements
        if m.subject.kind not in ("group", "host") and m.subject.members[0] == one.gpu.number and not useless(m)
    )
    return {key: median(values) for key, values in grouped(mine)}


def _row(values: Sequence[int | None]) -> str:
    return " -> ".join("-" if value is None else str(value) for value in values[-_WIDTH:])


def lines(found: FleetHistory, only: str = "") -> list[str]:
    """Return the history as lines for a terminal: each GPU with a change, the others counted.

    Args:
        only: serial number or UUID of the only GPU to show, changed or not.
    """
    said = []
    once = unchanged = 0
    for gpu in found.gpus:
        if only and only not in (gpu.key, gpu.uuid):
            continue
        if not only and not gpu.changes:
            once += len(gpu.points) == 1
            unchanged += len(gpu.points) > 1
            continue
        said += [f"GPU {gpu.key} ({gpu.name}), {what(len(gpu.points), 'report')}"]
        for point in gpu.points:
            accused = f", accused: {', '.join(point.findings) or 'no finding'}" if point.accused else ""
            said.append(f"  {point.started}  {point.verdict}{accused}  {point.place}  {point.file}")
        said += [f"  {change.outcome}: {change.text}" for change in gpu.changes] or ["  nothing has changed"]
    if not only:
        said.append(f"{what(unchanged, 'GPU')} without a change; {what(once, 'GPU')} in one report only")
    if found.nameless:
        said.append(f"{what(found.nameless, 'GPU')} without serial number and UUID: not followed")
    said += [f"NOT read: {why}" for why in found.broken.values()]
    worse, undecided = len(found.have("worse")), len(found.have("undecided"))
    return [
        *said,
        f"{what(len(found.gpus), 'GPU')} in {what(found.reports, 'report')}: {worse} got worse, {undecided} undecided; "
        f"{what(len(found.broken), 'file')} could not be read",
    ]
