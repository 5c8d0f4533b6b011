"""Report ranks that died between tests as a separate case in the JUnit file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

_CASE = "mgpu_check::ranks that died while no test used them"


def add_case(config: pytest.Config, deaths: Sequence[str]) -> None:
    """Add a failed case to the JUnit file, if one is written, for readers that see only this file."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "LogXML" and hasattr(plugin, "pytest_runtest_logreport"):
            # Only to this plugin: no test has failed, so other plugins must neither count nor rerun it.
            plugin.pytest_runtest_logreport(report=_report("setup", "\n".join(deaths)))
            plugin.pytest_runtest_logreport(report=_report("teardown", None))


def _report(when: Literal["setup", "teardown"], error: str | None) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=_CASE,
        location=("mgpu_check", None, _CASE.partition("::")[2]),
        keywords={},
        outcome="failed" if error else "passed",
        longrepr=error,
        when=when,
    )
