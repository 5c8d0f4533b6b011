"""Run checks of a simulated suite ahead of their turn, in a second process.

pytest runs its tests one after the other, and a test on ranks seldom keeps two processors busy. So a process forked
from pytest's runs the same checks, from the last one backwards, on ranks of its own. When the turn of such a check
comes, pytest reports its pass. Every other check runs again in pytest's process, with the same random numbers, so that
its failure is shrunk and explained. If it passes there, the first failure is reported.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item

from mgpu_check.engine.rank_side.coverage import coverage_here
from mgpu_check.plugin.launched import is_launched
from mgpu_check.plugin.run_notes import RunNotes
from mgpu_check.plugin.session import GpuSession
from mgpu_check.plugin.stash import SESSION
from mgpu_check.processes.clock import Clock
from mgpu_check.processes.limits import available_memory, available_processors
from mgpu_check.processes.prctl import end_with_parent
from mgpu_check.processes.scratch import Scratch
from mgpu_check.settings import Settings

_FEWEST = 24
"""Checks: fewer do not repay the start of more ranks."""

_MEMORY = 1 << 30, 64 << 20
"""Bytes that the second process and its fork server need, and those of each rank: several times what was measured."""

_TO_END = 10.0
"""Seconds that the second process has to end its ranks."""

_PATIENCE = 20.0
"""Rank timeouts that pytest waits for a check of the second process, whose own limits are shorter."""

_ONLY_HERE = (
    *("usepdb", "trace", "collectonly", "gpu_replay", "hypothesis_show_statistics", "setupshow", "timeout", "basetemp"),
    *("log_file", "log_cli_level"),
)
"""Options of pytest and its plugins that need each check in pytest's process."""


@dataclass
class RanAhead:
    """How a check ended in the second process.

    Attributes:
        reports: those of its phases, as plain values.
        passed: whether it has done nothing but pass: no skip, no warning.
        failed: whether a phase failed.
        notes: what the run notes besides, since the check before.
    """

    reports: list[dict[str, Any]] = field(default_factory=list)
    passed: bool = False
    failed: bool = False
    notes: dict[str, Any] = field(default_factory=dict)


class Results:
    """The files that both processes share: who runs which check, and how those of the second one ended.

    Args:
        directory: an empty directory. A file `N.claimed` says that a process runs check number N; `N.passed` or
            `N.ended` has the outcome in the second process, and `last.ended` what it notes at its end.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._taken = 0

    def claim(self, number: int) -> bool:
        """Return whether this process may run the check, because the other one does not, or because a disk is full."""
        try:
            os.close(os.open(self._directory / f"{number}.claimed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:
            pass  # it may run twice, and pytest reports its own run
        return True

    def put(self, name: object, outcome: RanAhead) -> None:
        new = self._directory / "new"
        new.write_bytes(pickle.dumps(outcome))
        new.rename(self._directory / f"{name}.{'passed' if outcome.passed else 'ended'}")

    def take(self, name: object) -> RanAhead | None:
        """Return the outcome that the second process has put; None if it has not."""
        for kind in ("passed", "ended"):
            with contextlib.suppress(FileNotFoundError):
                outcome: RanAhead = pickle.loads((self._directory / f"{name}.{kind}").read_bytes())
                self._taken += outcome.passed
                return outcome
        return None

    def waiting(self) -> int:
        """Return the number of passes that are not taken yet."""
        return sum(name.endswith(".passed") for name in os.listdir(self._directory)) - self._taken


@dataclass
class SecondProcess:
    """The second process, as pytest's process sees it.

    Attributes:
        pid: its process id.
        pipe: gives a byte for each check that it has run, and ends with it.
        awaited: whether pytest waits for a check that it runs.
    """

    scratch: Scratch
    results: Results
    pid: int
    pipe: int
    awaited: bool = False

    def outcome(self, number: int, session: GpuSession) -> RanAhead:
        """Wait for the outcome of a check that it has claimed; an empty one if it ends before."""
        session.forget_test()
        self.awaited = True
        deadline = Clock.now() + _PATIENCE * session.settings.rank_timeout
        while (found := self.results.take(number)) is None:
            session.on_example()  # shows that the run continues
            if select.select([self.pipe], [], [], 1.0)[0]:
                if not os.read(self.pipe, 1):
                    found = self.results.take(number) or RanAhead()
                    break
            elif Clock.now() > deadline:
                os.kill(self.pid, signal.SIGKILL)
        self.awaited = False
        session.notes.add(found.notes)
        return found

    def end(self) -> RanAhead | None:
        """End it, and return what it has put at last; None if it was killed."""
        try:
            os.kill(self.pid, signal.SIGTERM)  # ignored when all checks have run
            while select.select([self.pipe], [], [], _TO_END)[0]:
                if not os.read(self.pipe, 4096):
                    break
            else:
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return self.results.take("last")
        finally:
            os.close(self.pipe)
            self.scratch.remove()


class RunAhead:
    """A pytest plugin for the process of a command; see the module.

    Args:
        fewest: run nothing ahead if fewer checks are selected.
    """

    def __init__(self, fewest: int = _FEWEST) -> None:
        self._fewest = fewest
        self._numbers: dict[pytest.Item, int] = {}
        self._second: SecondProcess | None = None

    def waiting(self) -> int:
        """Return the number of checks that have passed ahead of their turn and are not reported yet."""
        return 0 if self._second is None else self._second.results.waiting()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if not (self._fits(session.config) and len(session.items) >= self._fewest):
            return
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:  # then all checks run here
            scratch = Scratch.new("suite")
            undo.callback(scratch.remove)
            _draw_alike(session)
            results, (pipe, end), parent = Results(scratch.path), os.pipe(), os.getpid()
            undo.callback(os.close, pipe)
            try:
                pid = os.fork()
                if pid == 0:
                    _be_second(session, results, end, parent)
            finally:
                os.close(end)
            undo.pop_all()
            self._second = SecondProcess(scratch, results, pid, pipe)
            self._numbers = {item: number for number, item in enumerate(session.items)}
            session.config.add_cleanup(self._clean_up)

    def _fits(self, config: pytest.Config) -> bool:
        settings = config.stash[SESSION].settings
        return (
            settings.simulate == "cpu"
            and (settings.gpus or 0) > 1
            and available_processors() > 1
            and _has_memory(settings)
            and getattr(config.option, "capture", "no") in ("fd", "sys")
            and not any(config.getoption(name, None) for name in _ONLY_HERE)
            and not (config.getini("log_cli") or os.environ.get("PYTEST_TIMEOUT"))
            and not (is_launched() or config.pluginmanager.has_plugin("dsession") or hasattr(config, "workerinput"))
            and coverage_here() is None
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Report a check that the second process runs, after its end. Others run as always."""
        number = self._numbers.pop(item, None)
        if self._second is None or number is None or self._second.results.claim(number):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        outcome = self._second.outcome(number, item.config.stash[SESSION])
        for report in _reports(outcome, item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """End the second process before deaths of its ranks decide on the exit code."""
        own = session.config.stash[SESSION]
        interrupted = self._end(own)
        try:
            return (yield)
        finally:
            own.notes.interrupted = own.notes.interrupted or interrupted

    def _clean_up(self) -> None:
        """End the second process if pytest ends without `pytest_sessionfinish`."""
        if self._second is not None:
            self._second.end()
            self._second = None

    def _end(self, session: GpuSession) -> str:
        """End the second process. Return where its ranks were if pytest was waiting for them."""
        second, self._second = self._second, None
        if second is None:
            return ""
        last = second.end()
        if last is None:
            session.notes.remarks.append(
                "the second process of this run was killed before it noted how its ranks ended"
            )
            return ""
        session.notes.add(last.notes)
        return str(last.notes["interrupted"]) if second.awaited else ""


def _reports(outcome: RanAhead, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """Return the reports of a check: those of the second process, or of a run in this one."""
    told: list[pytest.TestReport] = [
        item.config.hook.pytest_report_from_serializable(config=item.config, data=report) for report in outcome.reports
    ]
    if outcome.passed:
        # Fixtures that this check shares with the one before are still set up. If their teardown fails, pytest ends.
        item.session._setupstate.teardown_exact(nextitem)
        return told
    here = runtestprotocol(item, log=False, nextitem=nextitem)
    if not outcome.failed or any(report.failed for report in here):
        return here
    for report in told:
        if report.failed:
            report.sections.append(("mgpu-check", "failed in a second process, and passed when it was repeated here"))
    return told


def _has_memory(settings: Settings) -> bool:
    available, (once, each) = available_memory(), _MEMORY
    ranks = sum(range(1, (settings.gpus or 0) + 1))  # worlds of all sizes
    return available is None or available > once + each * ranks


def _draw_alike(session: pytest.Session) -> None:
    """Make both processes draw the same examples of a check, unless ``--hypothesis-seed`` does so."""
    from hypothesis import seed

    if session.config.getoption("hypothesis_seed", None) is None:
        for item in session.items:
            if isinstance(item, pytest.Function) and hasattr(item.function, "hypothesis"):
                seed(random.getrandbits(64))(item.function)


def _be_second(session: pytest.Session, results: Results, end: int, parent: int) -> NoReturn:
    """Run checks from the last one backwards until one has been claimed by pytest's process."""
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        session.config.stash[SESSION].disown()
        end_with_parent()
        if os.getppid() == parent:
            _run_backwards(session, results, end)
    finally:
        os._exit(0)


def _run_backwards(session: pytest.Session, results: Results, end: int) -> None:
    own = session.config.stash[SESSION]
    interrupted, trouble = False, ""
    try:
        _leave_output(session.config)
        for number, item in reversed([*enumerate(session.items)]):
            if not results.claim(number):
                break
            outcome = _outcome_of(item)
            outcome.notes, own.notes = own.notes.told(), RunNotes()
            results.put(number, outcome)
            os.write(end, b".")
    except KeyboardInterrupt:
        interrupted = True
    except Exception as error:
        trouble = f"the second process of this run ended early: {type(error).__name__}: {error}"
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    own.finish(interrupted)
    if trouble:
        own.notes.remarks.append(trouble)
    results.put("last", RanAhead(notes=own.notes.told()))


def _outcome_of(item: pytest.Item) -> RanAhead:
    config = item.config
    warned: list[object] = []
    collect = SimpleNamespace(call_historic=lambda kwargs: warned.append(kwargs))
    with catch_warnings_for_item(config, SimpleNamespace(pytest_warning_recorded=collect), "runtest", item):
        reports = runtestprotocol(item, log=False)
    return RanAhead(
        [config.hook.pytest_report_to_serializable(config=config, report=report) for report in reports],
        passed=not warned and all(report.passed for report in reports),
        failed=any(report.failed for report in reports),
    )


def _leave_output(config: pytest.Config) -> None:
    """Write nothing to the terminal, and capture the output of checks in files of this process."""
    with open(os.devnull, "r+b") as nothing:
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    capture = config.pluginmanager.getplugin("capturemanager")
    capture._global_capturing = None  # that of pytest's process, whose files this one must not touch
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
