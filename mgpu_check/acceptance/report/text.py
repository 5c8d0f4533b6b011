"""The verdict as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from mgpu_check.acceptance.report import view
from mgpu_check.acceptance.report.detected import detected
from mgpu_check.acceptance.run_report import EXIT_CODES, INTERRUPTED, Accusation, RunReport
from mgpu_check.devices.observations import Observation

_MOST = 8
"""Most lines of one kind; the rest is only counted."""
_TEXTS = 2
"""Leading columns of the table of checks that hold words and are aligned left."""


def lines(report: RunReport) -> list[str]:
    """Return the summary of a run: verdict, accused parts, unknown results, table of checks, command to repeat it."""
    found = [view.headline(report)]
    if report.simulated:
        found.append(f"  {view.SIMULATED}")
    found += [f"  planted: {text}" for text in report.planted]
    found += [f"  {line}" for line in view.ruled(report)]
    if len(report.hosts) > 1:
        found += [
            f"  {view.host_name(report, number)}: {verdict.kind}" for number, verdict in sorted(report.verdicts.items())
        ]
    found += [f"  {line}" for line in _most(view.among_hosts(report))]
    for accusation in report.verdict.accusations:
        found += ["", *_accusation(report, accusation)]
    warned = [view.warning_text(report, finding) for finding in view.warnings(report)]
    if warned:
        found += ["", "warnings:", *(f"  {line}" for line in _most(warned))]
    loose = view.failed_of(report, report.verdict)
    if loose:
        found += ["", f"failures {view.unexplained_by(report.verdict)}:"]
        found += [f"  {line}" for line in view.rivals_of(report, report.verdict)]
        found += [f"  {line}" for line in _most([_observation(report, entry) for entry in loose])]
    if report.verdict.unknown:
        found += ["", "could not be checked:"]
        found += [f"  {line}" for line in _most(list(report.verdict.unknown))]
    found += ["", *_checks(report), "", f"repeat: {view.repeat(report)}"]
    return found


def verdict_lines(report: RunReport, interrupted: bool) -> list[str]:
    """Return the verdict for scripts: its word alone, then the exit code, the headline and the verdict of each host."""
    code = INTERRUPTED if interrupted else EXIT_CODES[report.verdict.kind]
    hosts = (f"{view.host_name(report, number)}: {one.kind}" for number, one in sorted(report.verdicts.items()))
    return [report.verdict.kind, f"exit code: {code}", view.headline(report), *hosts]


def _accusation(report: RunReport, accusation: Accusation) -> Iterator[str]:
    yield view.name_of(report, accusation.part)
    for line in view.describe_part(report, accusation.part):
        yield f"  {line}"
    for line in _most(list(accusation.because)):
        yield f"  seen: {line}"
    if told := view.finding_text(accusation):
        yield f"  finding: {told}"
    if accusation.arm:
        yield f"  second look: {accusation.arm}"
    if accusation.advice:
        yield f"  do: {accusation.advice}"
    if accusation.repeat:
        yield f"  look again: {accusation.repeat}"


def _observation(report: RunReport, entry: Observation) -> str:
    case = f" ({entry.case})" if entry.case else ""
    return f"{entry.check}: {view.name_of(report, entry.subject)}: {entry.seen}{case}"


def _most(some: list[str]) -> list[str]:
    return some if len(some) <= _MOST else [*some[: _MOST - 1], f"… and {len(some) - _MOST + 1} more"]


def _checks(report: RunReport) -> Iterator[str]:
    counts = view.tallies(report)
    runs = view.checks_by_name(report)
    if not runs:
        yield "no check ran"
    rows: list[tuple[str, ...]] = [
        ("check", "outcome", "time", "passed", "failed", "skipped", "unknown", "least work of a subject")
    ]
    for run in runs:
        tally = counts[run.name]
        numbers = (str(n) for n in (tally.passed, tally.failed, tally.skipped, tally.unknown))
        done = "; ".join(filter(None, (view.work_text(run.least), run.why)))
        rows.append((run.name, run.outcome, view.seconds_text(run.seconds), *numbers, done))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if runs else []:
        cells = [
            f"{cell:<{width}}" if place < _TEXTS else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row[:-1], widths[:-1], strict=True))
        ]
        yield "  ".join([*cells, row[-1]]).rstrip()
    yield f"checks: {view.counts_of_checks(runs)}"
    yield from detected(report)
    yield f"took {view.seconds_text(report.seconds)} at the level {report.level}"
