"""Adapt torch's multi-process test harnesses: the decorator, the hooks, the count at the end, and forked ranks in the
place of the processes that a harness spawns.

The harness itself stays: `setUp`, `tearDown` and the judgement of exit codes are its own, in the pytest process. The
start of its processes is replaced, and the wait for them. `harness_ranks` is the rank's side.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from inspect import getattr_static
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from mgpu_check.errors import RankDied
from mgpu_check.plugin import harness_ranks
from mgpu_check.plugin.harness_ranks import HOME
from mgpu_check.plugin.private_names import TestCaseFunction
from mgpu_check.torch_hooks.patches import Patches

if TYPE_CHECKING:
    from mgpu_check.engine.world import BareWorld, Begun
    from mgpu_check.plugin.session import GpuSession
    from mgpu_check.settings import Settings


SPAWNED, CONTINUOUS = "MultiProcessTestCase", "MultiProcContinuousTest"

REPLACED = {SPAWNED: ("_start_processes", "_join_processes"), CONTINUOUS: ("_spawn_processes",)}
"""Harness -> its methods that are replaced."""


def harness_of(cls: type) -> type | None:
    """Return the harness that a test class is based on; None for other classes."""
    return next((base for base in cls.__mro__ if base.__name__ in REPLACED and base.__module__ == HOME), None)


class HarnessRuns:
    """Runs tests on forked ranks. `fork`: makes a world of the given number of bare processes.
    `Adapting` makes one if a collected test is to be adapted, and enters `in_place_of` around each such test."""

    def __init__(self, fork: Callable[[int], BareWorld], settings: Settings) -> None:
        self.used = False  # whether the current test has run on forked ranks
        self.output: list[tuple[str, str, str]] = []  # what these have printed: (process, "stdout" or "stderr", text)
        self.fork, self._settings = fork, settings

    @contextlib.contextmanager
    def in_place_of(self, harness: Any) -> Iterator[None]:
        """Within the context, `harness` runs a test on forked ranks."""
        self.used, self.output = False, []
        with contextlib.closing(_SpawnedRanks(self)) as spawned, Patches() as patches:
            if harness.__name__ == SPAWNED:
                start, join = harness._start_processes, harness._join_processes
                patches.set(harness, "_start_processes", lambda test, proc: spawned.start(test, start))
                patches.set(harness, "_join_processes", lambda test, fn: spawned.join(test, fn, join))
            else:
                kept = classmethod(lambda cls, size: _KeptRanks(self, cls, int(size)))
                patches.set(harness, "_spawn_processes", kept)
            yield

    def results(self, world: BareWorld, begun: Begun, test: str) -> list[Any]:
        """Wait for the ranks of a test, as long as its harness does unless the user has set a limit. `test`: its id."""
        explicit = self._settings.given("rank_timeout")
        timeout = self._settings.rank_timeout if explicit else float(sys.modules[HOME].get_timeout(test))
        try:
            return world.results(begun, timeout)
        finally:
            self.output += world.output()


class _SpawnedProcess:
    """The part of `Process` that the harness uses, for one rank."""

    def __init__(self, started: Callable[[_SpawnedProcess], int], args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.pid = 0
        self.exitcode: int | None = None
        self._started = started

    def start(self) -> None:
        self.pid = self._started(self)

    def terminate(self) -> None:
        """End nothing: the world ends with its test."""


class _SpawnedRanks:
    """The ranks of one test on a `MultiProcessTestCase`."""

    def __init__(self, runs: HarnessRuns) -> None:
        self._runs = runs
        self._processes: list[_SpawnedProcess] = []
        self._world: BareWorld | None = None
        self._begun: Begun | None = None

    def start(self, test: Any, theirs: Callable[..., None]) -> None:
        """Take the arguments of each process from the harness, and begin the test on as many ranks."""
        self._world = world = self._runs.fork(int(test.world_size))
        self._runs.used = True

        def started(process: _SpawnedProcess) -> int:
            self._processes.append(process)
            return world.processes[len(self._processes) - 1].pid

        def proc(target: object, args: Any, kwargs: Mapping[str, Any] | None = None, name: str = "") -> _SpawnedProcess:
            return _SpawnedProcess(started, args, kwargs or {})

        theirs(test, proc)
        calls = tuple((tuple(map(_sendable, process.args)), dict(process.kwargs)) for process in self._processes)
        owner = harness_ranks.TestClass.of(type(test))
        self._begun = world.send(test._testMethodName, harness_ranks.run, owner, calls)

    def join(self, test: Any, fn: object, theirs: Callable[[Any, object], None]) -> None:
        """Wait for the ranks, and let the harness judge their exit codes; an error of a rank is raised as itself."""
        if self._world is None or self._begun is None:
            return theirs(test, fn)
        began = time.monotonic()
        try:
            ends = self._runs.results(self._world, self._begun, test.id())
        except RankDied as died:
            if fn not in test.skip_return_code_checks and fn not in test.special_return_code_checks:
                raise
            account: Any = died.account
            codes = {rank: end.exit_code for rank, end in account.died.items()}
            returned = self._world.returned()
            ends = [returned.get(rank, (codes.get(rank), None)) for rank in range(len(self._processes))]
        try:
            for process, (code, _) in zip(self._processes, ends, strict=True):
                process.exitcode = code
            if reason := ends[0][1]:
                raise unittest.SkipTest(reason)
            test._check_return_codes(fn, time.monotonic() - began)
        finally:
            for pipe in test.pid_to_pipe.values():
                pipe.close()

    def close(self) -> None:
        if self._world is not None:
            self._world.discard()


class _KeptRanks:
    """The ranks of a class on `MultiProcContinuousTest`, as the one process and its two queues that the class sees."""

    def __init__(self, runs: HarnessRuns, cls: Any, size: int) -> None:
        self._runs, self._cls, self._size = runs, cls, size
        self._world: BareWorld | None = None
        self._begun: Begun | None = None
        self._test = ""
        cls.processes = cls.task_queues = cls.completion_queues = [self]
        cls.rdvz_file = ""

    def put(self, test: str | None) -> None:
        """Begin a test, on new ranks if its predecessor has failed; None ends the ranks."""
        fresh = self._world is None or self._world.broken
        if self._world is not None and (fresh or test is None):
            self._world.discard()
            with contextlib.suppress(OSError):
                os.remove(self._cls.rdvz_file)
        if test is None:
            self._world = None
            return
        if fresh:
            self._world = self._runs.fork(self._size)
            descriptor, self._cls.rdvz_file = tempfile.mkstemp()
            os.close(descriptor)
        assert self._world is not None
        self._runs.used = True
        self._test = test
        owner = harness_ranks.TestClass.of(self._cls)
        name = test.rpartition(".")[2]
        self._begun = self._world.send(name, harness_ranks.run_next, owner, test, fresh, self._cls.rdvz_file)

    def get(self, timeout: float | None = None) -> str | unittest.SkipTest:
        """Return the id of the test once all ranks have run it, or why it is skipped."""
        assert self._world is not None and self._begun is not None
        try:
            reasons = self._runs.results(self._world, self._begun, self._test)
        except BaseException:
            self._world.broken = True  # the next test gets new ranks
            raise
        skipped = [reason for reason in reasons if reason is not None]
        return unittest.SkipTest(skipped[0]) if skipped else self._test

    def join(self) -> None:
        """Wait for nothing: `put` has ended the ranks."""


def _sendable(argument: object) -> object:
    if not isinstance(argument, Connection):
        return argument
    argument.close()  # so that the harness does not wait for a text that a rank never sends
    return harness_ranks.Pipe()


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

        wanted = False
        for item in session.items:
            cls = item.cls if isinstance(item, TestCaseFunction) else None
            harness = harness_of(cls) if cls is not None else None
            if harness is None or not (self._session.settings.adapt_torch_tests or getattr(cls, _ASKED, False)):
                continue
            methods = REPLACED[harness.__name__]
            changed = [name for name in methods if getattr_static(cls, name) is not getattr_static(harness, name)]
            if changed:
                item.stash[_OWN] = f"it overrides {', '.join(changed)} of {harness.__name__}"
            else:
                item.stash[_HARNESS] = harness
                wanted = True
        if wanted:
            from mgpu_check.engine.launcher import LocalLauncher
            from mgpu_check.engine.world import BareWorld
            from mgpu_check.plugin.session import started
            from mgpu_check.processes.environments import FIRST

            launcher = LocalLauncher(("mgpu_check.plugin.harness_ranks", *_modules_of_torch()), hash_seed=FIRST)
            started(launcher.start)
            session.config.add_cleanup(launcher.close)
            self._runs = HarnessRuns(lambda size: BareWorld(launcher, size), self._session.settings)

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
        if _OWN in item.stash:
            item.user_properties.append((_PROPERTY, item.stash[_OWN]))
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
        clauses = [f"{on_ranks} test{'' if on_ranks == 1 else 's'} of torch's harnesses ran on forked ranks"]
        clauses += [f"{count} in their own harness: {reason}" for reason, count in counts.items()]
        terminalreporter.line(f"mgpu-check: {'; '.join(clauses)}", yellow=bool(counts))


def _modules_of_torch() -> list[str]:
    """Return the modules of torch that this process has imported, for the fork server.
    Its imports must not touch a real device, which torch's test modules do."""
    import torch

    from mgpu_check.engine.forkserver import OPTIONAL
    from mgpu_check.processes.environments import SIMULATE

    if torch.cuda.is_available() and SIMULATE not in os.environ:
        return []
    return [
        OPTIONAL + name
        for name, module in list(sys.modules.items())
        if name.startswith("torch.") and getattr(module, "__spec__", None) and getattr(module, "__file__", None)
    ]
