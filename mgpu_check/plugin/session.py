"""The state of one pytest run: its settings, its pool of ranks, its current test, and the lines for its summary.

The fork server starts before pytest imports the first test file that needs it, so that both import torch at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mgpu_check
from mgpu_check.annotations import wanted
from mgpu_check.devices.inventory import Device
from mgpu_check.errors import StartupFailure
from mgpu_check.plugin import launch
from mgpu_check.plugin.device_leases import Leasing, RunDirectory, TooFewDevices, lack, too_few
from mgpu_check.plugin.requirements import NEEDS, Needs
from mgpu_check.processes.heap import importing
from mgpu_check.processes.rank_lists import few
from mgpu_check.settings import Settings, activate
from mgpu_check.version import torch_version, version

if TYPE_CHECKING:
    from mgpu_check.asserts.known_defects import Met
    from mgpu_check.engine.pool import RankPool
    from mgpu_check.engine.remote.driver import AgentLauncher
    from mgpu_check.plugin.rank_messages import Logging
    from mgpu_check.plugin.replacements import Changes
    from mgpu_check.plugin.serialization import Planting


@dataclass
class CurrentTest:
    """What one test has done so far."""

    examples: int = 0  # number of examples, or plain runs, that it has completed
    met: list[Met] = field(default_factory=list)  # the known defects that it has met
    # the cases that it has left out, each with the reason
    left_out: list[tuple[str, str]] = field(default_factory=list)
    drawn: bool = False  # whether it draws examples
    in_body: bool = False  # whether its body is running, not a fixture
    not_seen: list[str] = field(default_factory=list)  # what the passes of its gates do not show
    # the modules that are pickled by value for it: its own, and conftests
    modules: list[types.ModuleType] = field(default_factory=list)


@dataclass
class RunNotes:
    """Facts about a run that belong to no test."""

    remarks: list[str] = field(default_factory=list)  # lines for the end of the run
    # what passes of gates do not show -> the steps that passed
    not_seen: dict[str, list[str]] = field(default_factory=dict)
    # lines about ranks that died while no test used them; any line makes the run fail
    deaths: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # seconds that each delayed test waited for devices
    interrupted: str | None = None  # the positions of the ranks when Ctrl-C interrupted a call; None if it did not

    @property
    def lines(self) -> list[str]:
        limits = [f"not seen by the gate of {few(steps)}: {line}" for line, steps in self.not_seen.items()]
        return [*self.remarks, *limits]

    def add(self, notes: Mapping[str, Any]) -> None:
        """Add the `notes` of another process. Its positions at Ctrl-C are its own."""
        self.remarks += [line for line in notes.get("remarks", []) if line not in self.remarks]
        for line, steps in notes.get("not_seen", {}).items():
            self.not_seen.setdefault(line, []).extend(steps)
        self.deaths += notes.get("deaths", [])
        self.waits += notes.get("waits", [])


# Every rewritten test refers to this module, through pytest's assertion rewriting.
PRELOAD = ("mgpu_check.plugin.in_rank",)
GATES = ("mgpu_check.gates.run.measurement", "mgpu_check.gates.run.step_runs")
"""Modules that each rank of a gate would import."""


class FirstFailure(BaseException):
    """Raised by the first failing example of a test, to end the test at once: see `GpuSession.first_failure`.
    Not an ``Exception``, because Hypothesis would run the example again."""

    def __init__(self, failure: AssertionError) -> None:
        super().__init__(str(failure))
        self.failure = failure


class GpuSession:
    """The plugin's state during a pytest run. Ranks are started only when they are needed.

    `pytest_configure` makes one for each run. It counts the devices at the start of the session, makes the pool on
    first use, and leases devices around each test. `finish` and `close` end all processes of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings  # the options of the run; `count_devices` replaces "all" by the number of devices
        # the real devices; empty before they are counted, and on a node simulated on the CPU
        self.devices: list[Device] = []
        self.test = CurrentTest()  # the state of the current test; a new one for each
        self.notes = RunNotes()  # what the end of the run reports besides its tests
        # name of a fault that is planted on ranks during every call; None for no fault
        self.fault: Planting | None = None
        self.first_failure = False  # end a test at its first failing example, by `FirstFailure`
        self.on_example: Callable[[], None] = lambda: None  # called after each example, to show progress
        # directory where the workers of one run lease simulated devices; None in a run of one process
        self.shared: Path | None = None
        # whether each worker of the run simulates a node of its own, so that there is nothing to lease
        self.has_own_nodes = False
        self.on_wait: Callable[[str], None] = lambda line: None  # called with a line about each long wait
        # modules that the fork server of a node simulated on the CPU imports, so that no rank has to. Such an import
        # touches no real device.
        self.preload: list[str] = []
        # called before the fixture `ranks` is used: a test may use it without having declared it
        self.on_ranks: Callable[[], None] = lambda: None
        self.how_to_log: Callable[[], Logging | None] = lambda: None  # returns how ranks log
        # returns what fixtures and test files have changed in modules; see `Replacements.changes`
        self.changes: Callable[[Callable[..., Any]], Changes | None] = lambda function: None
        self.until_end = contextlib.ExitStack()  # contexts that end with the current test
        self._leasing: Leasing | None = None
        self._directory = RunDirectory()
        self._pool: RankPool | None = None
        self._agents: AgentLauncher | None = None
        self._last = "none"
        self._keep = settings.gpu_keep_warm
        self._kept: str | None = None  # the clause of the header about imports that are kept

    @property
    def pool(self) -> RankPool:
        if self._pool is None:
            assert self.settings.gpus, "the pool of a run that has no devices"
            self._pool = self._new_pool(self.settings.gpus)
        return self._pool

    @property
    def has_agents(self) -> bool:
        return self._agents is not None

    def _new_pool(self, devices: int) -> RankPool:
        # Imported here: every pytest run with this package installed creates a session, but few need ranks.
        from mgpu_check.engine.launcher import LocalLauncher
        from mgpu_check.engine.pool import RankPool
        from mgpu_check.plugin.rank_messages import deliver
        from mgpu_check.processes.environments import FIRST

        self._agents = launch.launcher_of_this_run(self.settings)
        unshared = self.preload if self.settings.simulate == "cpu" else ()
        return RankPool(
            self._agents
            or LocalLauncher(self._shared, self.settings.simulate, FIRST, keep=self._keep, unshared=unshared),
            devices,
            self.settings.simulate,
            self.settings.rank_timeout,
            wrap=self._shipped,
            hear=deliver,
            masks=lambda slots: self.leasing.mask(slots),
            memory=lambda: min((device.memory for device in self.devices), default=None),
        )

    def _shipped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        from mgpu_check.engine.rank_side.python_hooks import coverage_here
        from mgpu_check.plugin.serialization import Shipped, warning_filters

        changes = self.changes(function)
        how = warning_filters(), self.test.drawn, coverage_here(), self.how_to_log()
        return Shipped(changes, function, self.fault, *how)

    @property
    def leasing(self) -> Leasing:
        """The leases of the current test. Use it only after the devices have been counted."""
        if self._leasing is None:
            self._leasing = Leasing(
                self.settings,
                self.devices,
                self.shared,
                launched=launch.is_launched(),
                waits=self.notes.waits,
                on_wait=lambda line: self.on_wait(line),
            )
        return self._leasing

    @property
    def _shared(self) -> tuple[str, ...]:
        """The modules that the fork servers of all runs import besides those of the engine."""
        return PRELOAD if self._keep is None else (*PRELOAD, *GATES)

    def find_keeper(self) -> None:
        """Look for the process that keeps imports of ranks for this run; raise `StartupFailure` if it cannot safely."""
        if self._keep is None:
            return
        from mgpu_check.engine import keeper_socket
        from mgpu_check.engine.launcher import LocalLauncher
        from mgpu_check.processes.environments import FIRST

        reason = "a launcher starts the ranks" if launch.is_launched() else keeper_socket.obstacle(os.environ)
        if reason:
            self._keep, self._kept = None, f"imports are not kept warm, because {reason}"
            return
        process_id = keeper_socket.keeper_of(*LocalLauncher(self._shared, self.settings.simulate, FIRST).keeper())
        begun = f"from now on, for {self._keep:g} s" if self._keep else "for this run"
        self._kept = f"imports kept warm {f'by process {process_id}' if process_id else begun}"

    def count_devices(self) -> None:
        """Count the real devices, in a process of their own, and check that there are enough. Raises `TooFewDevices`:
        there are not; the message names the requested and the visible devices, and the remedy."""
        from mgpu_check.engine.pool import devices_of_host

        settings = self.settings
        backing = settings.simulate
        if launch.is_launched():
            self._pool = self._new_pool(1)
            assert self._agents is not None
            self.settings, self.devices = launch.take_seats(settings, self._pool, self._agents)
            return
        if backing == "cpu":
            return
        pool = self._pool = self._new_pool(settings.gpus or 1)
        inventory = devices_of_host(pool)
        self.devices = list(inventory.devices)
        needed = int(backing.partition(":")[2]) + 1 if backing else settings.gpus
        if not self.devices or (needed is not None and needed > len(self.devices)):
            self.close()
            raise TooFewDevices(too_few(settings, inventory, os.environ, torch_version()))
        if backing is None:
            self.settings = settings.counted(len(self.devices))
            pool.set_slots(self.settings.gpus or 0)
            self.leasing.check()

    def hand_over(self) -> dict[str, Any]:
        """Return the devices and the lease directory, for a pytest-xdist worker on this machine."""
        shared = str(self._directory.make()) if self.settings.simulate and not self.has_own_nodes else None
        devices = [dataclasses.asdict(device) for device in self.devices]
        return {"devices": devices, "shared": shared, "preload": self.preload}

    def take_over(self, handed_over: dict[str, Any] | None, run: str) -> None:
        """Use the devices of the controller in a pytest-xdist worker.

        `handed_over`: the result of the controller's `hand_over`; None on another machine, where the worker counts its
        own. `run`: unique id of this run. Raises `TooFewDevices`: see `count_devices`.
        """
        if handed_over is None:
            self.shared = self._directory.of(run) if self.settings.simulate else None
            self.count_devices()
            return
        self.preload += handed_over["preload"]
        self.shared = self._directory.join(Path(handed_over["shared"])) if handed_over["shared"] else None
        self.devices = [Device(**device) for device in handed_over["devices"]]
        self.settings = self.settings.counted(len(self.devices))

    def lack(self, count: int, host: int | None = None) -> str | None:
        """Return why a test for `count` devices (0: all) cannot run here, or on `host`; None if it can."""
        return lack(self.settings, count, host)

    def count_example(self) -> None:
        self.test.examples += 1
        self.on_example()

    def forget_test(self) -> None:
        """Reset the per-test state. A new test starts, which may be skipped before it gets devices."""
        self.test = CurrentTest()
        if self._pool is not None:
            self._pool.sizes = set()

    def begin_test(self, name: str, count: int = 0) -> int:
        """Start a test: lease its devices, and check that no rank died since the last test. May wait for the devices.

        `count`: number of devices that the test needs for its exclusive use; 0 for all. Returns the number of devices
        of the test.
        """
        self.forget_test()
        try:
            slots = self.leasing.begin(count, name)
        except BaseException as error:
            if not isinstance(error, Exception):  # from outside, as by pytest-timeout
                error.add_note("the test was still waiting for GPUs that other tests use")
            raise
        self._note_deaths()
        self.pool.begin_test(slots)
        self._last = name
        return self.pool.devices

    @contextlib.contextmanager
    def some_devices(self, size: int | None) -> Iterator[None]:
        """Within the context, lease `size` devices, or all, for a call outside of tests, as in a fixture's teardown."""
        if self.leasing.active:
            yield
            return
        valid = isinstance(size, int) and 0 < size <= len(self.pool.slots)
        slots = self.leasing.begin(size if size and valid else 0, "a fixture")
        before, self.pool.available = self.pool.available, slots or self.pool.available
        try:
            yield
        finally:
            self.pool.available = before
            self.leasing.end()

    def end_test(self, failed: bool) -> None:
        """End a test: clean up its ranks, and give its devices back. Raises `RankDied` if one died after its result."""
        try:
            if self._pool is not None:
                for line in self._pool.end_test(failed):
                    self.notes.remarks.append(f"{self._last} left behind {line}; its ranks were replaced")
        finally:
            self.until_end.close()
            self.leasing.end()

    def finish(self, interrupted: bool = False) -> None:
        """End all processes of the run, and note which ranks died while no test used them.

        If Ctrl-C interrupted a call on ranks, note instead where each rank was, and no deaths. `interrupted`: whether
        Ctrl-C ended the run, possibly during a call.
        """
        stopped = self._pool.stopped() if interrupted and self._pool is not None else None
        self.notes.interrupted = None if stopped is None else str(stopped)
        if stopped is None:  # otherwise the interruption has ended them, so their deaths are no finding
            self._note_deaths()
        self.close()

    def _note_deaths(self) -> None:
        if self._pool is not None:
            self.notes.deaths += self._pool.died_idle(f" (the last test was {self._last})")

    def output(self) -> list[tuple[str, str, str]]:
        return [] if self._pool is None else self._pool.output()

    def sizes(self) -> list[int]:
        return [] if self._pool is None else sorted(self._pool.sizes)

    def explain(self, error: BaseException) -> None:
        """Let the ranks extend the text of a failure that they have just raised."""
        if self._pool is not None:
            self._pool.explain(error)

    def describe_devices(self) -> str:
        settings = self.settings
        if settings.simulate:
            return f"SIMULATED {settings.simulate} x{len(self.leasing.indices)}"
        slots = [] if self._pool is None else self._pool.available
        own = [self.devices[slot.index] for slot in slots if slot.index < len(self.devices)]
        if settings.per_host:
            own = self.devices  # host by host
        return ", ".join(f"cuda:{device.index} {device.name} {device.uuid}".rstrip() for device in own)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._leasing is not None:
            self._leasing.end()
        self._directory.leave()

    def header(self) -> str:
        settings = self.settings
        clauses = [f"mgpu-check {version()}"]
        if settings.simulate:
            node = f"SIMULATED node of {settings.gpus} GPUs on {settings.simulate}: proves code, never hardware"
            clauses += [node, "backend gloo in place of nccl"]
            if settings.simulate_arithmetic.kinds:
                clauses.append(f"arithmetic {settings.simulate_arithmetic}")
        elif self.devices:
            listed = ", ".join(f"cuda:{d.index} {d.name}" for d in self.devices[: settings.gpus or 0])
            clauses += [listed, "backend nccl, gloo for CPU tensors"]
        else:
            clauses.append("all visible GPUs" if settings.gpus is None else f"{settings.gpus} GPUs")
        if self._agents is not None:
            clauses.append(launch.describe(self._agents))
        clauses.append(f"torch {torch_version()}")
        sizes = "1" if settings.gpus == 1 else f"1 to {settings.gpus or 'all'}"
        clauses.append(f"world sizes {sizes}, rank timeout {settings.rank_timeout:g} s")
        if self._kept is not None:
            clauses.append(self._kept)
        return "; ".join(clauses)


def begin(item: pytest.Item, needs: Needs, session: GpuSession) -> None:
    """Lease the devices of `item`, and start its account in the session."""
    from mgpu_check.plugin.execution import modules_of

    devices = session.begin_test(item.nodeid, needs.count)
    session.test.modules = modules_of(item)
    activate(dataclasses.replace(session.settings, gpus=devices, host=needs.host))


def adopt(item: pytest.Item, session: GpuSession) -> None:
    """Set up `item` when it first uses ranks through `request.getfixturevalue` or a fixture of wider scope."""
    if NEEDS in item.stash:
        return
    from mgpu_check.plugin.serialization import by_value

    item.stash[NEEDS] = Needs("parent", 0)
    begin(item, item.stash[NEEDS], session)
    session.until_end.enter_context(by_value(session.test.modules))


_PACKAGE = Path(mgpu_check.__file__).parent
_NEEDS_RANKS = re.compile(rb"\b(ranks|gpus)\b")
_HAS_GATES = re.compile(rb"\bassert_(step|metric)")


def started(start: Callable[[], None]) -> None:
    """Call what starts a fork server during the collection, where no test can report a failure: it is wrong usage."""
    try:
        start()
    except StartupFailure as error:
        raise pytest.UsageError(f"mgpu-check: {error}") from error


class EarlyStart:
    """A pytest plugin for runs with GPUs, which `register` adds: it starts the fork server during the collection."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._started = False

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        with importing():
            return (yield)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Look for words that a test with ranks has. Without them, the fork server starts after the collection."""
        path = collector.path
        if self._started or not isinstance(collector, pytest.Module) or _PACKAGE in path.parents:
            return
        try:
            text = path.read_bytes()
        except OSError:
            return  # pytest reports it
        if _NEEDS_RANKS.search(text):
            self._started = True
            if _HAS_GATES.search(text):
                self._session.preload += GATES
            started(self._session.pool.start)


def register(config: pytest.Config, session: GpuSession) -> None:
    """Register the summary, annotations, the early start of ranks, and the line that repeats an example.
    Raises `pytest.UsageError`: a file cannot be written, or the example cannot be repeated here."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        if session.settings.gpu_report:
            from mgpu_check.plugin.report.github import Summaries

            config.pluginmanager.register(Summaries(config, session), "mgpu_check_summary")
        if wanted(session.settings.gpu_annotations):
            from mgpu_check.plugin.report.github import Annotations

            config.pluginmanager.register(Annotations(config), "mgpu_check_annotations")
    if session.settings.asked and not config.option.collectonly:
        config.pluginmanager.register(EarlyStart(session), "mgpu_check_early")
    if config.getoption("gpu_replay"):
        from mgpu_check.plugin.report import replay

        replay.check_replay(config.getoption("gpu_replay"))
