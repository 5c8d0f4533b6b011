"""The real devices of a rank: which it sees, whether they are idle, and whether they can still be used.

Nothing but `take` makes a context: a device that the code under test has not touched is left alone.
"""

from __future__ import annotations

import abc
import concurrent.futures
import gc
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "DeviceBusy",
    "DeviceRefused",
    "Devices",
    "MaskIgnored",
    "check_visible",
    "devices_behind",
    "has_nccl",
    "take",
]

_GRACE = 0.005
"""Seconds that devices get to finish what a call has queued, before the pytest process is asked to see to it."""

_LONGER_GRACE = 0.25
"""The same after a failure, where a device that is not idle costs the world."""


class DeviceRefused(RuntimeError):
    """A device cannot be used."""


class DeviceBusy(DeviceRefused):
    """Another process uses the device alone, or most of its memory: of the device itself this says nothing."""


_BUSY = (2, 46)
"""Errors of the CUDA runtime: cudaErrorMemoryAllocation, cudaErrorDevicesUnavailable."""


class MaskIgnored(RuntimeError):
    """The process sees other devices than it was given."""


def check_visible(uuids: Sequence[str]) -> None:
    """See that this process has exactly the devices that were leased for it.

    Raises:
        MaskIgnored: the driver does not honour the variable that masks devices, or the devices have changed.
    """
    if not uuids:
        return
    seen = [str(getattr(torch.cuda.get_device_properties(i), "uuid", "")) for i in range(torch.cuda.device_count())]
    if seen != list(uuids):
        raise MaskIgnored(
            f"this process was given the GPUs {', '.join(uuids)}, and sees {', '.join(seen) or 'none'}: the driver does "
            "not honour the variable that masks devices, or the GPUs of the machine have changed since the run began"
        )


def take(device: int) -> None:
    """Make `device` the current one, and its context.

    Raises:
        DeviceRefused: it cannot be used, as one that is broken.
        DeviceBusy: another process uses it in an exclusive mode, or has most of its memory.
    """
    properties = torch.cuda.get_device_properties(device)
    try:
        torch.cuda.set_device(device)
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        kind = DeviceBusy if getattr(error, "error_code", None) in _BUSY else DeviceRefused
        raise kind(f"cuda:{device} ({properties.name} {getattr(properties, 'uuid', '')}): {said}") from error


class Devices(abc.ABC):
    """The work that this process has queued on devices, and whether they can still be used."""

    @abc.abstractmethod
    def idle(self, patience: float = _GRACE) -> bool:
        """Return whether all that was queued is done; wait for `patience` seconds at most.

        Raises:
            RuntimeError: an error of a kernel has come up.
        """

    def wait(self) -> None:
        """Wait as long as it takes until all that was queued is done; raise as `idle`."""
        self.idle(threading.TIMEOUT_MAX)

    def usable(self) -> bool:
        """Return whether devices are idle, and have no error that sticks to this process."""
        try:
            return self.idle(_LONGER_GRACE)
        except Exception:
            return False

    @abc.abstractmethod
    def restore(self) -> None:
        """Put back what a call may have changed of CUDA's own settings."""

    @abc.abstractmethod
    def give_back(self) -> None:
        """Free the memory that nobody needs any more."""


class _WithDriver(Devices):
    """Waits in a thread of its own, because CUDA has no way to ask whether a device is idle, and to wait may take for ever."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "mgpu-check-synchronize")
        self._thread.submit(lambda: None).result()  # it is there from now on, and no leftover of a test
        self._pending: concurrent.futures.Future[None] | None = None

    def idle(self, patience: float = _GRACE) -> bool:
        if not self.used():
            return True
        if self._pending is None:
            self._pending = self._thread.submit(self.synchronize)
        try:
            self._pending.result(patience)
        except concurrent.futures.TimeoutError:
            return False
        except BaseException as error:
            self._pending = None
            error.add_note(
                "It came up when the devices were waited for, after the call: the line that caused it may be any before "
                "(CUDA_LAUNCH_BLOCKING=1 has each one wait)."
            )
            raise error.with_traceback(None) from None
        self._pending = None
        return True

    @abc.abstractmethod
    def used(self) -> bool:
        """Return whether anything can be queued there."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for all that is queued, in a thread that has no device of its own yet."""


class RealDevices(_WithDriver):
    """All that this process sees."""

    def used(self) -> bool:
        return bool(torch.cuda.is_initialized())

    def synchronize(self) -> None:
        for device in _with_contexts():
            torch.cuda.synchronize(device)

    def restore(self) -> None:
        """Put back what a call may have changed of CUDA's own settings: streams, and what is said of synchronization."""
        if not torch.cuda.is_initialized():
            return
        if torch.cuda.get_sync_debug_mode():
            torch.cuda.set_sync_debug_mode("default")
        for device in range(torch.cuda.device_count()):
            if torch.cuda.current_stream(device).stream_id:  # that of the default stream is 0
                torch.cuda.set_stream(torch.cuda.default_stream(device))

    def give_back(self) -> None:
        """Free the memory that nobody needs any more: the device is leased to others next, who may need all of it."""
        if not torch.cuda.is_initialized():
            return
        if any(torch.cuda.memory_allocated(device) for device in _with_contexts()):
            gc.collect()  # tensors in cycles
        torch.cuda.empty_cache()
        for device in _with_contexts():
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def _with_contexts() -> list[int]:
    known = range(torch.cuda.device_count())
    return [i for i in known if torch._C._cuda_hasPrimaryContext(i)]  # type: ignore[attr-defined]  # not in the stubs


class BackingDevice(_WithDriver):
    """The one that computes for a simulated node. To be made before the node is entered, which replaces CUDA's functions."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index
        self._cuda: dict[str, Any] = {
            name: getattr(torch._C, f"_cuda_{name}", None)  # a CPU build has none, and can have no such node either
            for name in ("hasPrimaryContext", "setDevice", "synchronize", "emptyCache")
        }

    def used(self) -> bool:
        return bool(self._cuda["hasPrimaryContext"](self._index))

    def synchronize(self) -> None:
        self._cuda["setDevice"](self._index)
        self._cuda["synchronize"]()

    def restore(self) -> None:
        pass

    def give_back(self) -> None:
        if self.used():
            self._cuda["emptyCache"]()


class SimulatedDevices(Devices):
    """Devices of a simulated node: their streams are busy where code has had them sleep, and beside them what computes
    for them.

    Streams and other settings of the code under test are put back by the node.
    """

    def __init__(self, backing: BackingDevice | None) -> None:
        from mgpu_check.simulated.streams import wait_until_idle  # here: real ranks have no use for the simulator

        self._streams_idle = wait_until_idle
        self._backing = backing

    def idle(self, patience: float = _GRACE) -> bool:
        return self._streams_idle(patience) and (self._backing is None or self._backing.idle(patience))

    def restore(self) -> None:
        pass

    def give_back(self) -> None:
        if self._backing is not None:
            self._backing.give_back()


def devices_behind(simulate: str | None) -> Devices:
    """Return the devices of a process whose node is simulated on the device `simulate`, or is real."""
    if simulate is None:
        return RealDevices()
    device = torch.device(simulate)
    return SimulatedDevices(None if device.type == "cpu" else BackingDevice(device.index))


def has_nccl() -> bool:
    """Return whether tensors on devices travel by NCCL in the default group, and not as CPU tensors do."""
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]  # not in the stubs
    except RuntimeError:
        return False  # there is none for devices
    return bool(backend.name() == "nccl")
