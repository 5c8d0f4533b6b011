"""Write the summaries of a run to files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_check.plugin.report import markdown
from mgpu_check.plugin.report.outcomes import Outcomes
from mgpu_check.plugin.session import GpuSession
from mgpu_check.settings import OPTIONS


class Summaries:
    """A pytest plugin that writes the files of ``--gpu-report``.

    It runs in the process that receives the reports of all tests.
    """

    def __init__(self, config: pytest.Config, session: GpuSession) -> None:
        """Check that the files can be written, and write a summary that says that the run has not ended.

        Raises:
            pytest.UsageError: a file cannot be written; the message names the option, the file and the reason.
        """
        self._session = session
        self._outcomes = Outcomes(config.rootpath)
        self._paths = [Path(config.invocation_params.dir, file) for file in session.settings.gpu_report]
        self._trouble: list[str] = []
        for path, file in zip(self._paths, session.settings.gpu_report, strict=True):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(markdown.BEGUN, encoding="utf-8")
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
        for path in self._paths:
            try:
                path.write_text(
                    markdown.render(self._outcomes, self._session, session.exitstatus),
                    encoding="utf-8",
                    errors="backslashreplace",
                )
            except OSError as error:
                self._trouble.append(f"{OPTIONS['gpu_report'].flag}: {path} cannot be written: {error.strerror}")
        if self._trouble and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for path in self._paths if not self._trouble else []:
            terminalreporter.write_sep("-", f"generated Markdown summary: {path}")
        for line in self._trouble:
            terminalreporter.line(f"mgpu-check: {line}", red=True)
