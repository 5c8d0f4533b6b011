"""Print the closing table of the packaged suite: a row per property, or with ``-v`` a row per check."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from mgpu_check.asserts.known_defects import KNOWN_DEFECTS
from mgpu_check.plugin.report.properties import defects_met
from mgpu_check.version import torch_version

_LEAST_TEXT = 40
_NUMBERS = 25  # width of the columns "examples" and "seconds" and of all gaps

_LEVELS = {
    "quick": "a few examples of each check; --gpu-level=standard draws four times as many, tests larger tensors and "
    "more pairs of options, and takes about five times as long",
    "standard": "the usual number of examples; --gpu-level=long draws ten times as many",
    "long": "ten times the usual number of examples",
}

_RESULTS = {
    "passed": "passed",
    "failed": "FAILED",
    "skipped": "skipped",
    "known": "KNOWN",
    "xfailed": "known defect",
    "xpassed": "passed",
}


@dataclass
class Row:
    """The table row of one check of the suite."""

    property: str
    check: str
    examples: int
    sizes: str
    result: str
    seconds: float
    line: int
    reason: str = ""
    left_out: str = ""
    advice: str = ""


def row_of(report: pytest.TestReport | pytest.CollectReport) -> Row | None:
    """Return the row for the report of a check; None for other reports, and for a passed setup or teardown."""
    if isinstance(report, pytest.CollectReport):  # a file that cannot be imported
        return None
    properties = dict(report.user_properties)
    name = properties.get("mgpu_check.property")
    if name is None or (report.when != "call" and report.outcome == "passed"):
        return None
    outcome: str = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if outcome == "skipped" else "xpassed"
    showed, unseen = defects_met(report) if outcome == "passed" else ([], [])
    measured = [str(properties["mgpu_check.measured"])] if "mgpu_check.measured" in properties else []
    reason = "; ".join([*measured, *map(told, showed), *map(told_unseen, unseen)])
    if showed:
        outcome = "known"
    if outcome == "xfailed":
        reason = report.wasxfail
    elif outcome == "skipped" and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    return Row(
        property=str(name),
        check=str(properties.get("mgpu_check.check", "")),
        examples=int(str(properties.get("mgpu_check.examples", 0))),
        sizes=str(properties.get("mgpu_check.world_sizes", "")) or "-",
        result=_RESULTS[outcome] if report.when == "call" or outcome == "skipped" else f"ERROR in {report.when}",
        seconds=report.duration,
        line=report.location[1] or 0,
        reason=reason,
        left_out=str(properties.get("mgpu_check.left_out", "")),
        advice=str(properties.get("mgpu_check.advice", "")),
    )


def told(name: str) -> str:
    """Describe a known defect, with a link to its report."""
    defect = KNOWN_DEFECTS[name]
    return f"{defect.summary}: a known defect of others, {defect.link}"


def told_unseen(name: str) -> str:
    """Return a remark that a test met the conditions of a known defect, and the defect did not occur."""
    defect = KNOWN_DEFECTS[name]
    return (
        f"the known defect {name} did not occur with torch {torch_version()}: it is fixed, or needs another condition; "
        f"see {defect.link}"
    )


def told_level(level: str) -> str:
    """Describe the packaged suite at a level, and what the next level adds."""
    return f"level {level}: {_LEVELS[level]}"


def is_detailed(config: pytest.Config) -> bool:
    """Return whether the user wants a line per check: ``-v`` was given, on the command line or elsewhere.

    `mgpu-check` itself gives ``-q``, so its verbosity is 0 with ``-v``.
    """
    typed = any(re.fullmatch(r"-v+|--verbose", str(word)) for word in config.invocation_params.args)
    return typed or config.get_verbosity() > 0


def is_failure(row: Row) -> bool:
    """Return whether the check of a row failed, or its setup or teardown did."""
    return row.result.startswith(("FAILED", "ERROR"))


def counted(rows: Iterable[Row]) -> str:
    """Count the results of rows: "1 FAILED, 10 passed, 1 KNOWN"."""
    counts = Counter(row.result for row in sorted(rows, key=lambda row: (not is_failure(row), row.result != "passed")))
    return ", ".join(f"{count} {result}" for result, count in counts.items())


def print_to(terminal: pytest.TerminalReporter, level: str) -> None:
    """Print the table and a line about `level`, if checks of the packaged suite have run."""
    rows = [
        row
        for reports in terminal.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and (row := row_of(report)) is not None
    ]
    if not rows:
        return
    rows.sort(key=lambda row: (row.property, row.line))
    terminal.section("checks", sep="-")
    detailed = is_detailed(terminal.config)
    (_print_checks if detailed else _print_properties)(terminal, rows)
    terminal.line(
        f"{len(rows)} checks of {len({row.property for row in rows})} properties, "
        f"{sum(row.examples for row in rows)} examples, {sum(row.seconds for row in rows):.1f} s"
        + ("" if detailed else "; -v shows each check"),
        bold=True,
    )
    terminal.line(told_level(level))
    for advice in dict.fromkeys(row.advice for row in rows if row.advice):
        terminal.line(f"mgpu-check: {advice}", red=True)


def _print_properties(terminal: pytest.TerminalReporter, rows: Sequence[Row]) -> None:
    """Print a row per property, and below it each check that did not simply pass."""
    properties: dict[str, list[Row]] = {}
    for row in rows:
        properties.setdefault(row.property, []).append(row)
    names = max(len("property"), *map(len, properties))
    terminal.line(f"{'property':<{names}}  checks  examples  seconds  result", bold=True)
    for name, checks in properties.items():
        examples, seconds = sum(row.examples for row in checks), sum(row.seconds for row in checks)
        terminal.write(f"{name:<{names}}  {len(checks):>6}  {examples:>8}  {seconds:7.1f}  ")
        worst = min(checks, key=lambda row: (not is_failure(row), row.result == "passed"))
        terminal.line(counted(checks), **_colour(worst))
        for row in checks:
            if row.result != "passed" or row.left_out:
                _below(terminal, names, f"{row.result}: {row.check}", "")
                _below_check(terminal, names, row)


def _print_checks(terminal: pytest.TerminalReporter, rows: Sequence[Row]) -> None:
    """Print a row per check, and below it its remarks."""
    names = max(len("property"), *(len(row.property) for row in rows))
    sizes = max(len("world sizes"), *(len(row.sizes) for row in rows))
    results = max(len("result"), *(len(row.result) for row in rows))
    checks = max(_LEAST_TEXT, terminal._tw.fullwidth - names - sizes - results - _NUMBERS)
    terminal.line(
        f"{'property':<{names}}  {'check':<{checks}}  examples  "
        f"{'world sizes':<{sizes}}  {'result':<{results}}  seconds",
        bold=True,
    )
    last = ""
    for row in rows:
        first, *more = textwrap.wrap(row.check, checks)
        terminal.write(f"{row.property if row.property != last else '':<{names}}  {first:<{checks}}  ")
        terminal.write(f"{row.examples:>8}  {row.sizes:<{sizes}}  ")
        terminal.write(f"{row.result:<{results}}", **_colour(row))
        terminal.line(f"  {row.seconds:7.1f}")
        for line in more:
            terminal.line(f"{'':<{names}}  {line}")
        _below_check(terminal, names, row)
        last = row.property


def _below_check(terminal: pytest.TerminalReporter, indent: int, row: Row) -> None:
    """Print the remarks of a check: why it did not simply pass, and what a pass does not show."""
    _below(terminal, indent, row.reason, "- ")
    _below(terminal, indent, row.left_out and f"left out: {row.left_out}", "- ")


def _below(terminal: pytest.TerminalReporter, indent: int, text: str, begin: str) -> None:
    """Print a note below a row, wrapped to the terminal's width without breaking links."""
    width = max(_LEAST_TEXT, terminal._tw.fullwidth - indent - 2)
    for line in textwrap.wrap(
        text,
        width,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    ):
        terminal.line(f"{'':<{indent}}  {line}")


def _colour(row: Row) -> dict[str, bool]:
    if row.result == "passed":
        return {"green": True}
    return {"red": True} if is_failure(row) else {"yellow": True}
