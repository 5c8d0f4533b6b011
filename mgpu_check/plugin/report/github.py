"""What a run writes for GitHub: a summary in Markdown for the page of a CI job, and annotations for a pull request.

An annotation is on the line of the user's code that a failed test is about. Quoted text is escaped so that it is not
parsed as markup.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from mgpu_check.annotations import annotation
from mgpu_check.diagnosis.report import all_mistakes
from mgpu_check.plugin import device_leases
from mgpu_check.plugin.report.outcomes import Outcomes, TestOutcome
from mgpu_check.plugin.session import GpuSession
from mgpu_check.settings import OPTIONS
from mgpu_check.version import torch_version, version

# Characters that start emphasis, links, HTML, cells, formulas, mentions, or references to issues.
_MARKUP = str.maketrans({character: f"&#{ord(character)};" for character in "\\`*_[]<>&|~#$@"})
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def text(words: str) -> str:
    """Escape text for Markdown or HTML, on one line, so that it is shown literally."""
    return " ".join(_printable(words).split()).translate(_MARKUP)


def code(words: str) -> str:
    """Render text as inline code, on one line, for a table cell or a sentence."""
    words = " ".join(_printable(words).split()).replace("|", "\\|")
    fence = "`" * (_longest_run(words) + 1)
    space = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{fence}{space}{words}{space}{fence}"


def fenced(words: str, language: str = "text") -> list[str]:
    """Render `words` as a code block, with a fence longer than any run of backticks in them."""
    words = _printable(words).strip("\n")
    fence = "`" * max(3, _longest_run(words) + 1)
    return [f"{fence}{language}", *words.split("\n"), fence]


def table(head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """Render a table, one line per row. Cells are Markdown. With an empty `head`, return only the rows."""
    top = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] if head else []
    return [*top, *("| " + " | ".join(row) + " |" for row in rows)]


def _longest_run(words: str) -> int:
    return max((len(run) for run in re.findall(r"`+", words)), default=0)


def _printable(words: str) -> str:
    """Remove terminal colours, and escape unprintable characters."""
    words = _ESCAPES.sub("", words).encode(errors="backslashreplace").decode()
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in words.replace("\r\n", "\n"))


LARGEST = 900_000  # Bytes. GitHub does not show a step summary above 1 MiB.
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
    page = Page()
    page.add(f"# mgpu-check: {_verdict(outcomes, session, exit_status)}", "")
    settings = session.settings
    if settings.asked:
        lines = [text(session.header())]
        if settings.simulate:
            lines += ["", "**SIMULATED**: this run tests code, and says nothing about hardware."]
    else:
        lines = [
            text(f"mgpu-check {version()}; torch {torch_version()}; no GPUs were requested"),
            "",
            "Tests that need GPUs were skipped; `--gpus=N` runs them, `--gpus=N --simulate` on a machine without GPUs.",
        ]
    import hypothesis.version as hypothesis

    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    versions = f"pytest {pytest.__version__}; Hypothesis {hypothesis.__version__}"
    page.add(*lines, "", text(f"Python {platform.python_version()}; {versions}; {machine}"), "")
    counts = ", ".join(f"{count} {name}" for name, count in outcomes.counts().items())
    page.add(f"**{text(counts or 'no tests were run')}**", "")
    failed = outcomes.failed
    page.rows("Failed", ("test", "world sizes", "what", "looks like"), [_row_of_failure(outcome) for outcome in failed])
    page.sections("more failures are shown in the log only", [_details(outcome) for outcome in failed])
    if session.notes.deaths:
        page.add("## Ranks that died while no test used them", "", *fenced("\n".join(session.notes.deaths)), "")
    skipped = [(code(outcome.name), text(outcome.headline)) for outcome in outcomes.of("skipped", "xfailed")]
    page.rows("Skipped, or expected to fail", ("test", "why"), skipped)
    passed = outcomes.of("passed", "xpassed")
    ours = [outcome for outcome in passed if outcome.ours]
    page.rows(
        "Passed",
        ("test", "world sizes", "examples"),
        [(code(test.name), text(test.sizes or "-"), text(test.properties.get("examples", ""))) for test in ours],
    )
    if others := len(passed) - len(ours):
        page.add(f"{others} {'test' if others == 1 else 'tests'} without GPUs also passed.", "")
    for line in [*session.notes.lines, *device_leases.described_waits(session.notes.waits)]:
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
        if rows and self.add(f"## {title}", "", *table(head)):
            self.sections("more rows are left out", [table((), row) for row in rows])
            self.add("")

    def sections(self, remark: str, sections: Sequence[Sequence[str]]) -> None:
        """Add sections as long as they fit, and then the number of the others with a remark."""
        for shown, lines in enumerate(sections):
            if not self.add(*lines):
                # This line may exceed `LARGEST`, which is far enough below GitHub's limit.
                left_out = f"… {len(sections) - shown} {remark}: the summary would be too large for GitHub."
                self._lines += ["", left_out, ""]
                break

    def content(self) -> str:
        return "\n".join(self._lines).rstrip("\n") + "\n"


def _verdict(outcomes: Outcomes, session: GpuSession, exit_status: int) -> str:
    """Return the result in one clause. A run without executed tests is not "passed"; a simulated run says so."""
    recognized = exit_status in {int(status) for status in _RESULTS}
    result = _RESULTS[pytest.ExitCode(exit_status)] if recognized else f"exit code {exit_status}"
    if result == "passed" and not outcomes.of("passed", "xpassed", "xfailed"):
        result = "nothing was run"
    settings = session.settings
    if settings.simulate and settings.asked:
        result += f" on {settings.gpus} SIMULATED GPUs"
    return result


def _row_of_failure(outcome: TestOutcome) -> tuple[str, ...]:
    mistakes = all_mistakes() if outcome.mistakes else {}
    links = [f"[{name}]({mistakes[name].page})" if name in mistakes else text(name) for name in outcome.mistakes]
    phase = "" if outcome.phase in ("call", "") else f" ({outcome.phase})"
    return code(outcome.name) + phase, text(outcome.sizes or "-"), text(outcome.headline), ", ".join(links) or "-"


def _details(outcome: TestOutcome) -> list[str]:
    story = outcome.story
    if len(story) > _LONGEST_STORY:
        half = _LONGEST_STORY // 2
        story = f"{story[:half]}\n\n… {len(story) - 2 * half} characters …\n\n{story[-half:]}"
    lines = ["<details>", f"<summary>{text(outcome.name)}</summary>", "", *fenced(story), ""]
    if outcome.replay:
        lines += ["Repeat with", "", *fenced(outcome.replay, "sh"), ""]
    return [*lines, "</details>", ""]


class Summaries:
    """A pytest plugin that writes the files of ``--gpu-report`` in the process that receives all reports."""

    def __init__(self, config: pytest.Config, session: GpuSession) -> None:
        """Check that the files can be written, and write a summary that says that the run has not ended.
        Raises `pytest.UsageError`: a file cannot be written; the message names the option, the file and the reason."""
        self._session = session
        self._outcomes = Outcomes(config.rootpath)
        self._paths = [Path(config.invocation_params.dir, file) for file in session.settings.gpu_report]
        self._trouble: list[str] = []
        for path, file in zip(self._paths, session.settings.gpu_report, strict=True):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(BEGUN, encoding="utf-8")
            except OSError as error:
                raise pytest.UsageError(
                    f"mgpu-check: {session.settings.origins['gpu_report']}: {file!r} cannot be written "
                    f"({error.strerror}); choose a file in a directory that you may write to"
                ) from None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._outcomes.collected(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.add(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        summary = render(self._outcomes, self._session, session.exitstatus)
        for path in self._paths:
            try:
                path.write_text(summary, encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                self._trouble.append(f"{OPTIONS['gpu_report'].flag}: {path} cannot be written: {error.strerror}")
        if self._trouble and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for path in self._paths if not self._trouble else []:
            terminalreporter.write_sep("-", f"generated Markdown summary: {path}")
        for line in self._trouble:
            terminalreporter.line(f"mgpu-check: {line}", red=True)


class Annotations:
    """A pytest plugin that prints an annotation for each failed test with ranks or GPUs, where all reports arrive."""

    def __init__(self, config: pytest.Config) -> None:
        self._outcomes = Outcomes(config.rootpath)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.add(report)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for failed in self._outcomes.failed:
            if failed.ours:
                title, lines = failed.name, [failed.headline]
                mistakes = all_mistakes() if failed.mistakes else {}
                if (mistake := mistakes.get(next(iter(failed.mistakes), ""))) is not None:
                    title = f"{mistake.name}: {mistake.title}"
                    lines += [f"do: {mistake.advice}", f"see: {mistake.page}"]
                lines += [f"test: {failed.name}", *(f"repeat with: {line}" for line in failed.replay.splitlines()[:1])]
                terminalreporter.line(annotation(title, "\n".join(lines), failed.properties.get("site") or failed.line))
