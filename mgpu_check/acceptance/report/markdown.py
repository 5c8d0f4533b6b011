"""The report in GitHub's Markdown, for the page of a CI job."""

from __future__ import annotations

import json

from mgpu_check.acceptance.report import view
from mgpu_check.acceptance.report.detected import detected
from mgpu_check.acceptance.report.values import encoded
from mgpu_check.acceptance.run_report import Accusation, RunReport
from mgpu_check.devices.observations import Observation
from mgpu_check.plugin.report.markdown import Page
from mgpu_check.plugin.report.markup import code, fenced, text

_EVIDENCE = 20
"""Most observations to show for an accusation."""


def render(report: RunReport) -> str:
    """Render the report, cut at the number of bytes that GitHub shows."""
    page = Page()
    page.add(f"# mgpu-check accept: {text(view.headline(report))}", "")
    if report.simulated:
        page.add(f"**{text(view.SIMULATED)}**", "")
    for planted in report.planted:
        page.add(f"- planted: {code(planted)}")
    for line in view.ruled(report):
        page.add(f"- {text(line)}")
    page.add(
        *([""] if report.planted or view.ruled(report) else []),  # a line below a list belongs to its last point
        f"{text(report.started)}, {view.seconds_text(report.seconds)} at the level {text(report.level)}. "
        f"Checks: {view.counts_of_checks(view.checks_by_name(report))}.",
        "",
    )
    if len(report.hosts) > 1:
        verdicts = [(text(view.host_name(report, n)), v.kind) for n, v in sorted(report.verdicts.items())]
        page.rows("Hosts", ("host", "verdict"), verdicts)
        page.rows("Hosts beside each other", ("what",), [(text(line),) for line in view.among_hosts(report)])
    for accusation in report.verdict.accusations:
        page.add(*_accusation(report, accusation))
    page.rows("Warnings", ("what",), [(text(view.warning_text(report, one)),) for one in view.warnings(report)])
    unexplained = view.failed_of(report, report.verdict)
    page.rows(f"Failures {view.unexplained_by(report.verdict)}", _HEAD, [_row(report, entry) for entry in unexplained])
    page.add(*(f"- {text(line)}" for line in view.rivals_of(report, report.verdict)), "")
    page.rows("Could not be checked", ("what",), [(text(line),) for line in report.verdict.unknown])
    _checks(page, report)
    page.rows(
        "GPUs",
        ("GPU", "host", "index", "model", "memory", "UUID", "serial", "PCI bus id"),
        [
            (
                str(gpu.number),
                text(view.host_name(report, gpu.host)),
                str(gpu.index),
                text(gpu.name),
                view.bytes_text(gpu.memory),
                code(gpu.uuid) if gpu.uuid else "unknown",
                text(gpu.serial or "unknown"),
                text(gpu.pci or "unknown"),
            )
            for gpu in report.gpus
        ],
    )
    page.add("## Repeat", "", *fenced(view.repeat(report), "sh"))
    return page.content()


_HEAD = ("check", "what", "seen", "case", "evidence")


def _row(report: RunReport, entry: Observation) -> tuple[str, ...]:
    evidence = code(json.dumps(encoded(entry.evidence))) if entry.evidence else ""
    return text(entry.check), text(view.name_of(report, entry.subject)), text(entry.seen), text(entry.case), evidence


def _accusation(report: RunReport, accusation: Accusation) -> list[str]:
    lines = [f"## {text(view.name_of(report, accusation.part))}", ""]
    lines += [f"- {text(line)}" for line in view.describe_part(report, accusation.part)]
    lines += [f"- seen: {text(line)}" for line in accusation.because]
    lines += [f"- finding: {text(told)}"] if (told := view.finding_text(accusation)) else []
    lines += [f"- second look: {text(accusation.arm)}"] if accusation.arm else []
    lines += [f"- do: {text(accusation.advice)}"] if accusation.advice else []
    lines += ["", "Look again with", "", *fenced(accusation.repeat, "sh")] if accusation.repeat else []
    seen = view.evidence_of(report, accusation)
    if seen:
        more = f", {_EVIDENCE} of {len(seen)}" if len(seen) > _EVIDENCE else ""
        lines += ["", "<details>", f"<summary>Evidence{more}</summary>", ""]
        lines += ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
        lines += ["| " + " | ".join(_row(report, entry)) + " |" for entry in seen[:_EVIDENCE]]
        lines += ["", "</details>"]
    return [*lines, ""]


def _checks(page: Page, report: RunReport) -> None:
    counts = view.tallies(report)
    rows = []
    for run in view.checks_by_name(report):
        tally = counts[run.name]
        numbers = [str(n) for n in (tally.passed, tally.failed, tally.skipped, tally.unknown)]
        done = "; ".join(filter(None, (view.work_text(run.least), run.why)))
        mark = run.outcome if run.outcome == "passed" else f"**{run.outcome}**"
        rows.append((text(run.name), mark, *numbers, view.seconds_text(run.seconds), text(done)))
    head = ("check", "outcome", "passed", "failed", "skipped", "unknown", "time", "least work of a subject")
    page.rows("Checks", head, rows)
    for told in detected(report):
        page.add(f"{told[0].upper()}{told[1:]}.", "")
