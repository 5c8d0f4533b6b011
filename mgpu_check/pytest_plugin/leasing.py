"""Lease the devices of the tests of this run, and tell ranks which they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mgpu_check.devices.inventory import Device
from mgpu_check.devices.placement import Slot
from mgpu_check.devices.visibility import Mask
from mgpu_check.processes.scratch import Scratch
from mgpu_check.settings import Settings

if TYPE_CHECKING:
    from mgpu_check.devices.leases import DeviceLeases, Lease

__all__ = ["Leasing", "RunDirectory", "keys_of", "tokens_of", "told"]

_CUDA = "CUDA_VISIBLE_DEVICES"

_WORTH_TELLING = 1.0  # seconds of waiting, all tests together
_A_WAIT = 0.1


class RunDirectory:
    """The directory where the workers of one run lease what exists in this run only: simulated devices.

    It lasts as long as any process of the run: the one that hands out the tests may be killed, and its workers go on.
    """

    def __init__(self) -> None:
        self._scratch: Scratch | None = None

    def make(self) -> Path:
        """Make the leases of a run, in the process that hands out the tests."""
        if self._scratch is None:
            self._scratch = Scratch.new("leases")
        return self._scratch.path

    def join(self, path: Path) -> Path:
        """Join the leases of a run, in a worker on the machine of the process that has made them."""
        self._scratch = Scratch(path)
        return path

    def of(self, run: str) -> Path:
        """Return the leases of a worker on another machine, for which the run has made none."""
        self._scratch = Scratch.named("leases", f"{os.getuid()}-{run}")
        return self._scratch.path

    def leave(self) -> None:
        """Remove it, if no other process of the run is left. May be called again, when more have ended."""
        if self._scratch is not None and self._scratch.leave():
            self._scratch = None


class Leasing:
    """The devices of one test after the other.

    Real devices are leased from the whole machine. Simulated ones are leased where several processes of one run share a
    simulated node, from each other. The device that backs simulated ones is not leased: they prove code, for which it
    does not matter who else computes there, and all tests, of all runs, would have to wait for each other.

    Args:
        devices: the real ones, in the order of their indices.
        directory: where the processes of this run lease simulated devices from each other; None if there is only one.
        launched: a launcher has given each rank its device, which nobody else is given.
        waits: gets the seconds that each test waited that had to.
        on_wait: told of a long wait.

    Attributes:
        indices: of the devices of the current test, or of the last one.
        active: there is a test now.
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
        self.indices: tuple[int, ...] = tuple(range(settings.gpus or 0))
        self.active = False
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
        """See that leases are possible.

        Raises:
            LeaseError: they are not.
        """
        if self._leases is not None:
            self._leases.check()

    def begin(self, count: int, purpose: str) -> tuple[Slot, ...] | None:
        """Lease `count` devices (0: all), as long as that may take.

        Returns:
            Where its ranks can run; None for everywhere.
        """
        if self._whole:
            self.active = True
            return None
        if self._leases is None:
            self.indices = self._all[: count or len(self._all)]
        else:
            from mgpu_check.devices.leases import LeaseError  # it is loaded by now

            try:
                self._lease = self._leases.take(count or len(self._all), purpose)
            except LeaseError as error:
                pytest.fail(str(error), pytrace=False)
            self.indices = self._lease.indices
            if self._lease.waited > _A_WAIT:
                self._waits.append(self._lease.waited)
        self.active = True
        # Simulated devices are made in each rank anew: with the same slots, warm ranks serve, whichever were leased.
        return tuple(Slot(0, index) for index in (self.indices if self._real else range(len(self.indices))))

    def end(self) -> None:
        """Give the devices back."""
        self.active = False
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.give_back()

    def mask(self, slots: Sequence[Slot]) -> Mask:
        """Return the variables that make a process see these devices only."""
        if self._whole or not self._tokens:
            return Mask()
        value = ",".join(self._tokens[slot.index] for slot in slots)
        own = [self._devices[slot.index] for slot in slots]
        # The other variable with it, so that they do not contradict each other, whichever comes first.
        variables = {_CUDA, *(device.mask for device in own)}
        return Mask(dict.fromkeys(sorted(variables), value), tuple(device.uuid for device in own))


def told(waits: Sequence[float]) -> list[str]:
    """Describe the time that tests have waited for devices, for the end of the run."""
    if sum(waits) < _WORTH_TELLING:
        return []
    tests = "1 test" if len(waits) == 1 else f"{len(waits)} tests"
    return [f"{tests} waited {sum(waits):.1f} s, all together, for devices that others had"]


def tokens_of(environment: Mapping[str, str], count: int, variable: str = _CUDA) -> list[str]:
    """Return what stands for each of the `count` visible devices in the variable that masks them: its entry there, or
    its index.

    Entries of the outer value only, so nothing becomes visible that was not. ROCm honours CUDA's variable, too, where its
    own is not set.
    """
    outer = environment.get(variable, environment.get(_CUDA))
    if outer is None:
        return [str(index) for index in range(count)]
    return [entry.strip() for entry in outer.split(",")][:count]


def keys_of(devices: Sequence[Device]) -> list[str]:
    """Return the UUID of each device, which tells it from all others of the machine, whatever is visible to whom."""
    keys: list[str] = []
    for device in devices:
        key = device.uuid.lower().removeprefix("gpu-") or f"index-{device.index}"
        keys.append(f"{key}-{device.index}" if key in keys else key)
    return keys
