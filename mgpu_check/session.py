"""One pytest run: its settings, its pool, and what it has to tell at the end."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from mgpu_check.node.inventory import Device
from mgpu_check.settings import Settings

if TYPE_CHECKING:
    from mgpu_check.ranks.pool import RankPool

__all__ = ["GpuSession", "Ranks", "TooFewDevices", "abandoning"]

# What assertion rewriting refers to in every test that it rewrote.
_PRELOAD = ("mgpu_check.in_rank",)


class TooFewDevices(Exception):
    """The machine has fewer devices than the run asks for."""


class Ranks:
    """The fixture `ranks`: all ranks of this run, seen from the pytest process.

    Attributes:
        size: number of devices, and the largest world size.
    """

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self.size = pool.devices

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        size: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; the results in rank order.

        A parameter of `fn` called ``rank`` is given the `mgpu_check.Rank`. `fn` travels by value, with all that it
        refers to. Tensors that live on devices come back as CPU tensors.

        Args:
            size: world size, 1 to `self.size`; default all. May differ from call to call.
            timeout: seconds for all ranks to return; default ``--rank-timeout``.

        Raises:
            RankFailure: a rank raised.
            RankDied: the process of a rank ended.
            RankHang: not all ranks returned in time.
            ValueError: `size` or `timeout` is out of range.
            TypeError: `fn`, or an argument, cannot be pickled.
        """
        __tracebackhide__ = True
        with abandoning():
            return self._pool.run(fn, *args, size=size, timeout=timeout, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.size} ranks>"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("ranks.run is for the pytest process; inside a rank, call the function itself")


@contextlib.contextmanager
def abandoning() -> Iterator[None]:
    """Let a test, or an example, that all ranks have abandoned be abandoned in this process too."""
    from mgpu_check.ranks.world import Abandoned

    try:
        yield
    except Abandoned as abandoned:
        kind, reason = abandoned.failure.kind, abandoned.failure.headline.partition(": ")[2]
    else:
        return
    if kind == "reject":
        from hypothesis import reject  # imported already, where an example can be rejected

        reject()
    elif kind == "xfail":
        pytest.xfail(reason)
    else:
        # At the test's own place, not here.
        raise pytest.skip.Exception(reason, _use_item_location=True)


class GpuSession:
    """What the plugin keeps for the time of a pytest run. Nothing is started before it is needed.

    Attributes:
        settings: what was asked for, with "all" counted once `count_devices` was called.
        devices: the real devices, as far as they were looked up.
        examples: examples, or plain runs, that the current test has completed.
        on_example: called after each, to show progress.
        fault: name of a planted fault that every function sent from now on has with it.
        remarks: lines for the end of the run.
        deaths: lines about ranks that died while no test used them; any makes the run fail.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.devices: list[Device] = []
        self.examples = 0
        self.fault: str | None = None
        self.remarks: list[str] = []
        self.deaths: list[str] = []
        self.on_example: Callable[[], None] = lambda: None
        self._pool: RankPool | None = None
        self._last = "none"

    @property
    def pool(self) -> RankPool:
        if self._pool is None:
            assert self.settings.gpus, "the pool of a run that has no devices"
            self._pool = self._new_pool(self.settings.gpus)
        return self._pool

    def _new_pool(self, devices: int) -> RankPool:
        # Here, because every pytest run where this package is installed makes a session, and few need ranks.
        from mgpu_check.ranks.launcher import LocalLauncher
        from mgpu_check.ranks.pool import RankPool
        from mgpu_check.shipping import Shipped, warning_filters

        return RankPool(
            LocalLauncher(_PRELOAD, simulated=self.settings.simulate is not None),
            devices,
            self.settings.simulate,
            self.settings.rank_timeout,
            wrap=lambda function: Shipped(function, self.fault, warning_filters()),
        )

    def count_devices(self) -> None:
        """Look at the real devices, in a process of their own, and see that there are enough.

        Raises:
            TooFewDevices: saying what was asked for, what there is, and what to do.
        """
        from mgpu_check.node.inventory import visible_devices

        settings = self.settings
        backing = settings.simulate
        if backing == "cpu":
            return
        pool = self._pool = self._new_pool(settings.gpus or 1)
        self.devices = pool.in_fresh_process(visible_devices)
        needed = int(backing.partition(":")[2]) + 1 if backing else settings.gpus
        if not self.devices or (needed is not None and needed > len(self.devices)):
            self.close()
            raise TooFewDevices(self._too_few())
        if backing is None:
            self.settings = settings.counted(len(self.devices))
            pool.devices = self.settings.gpus or 0

    def _too_few(self) -> str:
        settings = self.settings
        masked = os.environ.get("CUDA_VISIBLE_DEVICES")
        asked = "all" if settings.gpus is None else settings.gpus
        names = ", ".join(f"cuda:{device.index} {device.name}" for device in self.devices) or "none"
        lines = [
            f"--gpus={asked} ({settings.origins['gpus']}), but this process sees {len(self.devices)} GPUs: {names}",
        ]
        if settings.simulate:
            lines[0] = (
                f"--simulate={settings.simulate} ({settings.origins['simulate']}): that device is not visible; {lines[0]}"
            )
        if masked is not None:
            lines.append(f"  CUDA_VISIBLE_DEVICES={masked!r} restricts what is visible: widen it if that is not meant")
        elif not self.devices:
            lines.append(f"  torch {torch_version()} finds no CUDA driver, or was built without CUDA")
        if self.devices:
            lines.append(f"  lower it: --gpus={len(self.devices)}")
        lines.append(
            f"  or simulate them: --gpus={4 if asked == 'all' else asked} --simulate, "
            "which proves the code and says nothing about this hardware"
        )
        return "\n".join(lines)

    def lack(self, count: int) -> str | None:
        """Why a test for `count` devices (0: for all there are) cannot run here, None if it can."""
        have = self.settings.gpus or 0
        if not have:
            return "needs GPUs: run with --gpus=N, or with --gpus=N --simulate where there are none"
        if count > have:
            return f"needs {count} GPUs, --gpus={have}"
        return None

    def count_example(self) -> None:
        """The current test has completed an example, or its one plain run."""
        self.examples += 1
        self.on_example()

    def begin_test(self, name: str) -> None:
        """Start the account of a test, and see that no rank died since the last one."""
        self.examples = 0
        if self._pool is not None:
            self._note_deaths()
            self._pool.begin_test()
        self._last = name

    def end_test(self, failed: bool) -> None:
        """Leave fresh ranks for the next test.

        Raises:
            RankDied: a rank ended after it had done its part of this one.
        """
        if self._pool is not None:
            for line in self._pool.end_test(failed):
                self.remarks.append(f"{self._last} left behind {line}; its ranks were replaced")

    def finish(self) -> None:
        """Look at the ranks for the last time, and end them."""
        self._note_deaths()
        self.close()

    def _note_deaths(self) -> None:
        if self._pool is not None:
            self.deaths += [f"{line} (the last test was {self._last})" for line in self._pool.died_idle()]

    def output(self) -> list[tuple[str, str, str]]:
        """What the ranks of this test wrote: (process, stream, text)."""
        return [] if self._pool is None else self._pool.output()

    def close(self) -> None:
        """End all processes of the run."""
        if self._pool is not None:
            self._pool.close()

    def header(self) -> str:
        """The line at the top of a run."""
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
        parts.append(f"torch {torch_version()}")
        sizes = "1" if settings.gpus == 1 else f"1 to {settings.gpus or 'all'}"
        parts.append(f"world sizes {sizes}, rank timeout {settings.rank_timeout:g} s")
        return "; ".join(parts)


def version() -> str:
    """Version of this package."""
    return _version("mgpu-check")


def torch_version() -> str:
    """Version of torch, without importing it."""
    return _version("torch")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"
