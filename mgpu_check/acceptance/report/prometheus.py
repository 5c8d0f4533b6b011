"""The report as a textfile for the node exporter of Prometheus: verdict, GPUs, findings, checks, speeds."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping
from statistics import median

from mgpu_check.acceptance.report import summary
from mgpu_check.acceptance.run_report import EXIT_CODES, Gpu, RunReport
from mgpu_check.processes.rank_lists import grouped

Labels = Mapping[str, object]
Row = tuple[Labels, float]

_HEALTH = ("temperature", "memory_temperature", "power")


def render(report: RunReport) -> str:
    lines: list[str] = []
    for name, text, rows in _metrics(report):
        samples = [f"mgpu_check_{name}{_labelled(labels)} {_number(value)}" for labels, value in rows]
        if samples:
            lines += [f"# HELP mgpu_check_{name} {text}", f"# TYPE mgpu_check_{name} gauge", *samples]
    return "\n".join(lines) + "\n"


def _metrics(report: RunReport) -> Iterable[tuple[str, str, Iterable[Row]]]:
    verdicts = [(summary.host_name(report, host), verdict) for host, verdict in sorted(report.verdicts.items())]
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
    accused = summary.accused_gpus(report)
    rows = []
    for gpu in report.gpus:
        labels = {**_who(report, gpu), "serial": gpu.serial, "pci": gpu.pci, "model": gpu.name}
        rows.append((labels, float(gpu.number in accused)))
    yield "gpu_accused", "1 if the GPU, or a link of it, is accused.", rows
    rows = []
    for finding in report.findings:
        labels = {name: getattr(finding, name) for name in ("id", "severity", "action", "ruling")}
        rows.append(({**labels, "subject": summary.name_of(report, finding.subject)}, finding.times))
    yield "finding", "Number of observations of a kind of finding about a subject.", rows
    rows = []
    for check, tally in summary.tallies(report).items():
        rows += [({"check": check, "outcome": outcome}, getattr(tally, outcome)) for outcome in summary.OUTCOMES]
    yield "observations", "Number of observations of a check, by outcome.", rows
    yield "speed", "Median and slowest of the measured subjects of a kind.", _speeds(report)
    yield "gpu_highest", "Highest value of a telemetry field in the run.", _highest(report)


def _who(report: RunReport, gpu: Gpu) -> Labels:
    return {"gpu": gpu.index, "host": summary.host_name(report, gpu.host), "uuid": gpu.uuid}


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
