"""Join the reports of many nodes into one, and follow GPUs over several reports by serial number."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mgpu_check.acceptance.findings import judged, listed
from mgpu_check.acceptance.report import summary
from mgpu_check.acceptance.run_report import Accusation, Gpu, Host, Kind, RunReport, Verdict
from mgpu_check.acceptance.slow_nodes import among_nodes
from mgpu_check.devices.observations import Part, Subject
from mgpu_check.option_values import LEVELS
from mgpu_check.processes.machine import distinct_names


@dataclass(frozen=True)
class Sighting:
    """A GPU in one report.

    Attributes:
        file: name of the report, for messages.
    """

    file: str
    report: RunReport
    host: Host
    gpu: Gpu

    @property
    def began(self) -> datetime.datetime:
        return _time(self.report)

    @property
    def ended(self) -> datetime.datetime:
        return self.began + datetime.timedelta(seconds=self.report.seconds)

    @property
    def place(self) -> str:
        return (
            f"{self.host.name or f'host {self.host.number}'} (cuda:{self.gpu.index}, PCI {self.gpu.pci or 'unknown'})"
        )


def same_host(one: Host, other: Host) -> bool:
    """Return whether two hosts are one machine: of one name, or of one boot of the kernel, as containers are."""
    return one.name == other.name or bool(one.boot and one.boot == other.boot)


def sightings(named: Mapping[str, RunReport]) -> dict[str, list[Sighting]]:
    """Return where and when each GPU was seen, in order of time, by serial number.

    The key of a GPU is its UUID if it has no serial number of its own: boards with several GPUs have one. A GPU with
    neither is left out.
    """
    serials = {gpu.uuid: gpu.serial for report in named.values() for gpu in report.gpus if gpu.uuid and gpu.serial}
    found: dict[str, list[Sighting]] = {}
    for file, report in sorted(named.items(), key=lambda item: _time(item[1])):
        hosts = {host.number: host for host in report.hosts}
        names = [serials.get(gpu.uuid, gpu.serial) for gpu in report.gpus]
        counts = Counter(names)
        for gpu, serial in zip(report.gpus, names, strict=True):
            key = serial if serial and counts[serial] == 1 else gpu.uuid
            if key and gpu.host in hosts:
                found.setdefault(key, []).append(Sighting(file, report, hosts[gpu.host], gpu))
    return found


def _time(report: RunReport) -> datetime.datetime:
    started = datetime.datetime.fromisoformat(report.started)
    return started if started.tzinfo else started.replace(tzinfo=datetime.UTC)


_WORST: tuple[Kind, ...] = ("REJECTED", "SUSPECT", "INCONCLUSIVE", "ACCEPTED")


@dataclass(frozen=True)
class _Numbers:
    """The numbers of one report's hosts and GPUs, and the index of its first observation, in the joined report."""

    hosts: Mapping[int, int]
    gpus: Mapping[int, int]
    first: int

    @property
    def same(self) -> bool:
        return all(old == new for numbers in (self.hosts, self.gpus) for old, new in numbers.items())


def merge(named: Mapping[str, RunReport], command: str) -> RunReport:
    """Join reports into one with all hosts and GPUs, renumbered in the order given. Its verdict is the worst of theirs.

    A node that is slower than the others of its model becomes SUSPECT, unless it is REJECTED. A node whose GPU a later
    report has in another host becomes INCONCLUSIVE, unless its verdict is worse. Times count from the start of each
    node's own run.

    Args:
        named: the reports by file name, which error messages use.

    Raises:
        ValueError: a real GPU is in two reports of one host, or some reports are simulated and others are not.
    """
    reports = list(named.values())
    _refuse_what_does_not_fit(named)
    numbers = list(_numbered(reports))
    names = _names(reports)
    joined = [_renumbered(*each) for each in zip(reports, numbers, names, strict=True)]
    partial = {report.verdict.partial for report in reports}
    verdict = Verdict(
        kind=worst(report.verdict.kind for report in reports),
        accusations=tuple(one for report in joined for one in report.verdict.accusations),
        unknown=(
            *(
                line
                for report, name in zip(joined, names, strict=True)
                for line in _unknown(report, name, len(partial) > 1)
            ),
            *_of_lower_levels(reports, names),
            *_of_the_same_gpus(named),
        ),
        unexplained=tuple(one for report in joined for one in report.verdict.unexplained),
        partial=partial.pop() if len(partial) == 1 else (),
        rivals=tuple(choice for report in joined for choice in report.verdict.rivals),
    )
    whole = RunReport(
        started=min(report.started for report in reports),
        seconds=max(report.seconds for report in reports),
        command=command,
        level=min((report.level for report in reports), key=LEVELS.index),
        verdict=verdict,
        verdicts={host: one for report in joined for host, one in report.verdicts.items()},
        hosts=tuple(host for report in joined for host in report.hosts),
        gpus=tuple(gpu for report in joined for gpu in report.gpus),
        checks=tuple(run for report in joined for run in report.checks),
        observations=tuple(entry for report in joined for entry in report.observations),
        measurements=tuple(one for report in joined for one in report.measurements),
        samples=tuple(sample for report in joined for sample in report.samples),
        findings=tuple(finding for report in joined for finding in report.findings),
        policy=reports[0].policy if all(report.policy == reports[0].policy for report in reports) else {},
        simulated=reports[0].simulated,
        planted=tuple(f"{name}: {one}" for report, name in zip(reports, names, strict=True) for one in report.planted),
        versions={name: report.versions for report, name in zip(reports, names, strict=True) if report.versions},
    )
    return _with_suspects(_with_moves(whole, _moves(named, numbers)))


def worst(kinds: Iterable[Kind]) -> Kind:
    return min(kinds, key=_WORST.index)


def _moves(named: Mapping[str, RunReport], numbers: Sequence[_Numbers]) -> dict[int, list[str]]:
    """Return for each host whose GPU is in another host, too, a line for each such GPU.

    Raises:
        ValueError: a GPU is in two reports of one host.
    """
    hosts = dict(zip(named, (its.hosts for its in numbers), strict=True))
    found: dict[int, list[str]] = {}
    for key, seen in sightings({file: report for file, report in named.items() if not report.simulated}).items():
        for one, other in itertools.combinations(seen, 2):
            if same_host(one.host, other.host):
                raise ValueError(f"GPU {key} is in {one.file} and in {other.file}; give the latest report of each node")
        for one, later in itertools.pairwise(seen):
            both = later.began < one.ended
            line = (
                f"GPU {key} was in {one.place}, and is in {later.place} since {later.report.started}: accept "
                f"{one.host.name} again"
            )
            if both:
                line = (
                    f"GPU {key} is in {one.place} and in {later.place} at the same time: compare the labels of both "
                    "boards; two report one identity, or one host has two names"
                )
            for where in (one, later) if both else (one,):
                found.setdefault(hosts[where.file][where.host.number], []).append(line)
    return found


def _with_moves(whole: RunReport, moves: Mapping[int, Sequence[str]]) -> RunReport:
    def verdict(one: Verdict, lines: Iterable[str]) -> Verdict:
        added = tuple(dict.fromkeys(lines))
        kind = worst([one.kind, "INCONCLUSIVE"]) if added else one.kind
        return replace(one, kind=kind, unknown=(*one.unknown, *added))

    return replace(
        whole,
        verdict=verdict(whole.verdict, itertools.chain(*moves.values())),
        verdicts={host: verdict(one, moves.get(host, ())) for host, one in whole.verdicts.items()},
    )


def _with_suspects(whole: RunReport) -> RunReport:
    """Add an accusation of each host that is slower than the others of its model, unless an earlier merge has."""
    known = {one.part for one in whole.verdict.accusations if summary.is_suspect(one)}
    found = [one for one in among_nodes(whole).outliers if Part("host", (one.host,)) not in known]
    slow = [judged(one.observation, whole.policy) for one in found]
    observations = (*whole.observations, *slow)
    numbers: dict[int, list[int]] = {}
    for number, entry in enumerate(slow, len(whole.observations)):
        if entry.outcome == "failed":
            numbers.setdefault(entry.subject.members[0], []).append(number)
    findings = listed(slow)
    accused: dict[int, Accusation] = {}
    for one in findings:
        if (mine := numbers.get(host := one.subject.members[0])) is not None:
            because = tuple(f"performance: {observations[number].seen}" for number in mine)
            part = Part("host", (host,))
            accused[host] = Accusation(
                part, because, tuple(mine), "", one.advice, "", (one.id,), one.severity, one.action
            )

    def verdict(one: Verdict, more: Iterable[Accusation]) -> Verdict:
        accusations = (*one.accusations, *more)
        return replace(one, kind=worst([one.kind, "SUSPECT"]), accusations=accusations) if more else one

    return replace(
        whole,
        verdict=verdict(whole.verdict, accused.values()),
        verdicts={
            host: verdict(one, [accused[host]] if host in accused else []) for host, one in whole.verdicts.items()
        },
        checks=tuple(
            replace(run, outcome="failed") if run.name == "performance" and run.host in accused else run
            for run in whole.checks
        ),
        observations=observations,
        findings=(*whole.findings, *findings),
    )


def _unknown(report: RunReport, name: str, with_partial: bool) -> list[str]:
    """Return why checks could not be done on a node; `with_partial` adds a partial selection."""
    partial = report.verdict.partial if with_partial else ()
    return [*report.verdict.unknown, *([f"{name}: only {', '.join(partial)} ran"] if partial else [])]


def _of_lower_levels(reports: Sequence[RunReport], names: Sequence[str]) -> Iterator[str]:
    highest = max((report.level for report in reports), key=LEVELS.index)
    for report, name in zip(reports, names, strict=True):
        if report.level != highest:
            yield f"{name}: its level is {report.level}, which does less than the level {highest} of other nodes"


def _of_the_same_gpus(named: Mapping[str, RunReport]) -> Iterator[str]:
    """Yield a line for each set of simulated reports of the same GPUs; see `_moves` for real ones."""
    seen: dict[tuple[str, ...], list[str]] = {}
    for key, places in sightings({file: report for file, report in named.items() if report.simulated}).items():
        if len(files := tuple(dict.fromkeys(sighting.file for sighting in places))) > 1:
            seen.setdefault(files, []).append(key)
    for files, keys in seen.items():
        yield f"{', '.join(files)} have {len(keys)} serial numbers in common, such as {keys[0]}: a node may count twice"


def _names(reports: Sequence[RunReport]) -> list[str]:
    hosts = iter(distinct_names([(host.name, host.boot) for report in reports for host in report.hosts]))
    return [", ".join(next(hosts) for _ in report.hosts) or "a node" for report in reports]


def _refuse_what_does_not_fit(named: Mapping[str, RunReport]) -> None:
    simulated = {name: bool(report.simulated) for name, report in named.items()}
    if len(set(simulated.values())) > 1:
        one = next(name for name, value in simulated.items() if value)
        other = next(name for name, value in simulated.items() if not value)
        raise ValueError(
            f"{one} is of a SIMULATED node, and {other} is not; merge only reports of real nodes, or only of "
            "simulated ones"
        )


def _numbered(reports: Sequence[RunReport]) -> Iterable[_Numbers]:
    hosts = gpus = observations = 0
    for report in reports:
        yield _Numbers(
            {host.number: hosts + place for place, host in enumerate(report.hosts)},
            {gpu.number: gpus + place for place, gpu in enumerate(report.gpus)},
            observations,
        )
        hosts += len(report.hosts)
        gpus += len(report.gpus)
        observations += len(report.observations)


def _renumbered(report: RunReport, its: _Numbers, name: str) -> RunReport:
    # Lines of text keep the numbers of the node's own run, so a prefix says whose numbers they are.
    prefix = "" if its.same else f"by the numbers of {name}: "
    only = next(iter(its.hosts.values())) if len(its.hosts) == 1 else None

    def verdict(one: Verdict) -> Verdict:
        return replace(
            one,
            accusations=tuple(_accusation(accusation, its, prefix) for accusation in one.accusations),
            unknown=tuple(f"{name}: {line}" for line in one.unknown),
            unexplained=tuple(its.first + number for number in one.unexplained),
            rivals=tuple(tuple(tuple(_part(part, its) for part in some) for some in sets) for sets in one.rivals),
        )

    return replace(
        report,
        verdict=verdict(report.verdict),
        verdicts={its.hosts[host]: verdict(one) for host, one in report.verdicts.items() if host in its.hosts},
        hosts=tuple(replace(host, number=its.hosts[host.number]) for host in report.hosts),
        gpus=tuple(_gpu(gpu, its) for gpu in report.gpus),
        checks=tuple(replace(run, host=only if run.host is None else its.hosts.get(run.host)) for run in report.checks),
        observations=tuple(
            replace(
                entry,
                subject=_subject(entry.subject, its),
                suspects=tuple(its.gpus.get(number, number) for number in entry.suspects),
            )
            for entry in report.observations
        ),
        findings=tuple(replace(one, subject=_subject(one.subject, its)) for one in report.findings),
        measurements=tuple(replace(one, subject=_subject(one.subject, its)) for one in report.measurements),
        samples=tuple(replace(sample, gpu=its.gpus[sample.gpu]) for sample in report.samples if sample.gpu in its.gpus),
    )


def _gpu(gpu: Gpu, its: _Numbers) -> Gpu:
    return replace(gpu, number=its.gpus[gpu.number], host=its.hosts.get(gpu.host, gpu.host))


def _members(kind: str, members: tuple[int, ...], its: _Numbers) -> tuple[int, ...]:
    numbers = its.hosts if kind == "host" else its.gpus
    return tuple(numbers.get(member, member) for member in members)


def _subject(subject: Subject, its: _Numbers) -> Subject:
    return Subject(subject.kind, _members(subject.kind, subject.members, its))


def _part(part: Part, its: _Numbers) -> Part:
    return Part(part.kind, _members(part.kind, part.members, its))


def _accusation(one: Accusation, its: _Numbers, prefix: str) -> Accusation:
    return replace(
        one,
        part=_part(one.part, its),
        because=tuple(f"{prefix}{line}" for line in one.because),
        observations=tuple(its.first + number for number in one.observations),
        shared=tuple(its.first + number for number in one.shared),
        arm=f"{prefix}{one.arm}" if one.arm else "",
    )
