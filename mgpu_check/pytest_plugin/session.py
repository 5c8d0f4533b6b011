"""Keep one pytest run: its settings, its pool, and what it has to report at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_check.devices.inventory import Device
from mgpu_check.pytest_plugin import launched
from mgpu_check.pytest_plugin.leasing import Leasing, RunDirectory
from mgpu_check.pytest_plugin.missing_devices import TooFewDevices, lack, too_few
from mgpu_check.settings import Settings
from mgpu_check.version import torch_version, version

if TYPE_CHECKING:
    from mgpu_check.checks.known_defects import Met
    from mgpu_check.engine.pool import RankPool
    from mgpu_check.engine.remote.launcher import AgentLauncher
    from mgpu_check.pytest_plugin.report.drawn import Drawn
    from mgpu_check.pytest_plugin.report.suspects import Seen
    from mgpu_check.pytest_plugin.second_look import Failed

__all__ = ["PRELOAD", "FirstFailure", "GpuSession", "TooFewDevices"]

# What assertion rewriting refers to in every test that it rewrote.
PRELOAD = ("mgpu_check.pytest_plugin.in_rank",)


class FirstFailure(BaseException):
    """The first example of a test has failed, in a run that wants no more of it: see `GpuSession.first_failure`.

    No ``Exception``, because Hypothesis would run the example again.
    """

    def __init__(self, failure: AssertionError) -> None:
        super().__init__(str(failure))
        self.failure = failure


class GpuSession:
    """The plugin's state during a pytest run. Nothing is started before it is needed.

    Attributes:
        settings: what was asked for, with "all" counted once `count_devices` was called.
        devices: the real devices, as far as they were looked up.
        examples: examples, or plain runs, that the current test has completed.
        failing: the example of the current test that was the last to fail.
        seen: what a second look at it has shown.
        values: what the examples of a check of the packaged suite were given.
        looked: seconds that all second looks of the run have taken.
        met: the known defects of others that it has met.
        on_example: called after each, to show progress.
        fault: name of a planted fault that every function sent from now on has with it.
        first_failure: end a test at the first example that fails, by `FirstFailure`, for who asks only whether one does.
        drawn: the current test draws examples.
        in_body: it is the body of a test that runs, and no fixture.
        remarks: lines for the end of the run.
        deaths: lines about ranks that died while no test used them; any makes the run fail.
        interrupted: where the ranks were that Ctrl-C has interrupted in a call; nothing where there were none.
        shared: where the workers of one run lease simulated devices from each other; None in a run of one process.
        waits: how long tests had to wait for devices that others had, in seconds.
        on_wait: told whom a test waits for, if it is long.
        on_ranks: called before ranks are used through the fixture `ranks`: the test may not be known as one that does.
        replacements: gives what fixtures have replaced, for a function to have it on ranks too.
        until_end: contexts that end with the current test.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.devices: list[Device] = []
        self.examples = 0
        self.failing: Failed | None = None
        self.seen: Seen | None = None
        self.values: Drawn | None = None
        self.looked = 0.0
        self.met: list[Met] = []
        self.fault: str | None = None
        self.first_failure = False
        self.drawn = False
        self.in_body = False
        self.remarks: list[str] = []
        self.deaths: list[str] = []
        self.interrupted = ""
        self.on_example: Callable[[], None] = lambda: None
        self.shared: Path | None = None
        self.waits: list[float] = []
        self.on_wait: Callable[[str], None] = lambda line: None
        self.on_ranks: Callable[[], None] = lambda: None
        self.replacements: Callable[[Callable[..., Any]], bytes] = lambda function: b""
        self.until_end = contextlib.ExitStack()
        self._leasing: Leasing | None = None
        self._directory = RunDirectory()
        self._pool: RankPool | None = None
        self._agents: AgentLauncher | None = None
        self._last = "none"

    @property
    def pool(self) -> RankPool:
        if self._pool is None:
            assert self.settings.gpus, "the pool of a run that has no devices"
            self._pool = self._new_pool(self.settings.gpus)
        return self._pool

    @property
    def has_agents(self) -> bool:
        """Whether ranks are started by agents that a launcher has launched."""
        return self._agents is not None

    def _new_pool(self, devices: int) -> RankPool:
        # Here, because every pytest run where this package is installed makes a session, and few need ranks.
        from mgpu_check.engine.hash_seeds import FIRST
        from mgpu_check.engine.launcher import LocalLauncher
        from mgpu_check.engine.pool import RankPool
        from mgpu_check.pytest_plugin.forwarding import deliver
        from mgpu_check.pytest_plugin.serialization import Shipped, warning_filters
        from mgpu_check.rank_side.coverage import coverage_here

        self._agents = launched.launcher_of_this_run(self.settings)
        return RankPool(
            self._agents or LocalLauncher(PRELOAD, self.settings.simulate, FIRST),
            devices,
            self.settings.simulate,
            self.settings.rank_timeout,
            wrap=lambda function: Shipped(
                function, self.fault, warning_filters(), self.drawn, coverage_here(), self.replacements(function)
            ),
            hear=deliver,
            masks=lambda slots: self.leasing.mask(slots),
            memory=lambda: min((device.memory for device in self.devices), default=None),
        )

    @property
    def leasing(self) -> Leasing:
        """The leases of the current test; to be asked when they are counted."""
        if self._leasing is None:
            self._leasing = Leasing(
                self.settings,
                self.devices,
                self.shared,
                launched=launched.is_launched(),
                waits=self.waits,
                on_wait=lambda line: self.on_wait(line),
            )
        return self._leasing

    def count_devices(self) -> None:
        """Look at the real devices, in a process of their own, and see that there are enough.

        Raises:
            TooFewDevices: saying what was asked for, what there is, and what to do.
        """
        from mgpu_check.engine.inventory import look

        settings = self.settings
        backing = settings.simulate
        if launched.is_launched():
            self._take_slots()
            return
        if backing == "cpu":
            return
        pool = self._pool = self._new_pool(settings.gpus or 1)
        found = look(pool)
        self.devices = list(found.devices)
        needed = int(backing.partition(":")[2]) + 1 if backing else settings.gpus
        if not self.devices or (needed is not None and needed > len(self.devices)):
            self.close()
            raise TooFewDevices(too_few(settings, found, os.environ, torch_version()))
        if backing is None:
            self.settings = settings.counted(len(self.devices))
            pool.set_slots(self.settings.gpus or 0)
            self.leasing.check()

    def hand_over(self) -> dict[str, Any]:
        """Tell a worker of pytest-xdist on this machine what it need not find out, and where the workers lease."""
        shared = str(self._directory.make()) if self.settings.simulate else ""
        return {"devices": [dataclasses.asdict(device) for device in self.devices], "shared": shared}

    def take_over(self, told: dict[str, Any] | None, run: str) -> None:
        """Take over, in a worker, what the process that hands out the tests has told; nothing, where that is another
        machine.

        Args:
            run: what tells this run from all others.

        Raises:
            TooFewDevices: as `count_devices`.
        """
        if told is None:
            self.shared = self._directory.of(run) if self.settings.simulate else None
            self.count_devices()
            return
        self.shared = self._directory.join(Path(told["shared"])) if told["shared"] else None
        self.devices = [Device(**device) for device in told["devices"]]
        self.settings = self.settings.counted(len(self.devices))

    def _take_slots(self) -> None:
        self._pool = self._new_pool(1)
        assert self._agents is not None
        try:
            self.settings, self.devices = launched.take_seats(self.settings, self._pool, self._agents)
        except launched.Misfit as misfit:
            raise TooFewDevices(str(misfit)) from None

    def lack(self, count: int, host: int | None = None) -> str | None:
        """Return why a test for `count` devices (0: for all there are) cannot run here, or on `host`; None if it can."""
        return lack(self.settings, count, host)

    def count_example(self) -> None:
        """Count an example that the current test has completed, or its one plain run."""
        self.examples += 1
        self.on_example()

    def forget_test(self) -> None:
        """Forget what is known of the test before, as another one begins: that may be skipped before it has devices."""
        self.examples = 0
        self.failing = self.seen = self.values = None
        self.met.clear()
        if self._pool is not None:
            self._pool.sizes = set()

    def hear_covered(self, facts: Mapping[str, Any]) -> None:
        """Take note of what the current test goes through besides its arguments."""
        if self.values is not None:
            self.values.note(facts)

    def begin_test(self, name: str, count: int = 0) -> int:
        """Start the account of a test, and see that no rank died since the last one.

        Args:
            count: devices that it needs, and has for itself until it ends; 0 for all. It may have to wait for them.

        Returns:
            How many it has.
        """
        self.forget_test()
        slots = self.leasing.begin(count, name)
        self._note_deaths()
        self.pool.begin_test(slots)
        self._last = name
        return self.pool.devices

    @contextlib.contextmanager
    def some_devices(self, size: int | None) -> Iterator[None]:
        """Lease devices for a call outside of any test that has devices, as in the teardown of a fixture: `size`, or
        all.
        """
        if self.leasing.active:
            yield
            return
        right = isinstance(size, int) and 0 < size <= len(self.pool.slots)
        slots = self.leasing.begin(size if size and right else 0, "a fixture")
        before, self.pool.available = self.pool.available, slots or self.pool.available
        try:
            yield
        finally:
            self.pool.available = before
            self.leasing.end()

    def end_test(self, failed: bool) -> None:
        """Leave fresh ranks for the next test.

        Raises:
            RankDied: a rank ended after it had done its part of this one.
        """
        try:
            if self._pool is not None:
                for line in self._pool.end_test(failed):
                    self.remarks.append(f"{self._last} left behind {line}; its ranks were replaced")
        finally:
            self.until_end.close()
            self.leasing.end()

    def finish(self, interrupted: bool = False) -> None:
        """Look at the ranks for the last time, and end them.

        Args:
            interrupted: by Ctrl-C, perhaps in a call.
        """
        stopped = self._pool.stopped() if interrupted and self._pool is not None else None
        self.interrupted = "" if stopped is None else str(stopped)
        if stopped is None:  # else they have been ended, in a call, and may have answered to nobody
            self._note_deaths()
        self.close()

    def _note_deaths(self) -> None:
        if self._pool is not None:
            self.deaths += self._pool.died_idle(f" (the last test was {self._last})")

    def output(self) -> list[tuple[str, str, str]]:
        """Return what the ranks of this test wrote: (process, stream, text)."""
        return [] if self._pool is None else self._pool.output()

    def sizes(self) -> list[int]:
        """Return the world sizes that the current test has used."""
        return [] if self._pool is None else sorted(self._pool.sizes)

    def explain(self, error: BaseException) -> None:
        """Give a failure that ranks have just raised the best text that they can make of it."""
        if self._pool is not None:
            self._pool.explain(error)

    def describe_devices(self) -> str:
        """Describe the devices of the current test, in one line."""
        settings = self.settings
        if settings.simulate:
            return f"SIMULATED {settings.simulate} x{len(self.leasing.indices)}"
        slots = [] if self._pool is None else self._pool.available
        own = [self.devices[slot.index] for slot in slots if slot.index < len(self.devices)]
        if settings.per_host:
            own = self.devices  # host by host
        return ", ".join(f"cuda:{device.index} {device.name} {device.uuid}".rstrip() for device in own)

    def close(self) -> None:
        """End all processes of the run."""
        if self._pool is not None:
            self._pool.close()
        if self._leasing is not None:
            self._leasing.end()
        self._directory.leave()

    def header(self) -> str:
        """Return the line at the top of a run."""
        settings = self.settings
        parts = [f"mgpu-check {version()}"]
        if settings.simulate:
            parts.append(f"SIMULATED node of {settings.gpus} GPUs on {settings.simulate}: proves code, never hardware")
            parts.append("backend gloo in place of nccl")
        elif self.devices:
            parts.append(", ".join(f"cuda:{d.index} {d.name}" for d in self.devices[: settings.gpus or 0]))
            parts.append("backend nccl, gloo for CPU tensors")
        else:
            parts.append("all visible GPUs" if settings.gpus is None else f"{settings.gpus} GPUs")
        if self._agents is not None:
            parts.append(launched.describe(self._agents))
        parts.append(f"torch {torch_version()}")
        sizes = "1" if settings.gpus == 1 else f"1 to {settings.gpus or 'all'}"
        parts.append(f"world sizes {sizes}, rank timeout {settings.rank_timeout:g} s")
        return "; ".join(parts)
