"""Render a summary of a run in GitHub's Markdown, for the page of a CI job."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence

import pytest

from mgpu_check.diagnosis.registry import all_mistakes
from mgpu_check.plugin import leasing
from mgpu_check.plugin.report.markup import code, fenced, table, text
from mgpu_check.plugin.report.outcomes import Outcomes, TestOutcome
from mgpu_check.plugin.session import GpuSession

LARGEST = 900_000
"""Bytes. GitHub does not show a step summary above 1 MiB."""

_LONGEST_STORY = 20_000  # characters
BEGUN = (
    "# mgpu-check: the run has not ended\n\nIt was killed, or failed to start: see its output for the reason. "
    "Nothing is proven.\n"
)
"""The content of a file before its run ends."""
_RESULTS = {
    pytest.ExitCode.OK: "passed",
    pytest.ExitCode.TESTS_FAILED: "FAILED",
    pytest.ExitCode.INTERRUPTED: "INTERRUPTED",
    pytest.ExitCode.INTERNAL_ERROR: "INTERNAL ERROR",
    pytest.ExitCode.USAGE_ERROR: "USAGE ERROR",
    pytest.ExitCode.NO_TESTS_COLLECTED: "NO TESTS",
}


def render(outcomes: Outcomes, session: GpuSession, exit_status: int) -> str:
    """Render the summary, at most `LARGEST` bytes long."""
    page = Page()
    page.add(f"# mgpu-check: {_verdict(outcomes, session, exit_status)}", "")
    page.add(*_header(session), "")
    page.add(f"**{text(_counts(outcomes))}**", "")
    failed = outcomes.failed
    page.rows("Failed", ("test", "world sizes", "what", "looks like"), [_row_of_failure(one) for one in failed])
    page.parts("more failures are shown in the log only", [_details(one) for one in failed])
    if session.notes.deaths:
        page.add("## Ranks that died while no test used them", "", *fenced("\n".join(session.notes.deaths)), "")
    skipped = [(code(one.name), text(one.headline)) for one in outcomes.of("skipped", "xfailed")]
    page.rows("Skipped, or expected to fail", ("test", "why"), skipped)
    passed = outcomes.of("passed", "xpassed")
    ours = [one for one in passed if one.ours]
    page.rows(
        "Passed",
        ("test", "world sizes", "examples"),
        [(code(one.name), text(one.sizes or "-"), text(one.examples)) for one in ours],
    )
    if others := len(passed) - len(ours):
        page.add(f"{others} {'test' if others == 1 else 'tests'} without GPUs also passed.", "")
    for line in [*session.notes.lines, *leasing.told(session.notes.waits)]:
        page.add(f"- {text(line)}")
    return page.content()


class Page:
    """The lines of a page of at most `LARGEST` bytes."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0

    def add(self, *lines: str) -> bool:
        """Add all lines if they fit; otherwise add none. Return whether they fit."""
        size = sum(len(line.encode(errors="backslashreplace")) + 1 for line in lines)
        if self._size + size > LARGEST:
            return False
        self._lines += lines
        self._size += size
        return True

    def rows(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table under a title; do nothing if there are no rows."""
        if not rows or not self.add(f"## {title}", "", *table(head)):
            return
        self._several((table((), row) for row in rows), len(rows), "more rows are left out")
        self.add("")

    def parts(self, what: str, parts: Sequence[Sequence[str]]) -> None:
        self._several(parts, len(parts), what)

    def _several(self, several: Iterable[Sequence[str]], count: int, what: str) -> None:
        shown = 0
        for lines in several:
            if not self.add(*lines):
                break
            shown += 1
        if shown < count:
            # This line may exceed `LARGEST`, which is far enough below GitHub's limit.
            self._lines += ["", f"… {count - shown} {what}: the summary would be too large for GitHub.", ""]

    def content(self) -> str:
        return "\n".join(self._lines).rstrip("\n") + "\n"


def _verdict(outcomes: Outcomes, session: GpuSession, exit_status: int) -> str:
    """Return the result in one clause. A run without executed tests is not "passed"; a simulated run says so."""
    known = exit_status in {int(status) for status in _RESULTS}
    result = _RESULTS[pytest.ExitCode(exit_status)] if known else f"exit code {exit_status}"
    if result == "passed" and not outcomes.of("passed", "xpassed", "xfailed"):
        result = "nothing was run"
    settings = session.settings
    if settings.simulate and settings.asked:
        result += f" on {settings.gpus} SIMULATED GPUs"
    return result


def _header(session: GpuSession) -> list[str]:
    settings = session.settings
    if settings.asked:
        lines = [text(session.header())]
        if settings.simulate:
            lines += ["", "**SIMULATED**: this run tests code, and says nothing about hardware."]
    else:
        from mgpu_check.version import torch_version, version

        lines = [
            text(f"mgpu-check {version()}; torch {torch_version()}; no GPUs were requested"),
            "",
            "Tests that need GPUs were skipped; `--gpus=N` runs them, `--gpus=N --simulate` on a machine without GPUs.",
        ]
    import hypothesis.version as hypothesis

    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    return [
        *lines,
        "",
        text(
            f"Python {platform.python_version()}; pytest {pytest.__version__}; Hypothesis {hypothesis.__version__}; "
            f"{machine}"
        ),
    ]


def _counts(outcomes: Outcomes) -> str:
    parts = [f"{count} {name}" for name, count in outcomes.counts().items()]
    return ", ".join(parts) or "no tests were run"


def _row_of_failure(one: TestOutcome) -> tuple[str, ...]:
    known = all_mistakes() if one.mistakes else {}
    links = [f"[{name}]({known[name].page})" if name in known else text(name) for name in one.mistakes]
    phase = "" if one.phase in ("call", "") else f" ({one.phase})"
    return code(one.name) + phase, text(one.sizes or "-"), text(one.headline), ", ".join(links) or "-"


def _details(one: TestOutcome) -> list[str]:
    story = one.story
    if len(story) > _LONGEST_STORY:
        half = _LONGEST_STORY // 2
        story = f"{story[:half]}\n\n… {len(story) - 2 * half} characters …\n\n{story[-half:]}"
    lines = ["<details>", f"<summary>{text(one.name)}</summary>", "", *fenced(story), ""]
    if one.replay:
        lines += ["Repeat with", "", *fenced(one.replay, "sh"), ""]
    return [*lines, "</details>", ""]
