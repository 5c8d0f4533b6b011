"""Run checks of a simulated suite ahead of their turn, in a second process.

pytest runs its tests one after the other, and a test on ranks seldom keeps two processors busy. So a process forked
from pytest's runs the same checks, from the last one backwards, on ranks of its own. Only its passes count. When the
turn of such a check comes, pytest reports the pass. Every other check runs in pytest's process, as it would without the
second one. So failures, skips and warnings are reported from there, with all that pytest can say of them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item

from mgpu_check.engine.rank_side.coverage import coverage_here
from mgpu_check.plugin.launched import is_launched
from mgpu_check.plugin.stash import SESSION
from mgpu_check.processes.prctl import end_with_parent
from mgpu_check.processes.scratch import Scratch

_FEWEST = 24
"""Checks: fewer do not repay the start of more ranks."""

_MOST_GPUS = 16
"""Each process has ranks of its own, and those of more GPUs would need too much memory."""

_TO_END = 10.0
"""Seconds that the second process has to end its ranks."""

_ONLY_HERE = (
    "usepdb",
    "trace",
    "collectonly",
    "gpu_replay",
    "hypothesis_show_statistics",
    "setupshow",
    "log_cli_level",
)
"""Options of pytest and its plugins for which each check must run in pytest's process."""


class Results:
    """What the two processes share: who runs which check, and how those of the second one ended.

    Args:
        directory: an empty directory. A file `N.claimed` says that a process runs check number N, `N.ended` has the
            result of the second process, and `notes` what it notes at its end.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._taken = 0

    def claim(self, number: int) -> bool:
        """Return whether this process may run the check, because the other one does not."""
        try:
            os.close(os.open(self._directory / f"{number}.claimed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def put(self, name: object, content: object) -> None:
        new = self._directory / "new"
        new.write_bytes(pickle.dumps(content))
        new.rename(self._directory / f"{name}.ended")

    def take(self, name: object) -> Any:
        """Return what the second process has put.

        Raises:
            FileNotFoundError: it has not, so far.
        """
        content = pickle.loads((self._directory / f"{name}.ended").read_bytes())
        self._taken += 1
        return content

    def waiting(self) -> int:
        """Return the number of results that nobody has taken."""
        return sum(name.endswith(".ended") for name in os.listdir(self._directory)) - self._taken


class RunAhead:
    """A pytest plugin for the process of a command; see the module.

    Args:
        fewest: run nothing ahead if fewer checks are selected.
    """

    def __init__(self, fewest: int = _FEWEST) -> None:
        self._fewest = fewest
        self._numbers: dict[pytest.Item, int] = {}
        self._scratch: Scratch | None = None
        self._results: Results | None = None
        self._second = self._ended = -1

    def waiting(self) -> int:
        """Return the number of checks that have ended ahead of their turn and are not reported yet."""
        return 0 if self._results is None else self._results.waiting()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if not self._fits(session):
            return
        self._numbers = {item: number for number, item in enumerate(session.items)}
        self._scratch = Scratch.new("suite")
        self._results = Results(self._scratch.path)
        self._ended, ended = os.pipe()
        session.config.add_cleanup(lambda: self._end(session.config))
        parent = os.getpid()
        self._second = os.fork()
        if self._second == 0:
            os.close(self._ended)
            _be_second(session, self._results, ended, parent)
        os.close(ended)

    def _fits(self, session: pytest.Session) -> bool:
        config = session.config
        settings = config.stash[SESSION].settings
        return (
            settings.simulate == "cpu"
            and 1 < (settings.gpus or 0) <= _MOST_GPUS
            and len(session.items) >= self._fewest
            and len(os.sched_getaffinity(0)) > 1
            and config.option.capture in ("fd", "sys")
            and not any(config.getoption(name, None) for name in _ONLY_HERE)
            and not (is_launched() or config.pluginmanager.has_plugin("dsession") or hasattr(config, "workerinput"))
            and coverage_here() is None
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Report the pass of a check that the second process runs; wait for its end. Others run here."""
        if self._results is None or self._results.claim(self._numbers[item]):
            return None
        passes = self._passes(self._numbers[item])
        if not passes:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for told in passes:
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=told)
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)  # the check before has left what this one would share with it
        return True

    def _passes(self, number: int) -> Sequence[dict[str, Any]]:
        """Return the reports of a check that has passed in the second process; empty if it has not."""
        assert self._results is not None
        running = True
        while True:
            with contextlib.suppress(FileNotFoundError):
                passes: Sequence[dict[str, Any]] = self._results.take(number)
                return passes
            if not running:
                return ()
            running = bool(os.read(self._ended, 1))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._end(session.config)

    def _end(self, config: pytest.Config) -> None:
        """End the second process, and take over what it has noted."""
        if self._scratch is None or self._results is None:
            return
        os.kill(self._second, signal.SIGTERM)  # it ignores this if it has nothing left to run
        while select.select([self._ended], [], [], _TO_END)[0]:
            if not os.read(self._ended, 4096):
                break
        else:
            os.kill(self._second, signal.SIGKILL)
        os.waitpid(self._second, 0)
        os.close(self._ended)
        with contextlib.suppress(FileNotFoundError):
            config.stash[SESSION].notes.add(self._results.take("notes"))
        self._scratch.remove()
        self._scratch = self._results = None


def _be_second(session: pytest.Session, results: Results, ended: int, parent: int) -> NoReturn:
    """Run checks from the last one backwards until one has been claimed by pytest's process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    _leave_output(session.config)
    own = session.config.stash[SESSION]
    own.disown()
    interrupted = False
    try:
        for number, item in reversed([*enumerate(session.items)]):
            if not results.claim(number):
                break
            results.put(number, _passes_of(item))
            os.write(ended, b".")
    except KeyboardInterrupt:
        interrupted = True
    except BaseException:
        traceback.print_exc()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        try:
            own.finish(interrupted)
            results.put("notes", own.notes.told())
        finally:
            os._exit(0)


def _passes_of(item: pytest.Item) -> list[dict[str, Any]]:
    """Run a check, and return its reports; empty if it did anything but pass."""
    config = item.config
    warned: list[object] = []
    collect = SimpleNamespace(call_historic=lambda kwargs: warned.append(kwargs))
    with catch_warnings_for_item(config, SimpleNamespace(pytest_warning_recorded=collect), "runtest", item):
        reports = runtestprotocol(item, log=False)
    if warned or any(report.outcome != "passed" for report in reports):
        return []
    return [config.hook.pytest_report_to_serializable(config=config, report=report) for report in reports]


def _leave_output(config: pytest.Config) -> None:
    """Write nothing to the terminal, and capture the output of checks in files of this process."""
    with open(os.devnull, "r+b") as nothing:
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    capture = config.pluginmanager.getplugin("capturemanager")
    capture._global_capturing = None  # that of pytest's process, whose files this one must not touch
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
