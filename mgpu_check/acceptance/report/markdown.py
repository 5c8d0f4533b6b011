"""The account in GitHub's Markdown, for the page of a CI job."""

from __future__ import annotations

import json

from mgpu_check.acceptance.account import Account, Accusation
from mgpu_check.acceptance.report import view
from mgpu_check.acceptance.report.values import encoded
from mgpu_check.devices.observations import Observation
from mgpu_check.plugin.report.markdown import Page
from mgpu_check.plugin.report.markup import code, fenced, text

__all__ = ["render"]

_EVIDENCE = 20
"""Most observations to show for an accusation."""


def render(account: Account) -> str:
    """Render the account, cut at the number of bytes that GitHub shows."""
    page = Page()
    page.add(f"# mgpu-check accept: {text(view.headline(account))}", "")
    if account.simulated:
        page.add(f"**{text(view.SIMULATED)}**", "")
    for planted in account.planted:
        page.add(f"- planted: {code(planted)}")
    page.add(
        f"{text(account.started)}, {view.seconds_text(account.seconds)} at the level {text(account.level)}. "
        f"Checks: {view.counts_of_checks(view.checks_by_name(account))}.",
        "",
    )
    if len(account.hosts) > 1:
        verdicts = [(text(view.host_name(account, n)), v.kind) for n, v in sorted(account.verdicts.items())]
        page.rows("Hosts", ("host", "verdict"), verdicts)
        page.rows("Hosts beside each other", ("what",), [(text(line),) for line in view.among_hosts(account)])
    for accusation in account.verdict.accusations:
        page.add(*_accusation(account, accusation))
    unexplained = view.failed_of(account, account.verdict)
    page.rows("Failures that no part explains", _HEAD, [_row(entry) for entry in unexplained])
    page.rows("Could not be checked", ("what",), [(text(line),) for line in account.verdict.unknown])
    _checks(page, account)
    page.rows(
        "GPUs",
        ("GPU", "host", "index", "model", "memory", "UUID", "serial", "PCI bus id"),
        [
            (
                str(gpu.number),
                text(view.host_name(account, gpu.host)),
                str(gpu.index),
                text(gpu.name),
                view.bytes_text(gpu.memory),
                code(gpu.uuid) if gpu.uuid else "unknown",
                text(gpu.serial or "unknown"),
                text(gpu.pci or "unknown"),
            )
            for gpu in account.gpus
        ],
    )
    page.add("## Repeat", "", *fenced(view.repeat(account), "sh"))
    return page.content()


_HEAD = ("check", "what", "seen", "case", "evidence")


def _row(entry: Observation) -> tuple[str, ...]:
    evidence = code(json.dumps(encoded(entry.evidence))) if entry.evidence else ""
    return text(entry.check), text(str(entry.subject)), text(entry.seen), text(entry.case), evidence


def _accusation(account: Account, accusation: Accusation) -> list[str]:
    lines = [f"## {text(view.name_of(account, accusation.part))}", ""]
    lines += [f"- {text(line)}" for line in view.describe_part(account, accusation.part)]
    lines += [f"- seen: {text(line)}" for line in accusation.because]
    lines += [f"- second look: {text(accusation.arm)}"] if accusation.arm else []
    lines += [f"- do: {text(accusation.advice)}"] if accusation.advice else []
    lines += ["", "Look again with", "", *fenced(accusation.repeat, "sh")] if accusation.repeat else []
    seen = view.evidence_of(account, accusation)
    if seen:
        more = f", {_EVIDENCE} of {len(seen)}" if len(seen) > _EVIDENCE else ""
        lines += ["", "<details>", f"<summary>Evidence{more}</summary>", ""]
        lines += ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
        lines += ["| " + " | ".join(_row(entry)) + " |" for entry in seen[:_EVIDENCE]]
        lines += ["", "</details>"]
    return [*lines, ""]


def _checks(page: Page, account: Account) -> None:
    counts = view.tallies(account)
    rows = []
    for run in view.checks_by_name(account):
        tally = counts[run.name]
        numbers = [str(n) for n in (tally.passed, tally.failed, tally.skipped, tally.unknown)]
        done = "; ".join(filter(None, (view.work_text(run.least), run.why)))
        mark = run.outcome if run.outcome == "passed" else f"**{run.outcome}**"
        rows.append((text(run.name), mark, *numbers, view.seconds_text(run.seconds), text(done)))
    head = ("check", "outcome", "passed", "failed", "skipped", "unknown", "time", "least work of a subject")
    page.rows("Checks", head, rows)
