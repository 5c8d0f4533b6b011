"""The devices of each test: lease them, restrict its ranks to them, and explain why there are too few."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mgpu_check.devices.inventory import Device, Inventory, Mask, Slot
from mgpu_check.processes.scratch import Scratch
from mgpu_check.settings import Settings

if TYPE_CHECKING:
    from mgpu_check.devices.leases import DeviceLeases, Lease


class TooFewDevices(Exception):
    """The machine has fewer devices than the run asks for, or the launched ranks do not match its options."""


def too_few(settings: Settings, inventory: Inventory, environment: Mapping[str, str], torch: str) -> str:
    """Return a line that names the requested devices, the visible devices, and the remedy."""
    devices = inventory.devices
    masked = environment.get(inventory.mask)
    requested = "all" if settings.gpus is None else settings.gpus
    listed = ", ".join(f"cuda:{device.index} {device.name}" for device in devices) or "none"
    clauses = [f"--gpus={requested} ({settings.origins['gpus']}), but this process sees {len(devices)} GPUs: {listed}"]
    if settings.simulate:
        origin = settings.origins["simulate"]
        clauses.insert(0, f"--simulate={settings.simulate} ({origin}): that device is not visible")
    if inventory.trouble:
        clauses.append(": ".join(line.strip() for line in inventory.trouble.splitlines()))
    elif masked is not None:
        clauses.append(f"{inventory.mask}={masked!r} restricts what is visible: change it if that is not intended")
    elif not devices:
        clauses.append(
            f"torch {torch} finds no CUDA driver, or was built without CUDA: compare nvidia-smi with mgpu-check devices"
        )
    if devices:
        clauses.append(f"lower it: --gpus={len(devices)}")
    simulated = 4 if requested == "all" else requested
    clauses.append(
        f"or simulate them: --gpus={simulated} --simulate, which tests the code and says nothing about this hardware"
    )
    return "; ".join(clauses)


def lack(settings: Settings, count: int, host: int | None = None) -> str | None:
    """Return why a test for `count` devices (0: all) cannot run here, or on `host`; None if it can."""
    have = settings.gpus or 0
    if host is not None and settings.per_host and count > settings.per_host[host]:
        return f"needs {count} GPUs in one process, and host {host} has {settings.per_host[host]}"
    if not have:
        return "needs GPUs: run with --gpus=N, or with --gpus=N --simulate on a machine without GPUs"
    if count > have:
        return f"needs {count} GPUs, --gpus={have}"
    return None


_CUDA = "CUDA_VISIBLE_DEVICES"

_WORTH_TELLING = 1.0  # seconds of waiting in total: less does not explain a slow run
_A_WAIT = 0.1  # seconds: a shorter time is that of taking the locks


class RunDirectory:
    """The directory where the workers of one run lease its simulated devices.
    It exists as long as any process of the run: the xdist controller may be killed while its workers continue."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None

    def make(self) -> Path:
        """Create the directory, in the xdist controller."""
        if self._scratch is None:
            self._scratch = Scratch.new("leases")
        return self._scratch.path

    def join(self, path: Path) -> Path:
        """Use the directory of the controller, in a worker on the same machine."""
        self._scratch = Scratch(path)
        return path

    def of(self, run: str) -> Path:
        """Create or join the directory of this run, in a worker on a machine other than the controller's."""
        self._scratch = Scratch.named("leases", f"{os.getuid()}-{run}")
        return self._scratch.path

    def leave(self) -> None:
        """Remove the directory if no other process of the run is left; otherwise a later call may."""
        if self._scratch is not None and self._scratch.leave():
            self._scratch = None


class Leasing:
    """The devices of the current test.

    `GpuSession` makes one on first use, when the devices are counted. It calls `begin` before each test, which may
    wait, and `end` after it.

    Real devices are leased among all processes of the machine. Simulated devices are leased among the workers of one
    run that share a simulated node. A real device that backs simulated ones is not leased: other processes on it do not
    affect the results, and leases would serialize the tests of all runs.

    Args:
        devices: the real devices, in the order of their indices.
        directory: where the processes of this run lease simulated devices; None if the run has one process.
        launched: whether a launcher has assigned a device to each rank, so that no lease is necessary.
        waits: receives the seconds that each delayed test has waited.
        on_wait: called with a line about each long wait.
    """

    def __init__(
        self,
        settings: Settings,
        devices: Sequence[Device] = (),
        directory: Path | None = None,
        *,
        launched: bool,
        waits: list[float],
        on_wait: Callable[[str], None],
    ) -> None:
        # devices of the current test, or of the last one
        self.indices: tuple[int, ...] = tuple(range(settings.gpus or 0))
        self.active = False  # whether a test is running
        self._waits = waits
        self._all = self.indices
        self._real = settings.simulate is None
        self._whole = launched
        self._devices = tuple(devices)
        self._tokens = tokens_of(os.environ, len(devices), devices[0].mask if devices else _CUDA)
        self._lease: Lease | None = None
        self._leases: DeviceLeases | None = None
        if (self._real or directory is not None) and not launched:
            from mgpu_check.devices.leases import DeviceLeases

            keys = keys_of(devices[: settings.gpus or 0]) if self._real else [str(index) for index in self._all]
            self._leases = DeviceLeases(keys, None if self._real else directory, on_wait=on_wait)

    def check(self) -> None:
        """Check that devices can be leased. Raises `LeaseError`: they cannot."""
        if self._leases is not None:
            self._leases.check()

    def begin(self, count: int, purpose: str) -> tuple[Slot, ...] | None:
        """Wait for a lease of `count` devices (0: all). Fail the test if there is none in time.
        Returns the slots where the test's ranks can run; None for all slots."""
        if self._whole:
            self.active = True
            return None
        if self._leases is None:
            self.indices = self._all[: count or len(self._all)]
        else:
            from mgpu_check.devices.leases import LeaseError  # loaded already, by `__init__`

            try:
                self._lease = self._leases.take(count or len(self._all), purpose)
            except LeaseError as error:
                pytest.fail(str(error), pytrace=False)
            self.indices = self._lease.indices
            if self._lease.waited > _A_WAIT:
                self._waits.append(self._lease.waited)
        self.active = True
        # Each rank creates its simulated device itself. Constant slots let warm ranks serve any lease.
        return tuple(Slot(0, index) for index in (self.indices if self._real else range(len(self.indices))))

    def end(self) -> None:
        self.active = False
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.give_back()

    def mask(self, slots: Sequence[Slot]) -> Mask:
        """Return the mask that makes only these devices visible to a process."""
        if self._whole or not self._tokens:
            return Mask()
        value = ",".join(self._tokens[slot.index] for slot in slots)
        own = [self._devices[slot.index] for slot in slots]
        # Set CUDA's and ROCm's variable to the same value, so that they cannot contradict each other.
        variables = {_CUDA, *(device.mask for device in own)}
        return Mask(dict.fromkeys(sorted(variables), value), tuple(device.uuid for device in own))


def described_waits(waits: Sequence[float]) -> list[str]:
    """Describe, for the end of the run, how long tests waited for devices.

    `waits`: seconds that each delayed test waited. Returns one line with the number of tests and their total time;
    empty if the total is below 1 s.
    """
    if sum(waits) < _WORTH_TELLING:
        return []
    tests = "1 test" if len(waits) == 1 else f"{len(waits)} tests"
    return [f"{tests} waited {sum(waits):.1f} s in total for devices that other tests had leased"]


def tokens_of(environment: Mapping[str, str], count: int, variable: str = _CUDA) -> list[str]:
    """Return the token of each of the `count` visible devices in the mask variable: its entry there, or its index.

    Only entries of the current value are returned, so no hidden device becomes visible. ROCm also honours CUDA's
    variable if its own is not set.
    """
    outer = environment.get(variable, environment.get(_CUDA))
    if outer is None:
        return [str(index) for index in range(count)]
    return [entry.strip() for entry in outer.split(",")][:count]


def keys_of(devices: Sequence[Device]) -> list[str]:
    """Return a lease key per device: its UUID, which does not depend on the visible devices of a process."""
    keys: list[str] = []
    for device in devices:
        key = device.uuid.lower().removeprefix("gpu-") or f"index-{device.index}"
        keys.append(f"{key}-{device.index}" if key in keys else key)
    return keys
