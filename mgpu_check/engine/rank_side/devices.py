"""The devices of a rank (which ones it sees, whether they are idle, and whether they can still be used), the store
for the rendezvous of a world's ranks, and the one device of gloo that the groups of a rank share.

Only `take` makes a context, so a device that the code under test has not touched stays untouched.
"""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import gc
import os
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.torch_hooks.patches import Patches

_CHOOSE_DEVICES = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
"""Variables that choose the devices of gloo for the next groups of a program."""

own_gloo_devices: list[int] = []
"""The process, once for each of its groups with a device of its own, which listens at a port."""


def open_store(address: str, size: int) -> Any:
    """Open the store at `address`: ``file:///path``, or ``tcp://host:port/prefix`` of a running store."""
    url = urllib.parse.urlsplit(address)
    if url.scheme == "file":
        return dist.FileStore(os.fsdecode(urllib.parse.unquote_to_bytes(url.path)), size)  # type: ignore[attr-defined]  # not in its __all__
    assert url.scheme == "tcp" and url.hostname is not None and url.port is not None, address
    stores: Any = dist  # the stores are not in its __all__
    store = stores.TCPStore(url.hostname, url.port, is_master=False, wait_for_workers=False)
    return stores.PrefixStore(url.path.strip("/"), store)


def share_gloo_device() -> None:
    """Make the gloo groups of this process share one device of gloo, unless a program chooses the devices itself.
    By default each group has a device of its own, whose thread wakes up 100 times a second as long as the group lives.
    A test whose cases build meshes has hundreds of groups at its end."""
    gloo: Any = getattr(torch._C._distributed_c10d, "ProcessGroupGloo", None)
    if not all(hasattr(gloo, name) for name in ("create_default_device", "_Options")):
        return
    # A forked process inherits the device, but not its thread.
    device = functools.cache(lambda process: gloo.create_default_device())

    def sharing(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def shared(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
            # torch 2.14 also passes `enable_reconfigure`, by name.
            named = {"timeout": args[0]} | kwargs if len(args) == 1 else kwargs
            supported = isinstance(named.get("timeout"), timedelta) and {*named} <= {"timeout", "enable_reconfigure"}
            if len(args) > 1 or not supported or any(map(os.environ.get, _CHOOSE_DEVICES)):
                own_gloo_devices.append(os.getpid())
                init(self, store, rank, size, *args, **kwargs)
                return
            options = gloo._Options()
            options._devices, options._timeout = [device(os.getpid())], named["timeout"]
            if "enable_reconfigure" in named:
                options.enable_reconfigure = named["enable_reconfigure"]
            init(self, store, rank, size, options)

        return shared

    Patches().wrap(gloo, "__init__", sharing)


_GRACE = 0.005
"""Seconds for devices to finish the work of a call before the rank answers. Later the pytest process sends `SETTLE`."""

_LONGER_GRACE = 0.25
"""Seconds after a failed call. They are more, because the world must be replaced if a device is still busy then."""


class DeviceRefused(RuntimeError):
    """A device cannot be used."""


class DeviceBusy(DeviceRefused):
    """Another process holds the device exclusively, or has most of its memory. The device itself may be healthy."""


_BUSY = (2, 46)  # errors of the CUDA runtime: cudaErrorMemoryAllocation, cudaErrorDevicesUnavailable


class MaskIgnored(RuntimeError):
    """The process sees other devices than those leased for it."""


def check_visible(uuids: Sequence[str]) -> None:
    """Check that this process sees exactly the devices that were leased for it."""
    if not uuids:
        return
    visible = [str(getattr(torch.cuda.get_device_properties(i), "uuid", "")) for i in range(torch.cuda.device_count())]
    if visible != list(uuids):
        raise MaskIgnored(
            f"this process was given the GPUs {', '.join(uuids)}, and sees {', '.join(visible) or 'none'}: the driver "
            "does not honour the variable that masks devices, or the GPUs of the machine have changed since the run "
            "began"
        )


def take(device: int) -> None:
    """Make `device` the current device, and create its context."""
    properties = torch.cuda.get_device_properties(device)
    try:
        torch.cuda.set_device(device)
    except Exception as error:
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        error_class = DeviceBusy if getattr(error, "error_code", None) in _BUSY else DeviceRefused
        raise error_class(f"cuda:{device} ({properties.name} {getattr(properties, 'uuid', '')}): {message}") from error


class Devices(abc.ABC):
    """The work that this process has queued on devices, and whether they can still be used."""

    @abc.abstractmethod
    def idle(self, patience: float = _GRACE) -> bool:
        """Wait up to `patience` seconds for the queued work, and return whether it is done."""

    def wait(self) -> None:
        """Wait without a limit until the queued work is done; raises as `idle` does."""
        self.idle(threading.TIMEOUT_MAX)

    def usable(self) -> bool:
        """Return whether the devices are idle and have no sticky error in this process."""
        try:
            return self.idle(_LONGER_GRACE)
        except Exception:
            return False

    def restore(self) -> None:  # noqa: B027  # a device that only computes for others has none
        """Restore the CUDA settings that a call may have changed."""

    @abc.abstractmethod
    def give_back(self) -> None:
        """Free cached memory that is not in use."""


class _WithDriver(Devices):
    """Waits in its own thread, because CUDA cannot report whether a device is idle, and a wait may never end."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "mgpu-check-synchronize")
        self._thread.submit(lambda: None).result()  # start the thread now, so that it does not count as left by a test
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
                "The error appeared when the devices were synchronized after the call, so any earlier line may have "
                "caused it (CUDA_LAUNCH_BLOCKING=1 makes each operation wait)."
            )
            raise error.with_traceback(None) from None
        self._pending = None
        return True

    @abc.abstractmethod
    def used(self) -> bool:
        """Return whether a device has a context, without which it cannot have work."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for all queued work. Runs in a thread without a current device."""


class RealDevices(_WithDriver):
    """All real devices that this process sees."""

    def used(self) -> bool:
        return bool(torch.cuda.is_initialized())

    def synchronize(self) -> None:
        for device in _with_contexts():
            torch.cuda.synchronize(device)

    def restore(self) -> None:
        if not torch.cuda.is_initialized():
            return
        if torch.cuda.get_sync_debug_mode():
            torch.cuda.set_sync_debug_mode("default")
        for device in range(torch.cuda.device_count()):
            if torch.cuda.current_stream(device).stream_id:  # the id of the default stream is 0
                torch.cuda.set_stream(torch.cuda.default_stream(device))

    def give_back(self) -> None:
        """Free unused memory, because the next user of the device may need all of it."""
        if not torch.cuda.is_initialized():
            return
        if any(torch.cuda.memory_allocated(device) for device in _with_contexts()):
            gc.collect()  # tensors in cycles
        torch.cuda.empty_cache()
        for device in _with_contexts():
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def _with_contexts() -> list[int]:
    devices = range(torch.cuda.device_count())
    return [i for i in devices if torch._C._cuda_hasPrimaryContext(i)]  # type: ignore[attr-defined]  # not in the stubs


class BackingDevice(_WithDriver):
    """The device that computes for a simulated node.
    Create it before the node is entered, which replaces CUDA functions."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index
        self._cuda: dict[str, Any] = {
            name: getattr(torch._C, f"_cuda_{name}", None)  # missing in a CPU build, which never backs a node with CUDA
            for name in ("hasPrimaryContext", "setDevice", "synchronize", "emptyCache")
        }

    def used(self) -> bool:
        return bool(self._cuda["hasPrimaryContext"](self._index))

    def synchronize(self) -> None:
        self._cuda["setDevice"](self._index)
        self._cuda["synchronize"]()

    def give_back(self) -> None:
        if self.used():
            self._cuda["emptyCache"]()


class SimulatedDevices(Devices):
    """The devices of a simulated node, and the device that computes for them, if any.
    A simulated stream is busy while it sleeps. Streams of an earlier call are replaced."""

    def __init__(self, backing: BackingDevice | None) -> None:
        # Imported here, because real ranks do not need the simulator.
        from mgpu_check.simulated.cuda.graphs import abandon
        from mgpu_check.simulated.cuda.streams import reset_streams, wait_until_idle

        self._streams_idle, self._reset_streams, self._abandon_captures = wait_until_idle, reset_streams, abandon
        self._backing = backing

    def idle(self, patience: float = _GRACE) -> bool:
        return self._streams_idle(patience) and (self._backing is None or self._backing.idle(patience))

    def restore(self) -> None:
        self._abandon_captures()
        self._reset_streams()

    def give_back(self) -> None:
        if self._backing is not None:
            self._backing.give_back()


def devices_behind(simulate: str | None) -> Devices:
    """Return the devices of a process: simulated on the device `simulate`, or real if it is None."""
    if simulate is None:
        return RealDevices()
    device = torch.device(simulate)
    return SimulatedDevices(None if device.type == "cpu" else BackingDevice(device.index))


def has_nccl() -> bool:
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]  # not in the stubs
    except RuntimeError:
        return False  # the group has no backend for devices
    return bool(backend.name() == "nccl")
