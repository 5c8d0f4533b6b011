"""Join the reports of many nodes into one, and follow GPUs over several reports by serial number."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mgpu_check.acceptance.findings import judged, listed
from mgpu_check.acceptance.performance.checks import among_nodes
from mgpu_check.acceptance.report import summary
from mgpu_check.acceptance.run_report import Accusation, Gpu, Host, Kind, RunReport, Verdict
from mgpu_check.devices.observations import Part, Subject
from mgpu_check.option_values import LEVELS
from mgpu_check.processes.machine import distinct_names


@dataclass(frozen=True)
class Sighting:
    file: str  # name of the report, for messages
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
        name = self.host.name or f"host {self.host.number}"
        return f"{name} (cuda:{self.gpu.index}, PCI {self.gpu.pci or 'unknown'})"


def same_host(host: Host, peer: Host) -> bool:
    """Return whether two hosts are one machine: of one name, or of one boot of the kernel, as containers are."""
    return host.name == peer.name or bool(host.boot and host.boot == peer.boot)


def sightings(named: Mapping[str, RunReport]) -> dict[str, list[Sighting]]:
    """Return where and when each GPU was seen, in order of time, by serial number.

    The key of a GPU is its UUID if it has no serial number of its own: boards with several GPUs have one. A GPU with
    neither is left out.
    """
    serials = {gpu.uuid: gpu.serial for report in named.values() for gpu in report.gpus if gpu.uuid and gpu.serial}
    by_gpu: dict[str, list[Sighting]] = {}
    for file, report in sorted(named.items(), key=lambda item: _time(item[1])):
        hosts = {host.number: host for host in report.hosts}
        numbers = [serials.get(gpu.uuid, gpu.serial) for gpu in report.gpus]
        counts = Counter(numbers)
        for gpu, serial in zip(report.gpus, numbers, strict=True):
            key = serial if serial and counts[serial] == 1 else gpu.uuid
            if key and gpu.host in hosts:
                by_gpu.setdefault(key, []).append(Sighting(file, report, hosts[gpu.host], gpu))
    return by_gpu


def _time(report: RunReport) -> datetime.datetime:
    started = datetime.datetime.fromisoformat(report.started)
    return started if started.tzinfo else started.replace(tzinfo=datetime.UTC)


_JOINED = ("hosts", "gpus", "checks", "observations", "measurements", "samples", "findings")
_WORST: tuple[Kind, ...] = ("REJECTED", "SUSPECT", "INCONCLUSIVE", "ACCEPTED")


@dataclass(frozen=True)
class _Numbers:
    """The numbers of one report's hosts and GPUs, and the index of its first observation, in the joined report."""

    hosts: Mapping[int, int]
    gpus: Mapping[int, int]
    observation_offset: int

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
    file = {bool(report.simulated): name for name, report in reversed([*named.items()])}  # the first of each kind
    if len(file) > 1:
        raise ValueError(
            f"{file[True]} is of a SIMULATED node, and {file[False]} is not; merge only reports of real nodes, or only "
            "of simulated ones"
        )
    numbers = list(_numbered(reports))
    host_names = iter(distinct_names([(host.name, host.boot) for report in reports for host in report.hosts]))
    node_names = [", ".join(next(host_names) for _ in report.hosts) or "a node" for report in reports]
    joined = [_renumbered(*each) for each in zip(reports, numbers, node_names, strict=True)]
    partial = {report.verdict.partial for report in reports}
    unknown: list[str] = []
    by_name = list(zip(node_names, joined, strict=True))
    for name, report in by_name:
        selected = report.verdict.partial if len(partial) > 1 else ()
        unknown += [*report.verdict.unknown, *([f"{name}: only {', '.join(selected)} ran"] if selected else [])]
    highest = max((report.level for report in reports), key=LEVELS.index)
    unknown += [
        f"{name}: its level is {report.level}, which does less than the level {highest} of other nodes"
        for report, name in zip(reports, node_names, strict=True)
        if report.level != highest
    ]
    verdict = Verdict(
        kind=worst(report.verdict.kind for report in reports),
        accusations=tuple(accusation for report in joined for accusation in report.verdict.accusations),
        unknown=(*unknown, *_of_the_same_gpus(named)),
        unexplained=tuple(index for report in joined for index in report.verdict.unexplained),
        partial=partial.pop() if len(partial) == 1 else (),
        rivals=tuple(choice for report in joined for choice in report.verdict.rivals),
    )
    several: dict[str, Any] = {
        name: tuple(itertools.chain(*(getattr(report, name) for report in joined))) for name in _JOINED
    }
    joined_report = RunReport(
        started=min(report.started for report in reports),
        seconds=max(report.seconds for report in reports),
        command=command,
        level=min((report.level for report in reports), key=LEVELS.index),
        verdict=verdict,
        verdicts={host: of_host for report in joined for host, of_host in report.verdicts.items()},
        **several,
        policy=reports[0].policy if all(report.policy == reports[0].policy for report in reports) else {},
        simulated=reports[0].simulated,
        planted=tuple(f"{name}: {fault}" for name, report in by_name for fault in report.planted),
        versions={name: report.versions for name, report in by_name if report.versions},
    )
    return _with_suspects(_with_moves(joined_report, _moves(named, numbers)))


def worst(kinds: Iterable[Kind]) -> Kind:
    return min(kinds, key=_WORST.index)


def _moves(named: Mapping[str, RunReport], numbers: Sequence[_Numbers]) -> dict[int, list[str]]:
    """Return for each host whose GPU is in another host, too, a line for each such GPU."""
    hosts = dict(zip(named, (its.hosts for its in numbers), strict=True))
    lines_of_host: dict[int, list[str]] = {}
    for key, visits in sightings({file: report for file, report in named.items() if not report.simulated}).items():
        for earlier, subsequent in itertools.combinations(visits, 2):
            if same_host(earlier.host, subsequent.host):
                both_files = f"{earlier.file} and in {subsequent.file}"
                raise ValueError(f"GPU {key} is in {both_files}; give the latest report of each node")
        for earlier, later in itertools.pairwise(visits):
            both = later.began < earlier.ended
            line = (
                f"GPU {key} was in {earlier.place}, and is in {later.place} since {later.report.started}: accept "
                f"{earlier.host.name} again"
            )
            if both:
                line = (
                    f"GPU {key} is in {earlier.place} and in {later.place} at the same time: compare the labels of "
                    "both boards; two report one identity, or one host has two names"
                )
            for sighting in (earlier, later) if both else (earlier,):
                lines_of_host.setdefault(hosts[sighting.file][sighting.host.number], []).append(line)
    return lines_of_host


def _with_moves(report: RunReport, moves: Mapping[int, Sequence[str]]) -> RunReport:
    def verdict(original: Verdict, lines: Iterable[str]) -> Verdict:
        added = tuple(dict.fromkeys(lines))
        worst_kind = worst([original.kind, "INCONCLUSIVE"]) if added else original.kind
        return replace(original, kind=worst_kind, unknown=(*original.unknown, *added))

    verdicts = {host: verdict(original, moves.get(host, ())) for host, original in report.verdicts.items()}
    return replace(report, verdict=verdict(report.verdict, itertools.chain(*moves.values())), verdicts=verdicts)


def _with_suspects(report: RunReport) -> RunReport:
    """Add an accusation of each host that is slower than the others of its model, unless an earlier merge has."""
    suspects = {accusation.part for accusation in report.verdict.accusations if summary.is_suspect(accusation)}
    outliers = (node for node in among_nodes(report).outliers if Part("host", (node.host,)) not in suspects)
    slow = [judged(node.observation, report.policy) for node in outliers]
    observations = (*report.observations, *slow)
    numbers: dict[int, list[int]] = {}
    for number, entry in enumerate(slow, len(report.observations)):
        if entry.outcome == "failed":
            numbers.setdefault(entry.subject.members[0], []).append(number)
    findings = listed(slow)
    accused: dict[int, Accusation] = {}
    for finding in findings:
        if (mine := numbers.get(host := finding.subject.members[0])) is not None:
            because = tuple(f"performance: {observations[number].seen}" for number in mine)
            remedy = finding.advice, "", (finding.id,), finding.severity, finding.action
            accused[host] = Accusation(Part("host", (host,)), because, tuple(mine), "", *remedy)

    def verdict(original: Verdict, additions: Sequence[Accusation]) -> Verdict:
        if not additions:
            return original
        accusations = (*original.accusations, *additions)
        return replace(original, kind=worst([original.kind, "SUSPECT"]), accusations=accusations)

    return replace(
        report,
        verdict=verdict(report.verdict, list(accused.values())),
        verdicts={
            host: verdict(original, [accused[host]] if host in accused else [])
            for host, original in report.verdicts.items()
        },
        checks=tuple(
            replace(run, outcome="failed") if run.name == "performance" and run.host in accused else run
            for run in report.checks
        ),
        observations=observations,
        findings=(*report.findings, *findings),
    )


def _of_the_same_gpus(named: Mapping[str, RunReport]) -> Iterator[str]:
    """Yield a line for each set of simulated reports of the same GPUs; see `_moves` for real ones."""
    keys_by_files: dict[tuple[str, ...], list[str]] = {}
    for key, places in sightings({file: report for file, report in named.items() if report.simulated}).items():
        if len(files := tuple(dict.fromkeys(sighting.file for sighting in places))) > 1:
            keys_by_files.setdefault(files, []).append(key)
    for files, keys in keys_by_files.items():
        yield f"{', '.join(files)} have {len(keys)} serial numbers in common, such as {keys[0]}: a node may count twice"


def _numbered(reports: Sequence[RunReport]) -> Iterable[_Numbers]:
    hosts = gpus = observations = 0
    for report in reports:
        new_hosts = {host.number: number for number, host in enumerate(report.hosts, hosts)}
        new_gpus = {gpu.number: number for number, gpu in enumerate(report.gpus, gpus)}
        yield _Numbers(new_hosts, new_gpus, observations)
        hosts += len(report.hosts)
        gpus += len(report.gpus)
        observations += len(report.observations)


def _renumbered(report: RunReport, its: _Numbers, name: str) -> RunReport:
    # Lines of text keep the numbers of the node's own run, so a prefix says whose numbers they are.
    prefix = "" if its.same else f"by the numbers of {name}: "
    only = next(iter(its.hosts.values())) if len(its.hosts) == 1 else None

    def verdict(original: Verdict) -> Verdict:
        return replace(
            original,
            accusations=tuple(_accusation(accusation, its, prefix) for accusation in original.accusations),
            unknown=tuple(f"{name}: {line}" for line in original.unknown),
            unexplained=tuple(its.observation_offset + number for number in original.unexplained),
            rivals=tuple(
                tuple(tuple(_moved(part, its) for part in rival) for rival in sets) for sets in original.rivals
            ),
        )

    hosts = its.hosts
    return replace(
        report,
        verdict=verdict(report.verdict),
        verdicts={hosts[host]: verdict(original) for host, original in report.verdicts.items() if host in hosts},
        hosts=tuple(replace(host, number=hosts[host.number]) for host in report.hosts),
        gpus=tuple(
            replace(gpu, number=its.gpus[gpu.number], host=hosts.get(gpu.host, gpu.host)) for gpu in report.gpus
        ),
        checks=tuple(replace(run, host=only if run.host is None else hosts.get(run.host)) for run in report.checks),
        observations=tuple(
            replace(entry, subject=_moved(entry.subject, its), suspects=_numbers(its.gpus, entry.suspects))
            for entry in report.observations
        ),
        findings=tuple(replace(finding, subject=_moved(finding.subject, its)) for finding in report.findings),
        measurements=tuple(replace(speed, subject=_moved(speed.subject, its)) for speed in report.measurements),
        samples=tuple(replace(sample, gpu=its.gpus[sample.gpu]) for sample in report.samples if sample.gpu in its.gpus),
    )


_Members = TypeVar("_Members", Subject, Part)


def _moved(original: _Members, its: _Numbers) -> _Members:
    return replace(original, members=_numbers(its.hosts if original.kind == "host" else its.gpus, original.members))


def _numbers(moved: Mapping[int, int], numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(moved.get(number, number) for number in numbers)


def _accusation(accusation: Accusation, its: _Numbers, prefix: str) -> Accusation:
    return replace(
        accusation,
        part=_moved(accusation.part, its),
        because=tuple(f"{prefix}{line}" for line in accusation.because),
        observations=tuple(its.observation_offset + number for number in accusation.observations),
        shared=tuple(its.observation_offset + number for number in accusation.shared),
        arm=f"{prefix}{accusation.arm}" if accusation.arm else "",
    )
