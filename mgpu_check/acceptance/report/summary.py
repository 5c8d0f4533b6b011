"""The verdict as lines for a terminal, and the words and counts that all reports share.

These are headline, names of parts, counts, amounts, and how rare and how slow a fault may be that an acceptance finds.
`to_prometheus` writes a textfile for the node exporter of Prometheus: verdict, GPUs, findings, checks, speeds.
"""

from __future__ import annotations

import datetime
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mgpu_check.acceptance.comparison import LEAST_PEERS
from mgpu_check.acceptance.findings import ReportedFinding
from mgpu_check.acceptance.performance.checks import SLOW_NODE, among_nodes
from mgpu_check.acceptance.plan import CHECKLIST
from mgpu_check.acceptance.run_report import (
    EXIT_CODES,
    INTERRUPTED,
    Accusation,
    CheckRun,
    Gpu,
    Host,
    RunReport,
    Verdict,
)
from mgpu_check.devices.observations import Observation, Outcome, Part, Subject, Work
from mgpu_check.oracles.devices.cases import CALLS_PER_STALL, SECOND_LONGEST
from mgpu_check.processes.machine import distinct_names
from mgpu_check.processes.rank_lists import grouped

MATRIX = 32  # most GPUs in one matrix
_HOSTS = 16
_RIVALS = 8  # most sets of parts to list that explain the same failures
SIMULATED = "SIMULATED: this shows what the checks do, not the state of any hardware"

OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "skipped", "unknown")
_WORST: tuple[Outcome, ...] = ("failed", "unknown", "passed", "skipped")
_PREFIXES = (
    *((10.0**power, name) for power, name in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k"), (0, ""))),
    *((10.0**power, name) for power, name in ((-3, "m"), (-6, "u"), (-9, "n"))),
)
_BYTES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True)
class Tally:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    unknown: int = 0

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Tally:
        counts = Counter(outcomes)
        return cls(*(counts[name] for name in OUTCOMES))

    @property
    def outcome(self) -> Outcome:
        """The worst outcome; "skipped" only if all were skipped, "unknown" if there are no observations."""
        return next((name for name in _WORST if getattr(self, name)), "unknown")

    @property
    def total(self) -> int:
        return self.passed + self.failed + self.skipped + self.unknown

    def __str__(self) -> str:
        """Return all four numbers, even if 0, so that skipped and unknown are never hidden."""
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped, {self.unknown} unknown"


def tallies(report: RunReport) -> Mapping[str, Tally]:
    by_check: dict[str, list[Outcome]] = {run.name: [] for run in in_order(report.checks)}
    for entry in report.observations:
        by_check.setdefault(entry.check, []).extend([entry.outcome] * entry.times)
    return {name: Tally.of(outcomes) for name, outcomes in by_check.items()}


def check_names(report: RunReport) -> list[str]:
    return list(tallies(report))


def in_order(checks: Iterable[CheckRun]) -> list[CheckRun]:
    """Sort checks by their start; checks that did not start come last."""
    return sorted(checks, key=lambda run: (not run.started and not run.seconds, run.started))


def checks_by_name(report: RunReport) -> list[CheckRun]:
    """Return one entry for each check, with the entries of several hosts combined."""
    by_name = grouped((run.name, run) for run in in_order(report.checks))
    return [runs[0] if len(runs) == 1 else _together(report, runs) for _, runs in by_name]


def _together(report: RunReport, runs: list[CheckRun]) -> CheckRun:
    outcome = Tally.of(run.outcome for run in runs).outcome
    telling = (run for run in runs if run.why and run.outcome == outcome)
    whys = (run.why if run.host is None else f"{host_name(report, run.host)}: {run.why}" for run in telling)
    started, seconds = min(run.started for run in runs), max(run.seconds for run in runs)
    floor, least = _least([run.floor for run in runs]), _least([run.least for run in runs])
    return CheckRun(runs[0].name, started, seconds, outcome, floor, least, "; ".join(whys))


def _least(works: Sequence[Work]) -> Work:
    return Work(min(w.bytes for w in works), min(w.operations for w in works), min(w.seconds for w in works))


def counts_of_checks(checks: Iterable[CheckRun]) -> Tally:
    return Tally.of(run.outcome for run in checks)


def accused_gpus(report: RunReport) -> set[int]:
    """Return the GPUs that are accused, or whose links are."""
    components = [accusation.part for accusation in report.verdict.accusations]
    return {gpu for component in components if component.kind != "host" for gpu in component.members}


def headline(report: RunReport) -> str:
    """Return the verdict in one line; its first word is the kind of the verdict."""
    verdict = report.verdict
    gpus = what(len(report.gpus), "GPU")
    on = f" on {what(len(report.gpus), f'SIMULATED {report.simulated} GPU')}" if report.simulated else ""
    names: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for accusation in verdict.accusations:
        names[is_suspect(accusation)][name_of(report, accusation.part)] = None
    suspects, accused = ", ".join(names[True]), ", ".join(names[False])
    if verdict.kind == "SUSPECT":
        reason = suspects
    elif verdict.kind == "REJECTED":
        loose = len(verdict.unexplained)
        unexplained = f"{what(loose, 'failure')} {unexplained_by(verdict)}" if loose else ""
        reason = "; ".join(filter(None, (accused, unexplained))) or "no part is named"
        reason += f"; SUSPECT: {suspects}" if suspects else ""
    elif verdict.kind == "INCONCLUSIVE":
        reason = "; ".join(verdict.unknown[:1]) or "something could not be checked"
        remaining = len(verdict.unknown) - 1
        reason += f"; and {remaining} more" if remaining > 0 else ""
    else:
        reason = f"{gpus} passed {what(len({run.name for run in report.checks}), 'check')}"
    partial = f"; only {', '.join(verdict.partial)} ran" if verdict.partial else ""
    warned = f"; {what(len(warnings(report)), 'warning')}" if warnings(report) else ""
    return f"{verdict.kind}{on}: {reason}{warned}{partial}"


def warnings(report: RunReport) -> list[ReportedFinding]:
    """Return the findings that do not change the verdict, and that the policy does not accept."""
    return [finding for finding in report.findings if finding.ruling == "warn"]


def is_suspect(accusation: Accusation) -> bool:
    """Return whether the part is a host that is only slower than the others."""
    return accusation.findings == (SLOW_NODE,)


def warning_text(report: RunReport, finding: ReportedFinding) -> str:
    times = f" ({finding.times} times)" if finding.times > 1 else ""
    return f"{finding.id}: {name_of(report, finding.subject)}: {finding.seen}{times}; do: {finding.advice}"


def ruled(report: RunReport) -> list[str]:
    return [f"policy: {name} = {ruling}" for name, ruling in report.policy.items()]


def finding_text(accusation: Accusation) -> str:
    """Return the ids, the severity and the action of an accusation in one line; "" if it has none."""
    if not accusation.findings:
        return ""
    return f"{', '.join(accusation.findings)}; severity {accusation.severity}, action {accusation.action}"


def what(number: int, thing: str) -> str:
    """Return a number with a noun: ``1 GPU``, ``8 GPUs``."""
    return f"{number} {thing}{'s' * (number != 1)}"


def host_name(report: RunReport, number: int) -> str:
    """Return the name of a host, with its boot id if another host has the same name."""
    host_names = distinct_names([(host.name or f"host {host.number}", host.boot) for host in report.hosts])
    names = {host.number: name for host, name in zip(report.hosts, host_names, strict=True)}
    return names.get(number, f"host {number}")


def name_of(report: RunReport, subject: Part | Subject) -> str:
    """Return the short name of a part or a subject, with index and host of its GPUs if the report has several hosts."""
    if subject.kind == "host":
        return f"host {host_name(report, subject.members[0])}"
    gpus = [gpu for member in dict.fromkeys(subject.members) for gpu in report.gpus if gpu.number == member]
    if len(report.hosts) < 2 or not gpus:
        return str(subject)
    hosts = list(dict.fromkeys(host_name(report, gpu.host) for gpu in gpus))
    if subject.kind == "group":
        return f"{subject} (of {', '.join(hosts)})"
    places = [f"cuda:{gpu.index} of {host_name(report, gpu.host)}" for gpu in gpus]
    if len(hosts) == 1:
        places = [*(f"cuda:{gpu.index}" for gpu in gpus[:-1]), places[-1]]
    return f"{subject} ({' -> '.join(places)})"


def in_detail(report: RunReport) -> list[Host]:
    """Return the hosts to show in detail: all, or on large systems up to 16 that were not ACCEPTED."""
    if len(report.gpus) <= MATRIX:
        return list(report.hosts)
    verdicts = report.verdicts
    open_ = [host for host in report.hosts if host.number not in verdicts or verdicts[host.number].kind != "ACCEPTED"]
    return open_[:_HOSTS]


def describe_gpu(report: RunReport, gpu: Gpu) -> str:
    details = [f"cuda:{gpu.index} of {host_name(report, gpu.host)}", gpu.name]
    return "; ".join([*details, *(f"{label} {value}" for label, value in identity(gpu))])


def identity(gpu: Gpu) -> list[tuple[str, str]]:
    """Return UUID, serial number and PCI bus id of a GPU, with "unknown" for missing values."""
    return [("UUID", gpu.uuid or "unknown"), ("serial", gpu.serial or "unknown"), ("PCI", gpu.pci or "unknown")]


def describe_part(report: RunReport, component: Part) -> list[str]:
    """Describe each GPU of a part in a line; a host by its name and software."""
    if component.kind == "host":
        host = next((host for host in report.hosts if host.number == component.members[0]), None)
        software = ", ".join(f"{name} {version}" for name, version in host.software.items()) if host else ""
        return ["; ".join(filter(None, (host_name(report, component.members[0]), software)))]
    gpus = {gpu.number: gpu for gpu in report.gpus}
    lines = []
    for member in dict.fromkeys(component.members):
        prefix = f"GPU {member}: " if component.kind != "gpu" else ""
        lines.append(prefix + (describe_gpu(report, gpus[member]) if member in gpus else "unknown to this run"))
    return lines


def gpus_of(report: RunReport, subject: Subject) -> tuple[int, ...]:
    """Return the numbers of the GPUs of a subject; for a host, of all its GPUs."""
    if subject.kind == "host":
        return tuple(gpu.number for gpu in report.gpus if gpu.host in subject.members)
    return tuple(dict.fromkeys(subject.members))


def repeat(report: RunReport) -> str:
    has_seed = any(word.partition("=")[0] == "--hypothesis-seed" for word in _words(report.command))
    return report.command if report.seed is None or has_seed else f"{report.command} --hypothesis-seed={report.seed}"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an incomplete quotation, as in a truncated command
        return command.split()


def bytes_text(count: float) -> str:
    """Format an amount of memory: ``79.6 GiB``."""
    name, scale = next(((name, scale) for name, scale in _BYTES if count >= scale), ("B", 1))
    return f"{count / scale:.4g} {name}"


def seconds_text(seconds: float) -> str:
    """Format a duration: ``0.42 s``, ``12.3 s``, ``7 min 30 s``, ``2 h 5 min``."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60} min" + (f" {rounded % 60} s" if rounded % 60 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def prefix(values: Iterable[float]) -> tuple[float, str]:
    """Return the factor and the unit prefix that suit the largest of `values`."""
    most = max((abs(value) for value in values if math.isfinite(value)), default=1.0)
    return next((step for step in _PREFIXES if most >= step[0]), _PREFIXES[-1])


def among_hosts(report: RunReport) -> list[str]:
    """Return a line for each host that is slower than the others of its model, or could not be compared."""
    if len(report.hosts) < 2:
        return []
    if len(report.hosts) <= LEAST_PEERS:
        return [f"speeds of hosts are compared with each other from {LEAST_PEERS + 1} hosts on"]
    comparison = among_nodes(report)
    accused_hosts = {accusation.part.members[0] for accusation in report.verdict.accusations if is_suspect(accusation)}
    outliers = (str(outlier) for outlier in comparison.outliers if outlier.host not in accused_hosts)
    return [*outliers, *comparison.unknown]


def work_text(work: Work) -> str:
    """Format an amount of work, without zeros."""
    amounts = [bytes_text(work.bytes)] if work.bytes else []
    amounts += [what(work.operations, "operation")] if work.operations else []
    amounts += [f"{seconds_text(work.seconds)} under load"] if work.seconds else []
    return ", ".join(amounts) or "nothing"


def evidence_of(report: RunReport, accusation: Accusation) -> list[Observation]:
    return [report.observations[number] for number in accusation.observations if number < len(report.observations)]


def failed_of(report: RunReport, verdict: Verdict) -> list[Observation]:
    """Return the failed observations that no accused part explains."""
    return [report.observations[number] for number in verdict.unexplained if number < len(report.observations)]


def unexplained_by(verdict: Verdict) -> str:
    """Return why failures have no accused part, in words that follow "failures"."""
    return "that several sets of parts explain equally well" if verdict.rivals else "that no part explains"


def rivals_of(report: RunReport, verdict: Verdict) -> list[str]:
    """Return a line for each choice between sets of parts that explain the same failures."""
    lines = []
    for sets in verdict.rivals:
        named = [" and ".join(name_of(report, component) for component in rival) for rival in sets[:_RIVALS]]
        named += [f"{len(sets) - _RIVALS} more"] if sets[_RIVALS:] else []
        lines.append(f"none is named of {'; or '.join(named)}")
    return lines


_MISSED = 0.05  # probability that a rare fault is missed


def detected(report: RunReport) -> list[str]:
    return [line for line in (rates(report), slowness(report)) if line]


def rates(report: RunReport) -> str:
    """Return the rarest faults that the checks without failures find with a probability of 95 %; "" if none counts.
    A fault that strikes each of n operations with probability 1/N is missed with probability (1 - 1/N)^n."""
    frequencies = []
    for run in checks_by_name(report):
        unit, done = CHECKLIST[run.name].counts if run.name in CHECKLIST else "", run.least.operations
        if unit and done > 1 and run.outcome == "passed":
            frequencies.append(f"1 in {math.floor(1 / (1 - _MISSED ** (1 / done)))} {unit}")
    return f"faults as rare as {', '.join(frequencies)} are found with a probability of 95 %" if frequencies else ""


def slowness(report: RunReport) -> str:
    """Return how much slower than its peers a part must be to be found, by the kind of speed; "" if none has peers."""
    limits: dict[str, float] = {}
    laps: dict[str, int] = {}
    speeds = [entry for entry in report.observations if {"comparisons", "measured_by"} <= entry.evidence.keys()]
    compared = 0
    for entry in speeds:
        for comparison in entry.evidence["comparisons"]:
            if comparison["against"] == "peers" and comparison["outcome"] in ("passed", "failed"):
                compared += 1
                kind_of_speed = entry.evidence["measured_by"]
                if entry.evidence["quantity"].endswith(SECOND_LONGEST):
                    laps[kind_of_speed] = min(laps.get(kind_of_speed, 1 << 60), entry.evidence["repeats"])
                    continue
                if entry.evidence["unit"] == "s":
                    kind_of_speed += ", times"
                elif entry.evidence["quantity"].startswith("pageable"):
                    kind_of_speed += ", pageable"
                elif entry.subject.kind in ("upload", "download"):
                    kind_of_speed += ", host"
                limits[kind_of_speed] = max(limits.get(kind_of_speed, 0.0), comparison["limit"])
    if not limits:
        return ""
    listing = ", ".join(f"{limit:.0%} ({name})" for name, limit in limits.items())
    rates = ", ".join(f"1 in {max(1, math.floor(count / CALLS_PER_STALL))} ({name})" for name, count in laps.items())
    stalls = f"operations that take ten times as long are found if they are {rates}; " * bool(rates)
    return f"a part slower than its peers by {listing} is found; {stalls}{compared} of {len(speeds)} speeds have peers"


_MOST = 8  # most lines of one kind; the rest is only counted
_TEXTS = 2  # leading columns of the table of checks that hold words and are aligned left


def lines(report: RunReport) -> list[str]:
    """Return the summary of a run: verdict, accused parts, unknown results, table of checks, command to repeat it."""
    text_lines = [headline(report)]
    if report.simulated:
        text_lines.append(f"  {SIMULATED}")
    text_lines += [f"  planted: {text}" for text in report.planted]
    text_lines += [f"  {line}" for line in ruled(report)]
    if len(report.hosts) > 1:
        text_lines += [f"  {line}" for line in _of_hosts(report)]
    text_lines += [f"  {line}" for line in _most(among_hosts(report))]
    for accusation in report.verdict.accusations:
        text_lines += ["", *_accusation(report, accusation)]
    warned = [warning_text(report, finding) for finding in warnings(report)]
    if warned:
        text_lines += ["", "warnings:", *(f"  {line}" for line in _most(warned))]
    loose = failed_of(report, report.verdict)
    if loose:
        text_lines += ["", f"failures {unexplained_by(report.verdict)}:"]
        text_lines += [f"  {line}" for line in rivals_of(report, report.verdict)]
        pairs = [(entry, f" ({entry.case})" if entry.case else "") for entry in loose]
        failures = [f"{entry.check}: {name_of(report, entry.subject)}: {entry.seen}{case}" for entry, case in pairs]
        text_lines += [f"  {line}" for line in _most(failures)]
    if report.verdict.unknown:
        text_lines += ["", "could not be checked:"]
        text_lines += [f"  {line}" for line in _most(list(report.verdict.unknown))]
    text_lines += ["", *_checks(report), "", f"repeat: {repeat(report)}"]
    return text_lines


def verdict_lines(report: RunReport, interrupted: bool) -> list[str]:
    """Return the verdict for scripts: its word alone, then the exit code, the headline and the verdict of each host."""
    code = INTERRUPTED if interrupted else EXIT_CODES[report.verdict.kind]
    return [report.verdict.kind, f"exit code: {code}", headline(report), *_of_hosts(report)]


def _of_hosts(report: RunReport) -> list[str]:
    return [f"{host_name(report, number)}: {verdict.kind}" for number, verdict in sorted(report.verdicts.items())]


def _accusation(report: RunReport, accusation: Accusation) -> Iterator[str]:
    yield name_of(report, accusation.part)
    for line in describe_part(report, accusation.part):
        yield f"  {line}"
    for line in _most(list(accusation.because)):
        yield f"  seen: {line}"
    if finding := finding_text(accusation):
        yield f"  finding: {finding}"
    if accusation.arm:
        yield f"  second look: {accusation.arm}"
    if accusation.advice:
        yield f"  do: {accusation.advice}"
    if accusation.repeat:
        yield f"  look again: {accusation.repeat}"


def _most(texts: list[str]) -> list[str]:
    return texts if len(texts) <= _MOST else [*texts[: _MOST - 1], f"… and {len(texts) - _MOST + 1} more"]


def _checks(report: RunReport) -> Iterator[str]:
    counts = tallies(report)
    runs = checks_by_name(report)
    if not runs:
        yield "no check ran"
    rows: list[tuple[str, ...]] = [("check", "outcome", "time", *OUTCOMES, "least work of a subject")]
    for run in runs:
        numbers = (str(getattr(counts[run.name], name)) for name in OUTCOMES)
        done = "; ".join(filter(None, (work_text(run.least), run.why)))
        rows.append((run.name, run.outcome, seconds_text(run.seconds), *numbers, done))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if runs else []:
        cells = [
            f"{cell:<{width}}" if index < _TEXTS else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row[:-1], widths[:-1], strict=True))
        ]
        yield "  ".join([*cells, row[-1]]).rstrip()
    yield f"checks: {counts_of_checks(runs)}"
    yield from detected(report)
    yield f"took {seconds_text(report.seconds)} at the level {report.level}"


Labels = Mapping[str, object]
Row = tuple[Labels, float]

_HEALTH = ("temperature", "memory_temperature", "power")


def to_prometheus(report: RunReport) -> str:
    lines: list[str] = []
    for name, text, rows in _metrics(report):
        samples = [f"mgpu_check_{name}{_labelled(labels)} {_number(value)}" for labels, value in rows]
        if samples:
            lines += [f"# HELP mgpu_check_{name} {text}", f"# TYPE mgpu_check_{name} gauge", *samples]
    return "\n".join(lines) + "\n"


def _metrics(report: RunReport) -> Iterable[tuple[str, str, Iterable[Row]]]:
    verdicts = [(host_name(report, host), verdict) for host, verdict in sorted(report.verdicts.items())]
    rows: list[Row] = []
    for host, verdict in verdicts:
        rows += [({"host": host, "verdict": word}, float(verdict.kind == word)) for word in EXIT_CODES]
    yield "verdict", "1 for the verdict of the last acceptance of a host, 0 for the others.", rows
    text = "Exit code of the verdict: 0 accepted, 1 rejected, 2 inconclusive, 5 suspect."
    yield "exit_code", text, [({}, EXIT_CODES[report.verdict.kind])]
    started = datetime.datetime.fromisoformat(report.started).timestamp()
    yield "started_seconds", "Unix time at which the acceptance started.", [({}, started)]
    yield "duration_seconds", "Time that the acceptance took.", [({}, report.seconds)]
    text = "1 if the GPUs were simulated, so that nothing here is about hardware."
    yield "simulated", text, [({}, bool(report.simulated))]
    accused = accused_gpus(report)
    rows = []
    for gpu in report.gpus:
        labels = {**_who(report, gpu), "serial": gpu.serial, "pci": gpu.pci, "model": gpu.name}
        rows.append((labels, float(gpu.number in accused)))
    yield "gpu_accused", "1 if the GPU, or a link of it, is accused.", rows
    rows = []
    for finding in report.findings:
        labels = {name: getattr(finding, name) for name in ("id", "severity", "action", "ruling")}
        rows.append(({**labels, "subject": name_of(report, finding.subject)}, finding.times))
    yield "finding", "Number of observations of a kind of finding about a subject.", rows
    rows = []
    for check, tally in tallies(report).items():
        rows += [({"check": check, "outcome": outcome}, getattr(tally, outcome)) for outcome in OUTCOMES]
    yield "observations", "Number of observations of a check, by outcome.", rows
    yield "speed", "Median and slowest of the measured subjects of a kind.", _speeds(report)
    yield "gpu_highest", "Highest value of a telemetry field in the run.", _highest(report)


def _who(report: RunReport, gpu: Gpu) -> Labels:
    return {"gpu": gpu.index, "host": host_name(report, gpu.host), "uuid": gpu.uuid}


def _speeds(report: RunReport) -> Iterable[Row]:
    finite = (measurement for measurement in report.measurements if math.isfinite(measurement.value))
    groups = grouped(((m.subject.kind, m.quantity, m.unit, m.size), m.value) for m in finite)
    for (subject_kind, quantity, unit, size), values in sorted(groups):
        labels = {"subjects": subject_kind, "quantity": quantity, "unit": unit, "size": size}
        yield {**labels, "statistic": "median"}, median(values)
        yield {**labels, "statistic": "slowest"}, max(values) if unit == "s" else min(values)


def _highest(report: RunReport) -> Iterable[Row]:
    for gpu in report.gpus:
        for field in _HEALTH:
            values = [s.values.get(field) for s in report.samples if s.gpu == gpu.number]
            numbers = [float(value) for value in values if isinstance(value, (int, float))]
            if numbers:
                yield {**_who(report, gpu), "field": field}, max(numbers)


_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def _labelled(labels: Labels) -> str:
    words = (f'{name}="{str(value).translate(_ESCAPED)}"' for name, value in labels.items())
    return f"{{{','.join(words)}}}" if labels else ""


def _number(value: float) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)
