"""Adapt classes on torch's multi-process test harnesses: the decorator, the hooks, and the count at the end."""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

import pytest

from mgpu_check.plugin.harness_ranks import HOME
from mgpu_check.plugin.private_names import TestCaseFunction

if TYPE_CHECKING:
    from mgpu_check.plugin.harness_processes import HarnessRuns
    from mgpu_check.plugin.session import GpuSession


_T = TypeVar("_T", bound=type)

_ASKED = "_mgpu_check_adapt"
_PROPERTY = "mgpu_check.adapted"
_HERE = "yes"

_HARNESS: pytest.StashKey[type] = pytest.StashKey()
_OWN: pytest.StashKey[str] = pytest.StashKey()  # why a test runs in its own harness, although it should be adapted


def adapt(cls: _T) -> _T:
    """Run the tests of a class on torch's `MultiProcessTestCase` or `MultiProcContinuousTest` on forked ranks.

    The class needs no other change. The option ``--adapt-torch-tests`` adapts all classes.

    Raises:
        TypeError: `cls` is not based on one of these classes.
    """
    from mgpu_check.plugin.harness_processes import REPLACED, harness_of

    if not isinstance(cls, type) or harness_of(cls) is None:
        raise TypeError(
            f"mgpu_check.adapt: {getattr(cls, '__name__', cls)} is not based on {' or '.join(REPLACED)} of {HOME}, "
            "as DTensorTestBase, DistributedTestBase and FSDPTest are; remove the decorator"
        )
    setattr(cls, _ASKED, True)
    return cls


class Adapting:
    """The hooks, as a plugin of pytest."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._runs: HarnessRuns | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Find the tests to adapt, and begin to start the fork server of their ranks."""
        if HOME not in sys.modules or session.config.option.collectonly:
            return
        from mgpu_check.plugin.harness_processes import REPLACED, HarnessRuns, harness_of

        wanted = False
        for item in session.items:
            cls = item.cls if isinstance(item, TestCaseFunction) else None
            harness = harness_of(cls) if cls is not None else None
            if harness is None or not (self._session.settings.adapt_torch_tests or getattr(cls, _ASKED, False)):
                continue
            changed = [name for name in REPLACED[harness.__name__] if _static(cls, name) is not _static(harness, name)]
            if changed:
                item.stash[_OWN] = f"it overrides {', '.join(changed)} of {harness.__name__}"
            else:
                item.stash[_HARNESS] = harness
                wanted = True
        if wanted:
            from mgpu_check.engine.world import BareProcesses
            from mgpu_check.plugin.session import started

            processes = BareProcesses(("mgpu_check.plugin.harness_ranks", *_modules_of_torch()))
            started(processes.start)
            session.config.add_cleanup(processes.close)
            self._runs = HarnessRuns(processes.fork, self._session.settings)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        if self._runs is None or _HARNESS not in item.stash:
            return (yield)
        with self._runs.in_place_of(item.stash[_HARNESS]):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.when != "call" or not (_OWN in item.stash or _HARNESS in item.stash):
            return (yield)
        from mgpu_check.plugin.report import failures

        output = []
        if own := item.stash.get(_OWN, ""):
            item.user_properties.append((_PROPERTY, own))
        elif self._runs is not None and self._runs.used:
            item.user_properties.append((_PROPERTY, _HERE))
            output = self._runs.output
        failures.add_output(item, output, "call")
        report = yield
        if report.outcome == "failed":
            failures.replace_traceback(item, report, call, self._session, in_parent=False)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many tests were adapted, and which were not, and why."""
        reports = [report for category in list(terminalreporter.stats.values()) for report in category]
        of_calls = [report for report in reports if getattr(report, "when", "") == "call"]
        properties = [entry for report in of_calls for entry in report.user_properties]
        counts = Counter(str(value) for name, value in properties if name == _PROPERTY)
        if not counts:
            return
        on_ranks = counts.pop(_HERE, 0)
        clauses = [f"{on_ranks} test{'s' * (on_ranks != 1)} of torch's harnesses ran on forked ranks"]
        clauses += [f"{count} in their own harness: {reason}" for reason, count in counts.items()]
        terminalreporter.line(f"mgpu-check: {'; '.join(clauses)}", yellow=bool(counts))


def _static(cls: type | None, name: str) -> object:
    return inspect.getattr_static(cls, name)


def _modules_of_torch() -> list[str]:
    """Return the modules of torch that this process has imported, for the fork server.

    Its imports must not touch a real device, which torch's test modules do.
    """
    import torch

    from mgpu_check.engine.forkserver import OPTIONAL

    if torch.cuda.is_available() and "_MGPU_CHECK_SIMULATE" not in os.environ:
        return []
    return [
        OPTIONAL + name
        for name, module in list(sys.modules.items())
        if name.startswith("torch.") and getattr(module, "__spec__", None) and getattr(module, "__file__", None)
    ]
