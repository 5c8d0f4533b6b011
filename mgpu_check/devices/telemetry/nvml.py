"""Read telemetry of real GPUs from NVIDIA's management library, through its binding `pynvml`.

Only the library's error codes distinguish a GPU that lacks a feature from a GPU that is broken. UUIDs identify the GPUs
of a run, so CUDA_VISIBLE_DEVICES and the order of devices do not matter. A MIG device reports the telemetry of its GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgpu_check.devices.telemetry.fields import Value, peer_of
from mgpu_check.devices.telemetry.nvml_queries import QUERIES, known, pair_query
from mgpu_check.devices.telemetry.source import GpuLost, NoTelemetry, QueryError, Unsupported, XidEvent

_UNSUPPORTED = {
    3: "not supported",
    4: "not permitted",
    13: "not supported by this driver",
    21: "no data",
    22: "not supported on a vGPU",
    25: "not supported by this driver",
    26: "not supported any more",
    27: "not ready",
}
"""Error codes of a value that is not available; they do not indicate a defect."""

_LOST = {15: "GPU is lost", 16: "GPU must be reset", 28: "GPU is not there any more"}
_TIMEOUT = 10


class NvmlSource:
    """See `source.Source`.

    Args:
        gpus: number in the run -> UUID, with or without "GPU-" or "MIG-" before it.

    Raises:
        Absent: the binding or the library is not installed, or the driver does not answer.
    """

    def __init__(self, gpus: Mapping[int, str]) -> None:
        try:
            import pynvml  # here, because only the process that queries the driver needs it
        except ImportError as error:
            raise NoTelemetry(f"nvidia-ml-py is not installed ({error}): install it") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            count = int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            raise NoTelemetry(
                f"NVIDIA's management library does not work ({error}): run nvidia-smi; GPUs of other makers have no "
                "telemetry"
            ) from None
        handles, trouble = self._handles(count)
        self._gpus: dict[int, Any] = {}
        self.unmatched: dict[int, str] = {}
        for number, uuid in gpus.items():
            handle = handles.get(_plain(uuid))
            if handle is not None:
                self._gpus[number] = handle
            else:
                known_ones = f"NVML knows no GPU with the UUID {uuid or '(unknown)'}"
                self.unmatched[number] = "; ".join([known_ones, *trouble])
        self._events: Any = None

    def query(self, gpu: int, field: str) -> Value:
        """Return the value of a field."""
        handle = self._gpus[gpu]
        peer = peer_of(field)
        if peer is None:
            value: Value = self._asked(lambda: QUERIES[field](self._nvml, handle))
            return value
        if peer not in self._gpus:
            raise Unsupported("the peer is not known")
        of_pair: Value = self._asked(lambda: pair_query(self._nvml, field, handle, self._gpus[peer]))
        return of_pair

    def events(self, seconds: float) -> Sequence[XidEvent]:
        """Wait for Xids."""
        nvml = self._nvml
        if self._events is None:
            self._events = self._asked(self._registered)
        try:
            data = nvml.nvmlEventSetWait_v2(self._events, int(seconds * 1000))
        except nvml.NVMLError as error:
            if error.value == _TIMEOUT:
                return []
            if error.value in _LOST:  # one GPU is lost, and its own thread reports that; others may still have events
                time.sleep(seconds)  # because the library returned at once
                return []
            raise QueryError(str(error), error.value) from None
        if not data.eventType & nvml.nvmlEventTypeXidCriticalError:
            return []
        where = _address(data.device)
        numbers = [number for number, handle in self._gpus.items() if _address(handle) == where]
        return [XidEvent(number, int(data.eventData)) for number in numbers]  # empty for a GPU outside the run

    def close(self) -> None:
        """Release the driver."""
        self._nvml.nvmlShutdown()

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Call the library, and translate its errors into those of `Source`."""
        try:
            return ask()
        except self._nvml.NVMLError as error:
            code = int(error.value)
            if code in _UNSUPPORTED:
                raise Unsupported(_UNSUPPORTED[code]) from None
            if code in _LOST:
                raise GpuLost(_LOST[code], code) from None
            raise QueryError(str(error), code) from None
        except AttributeError as error:
            raise Unsupported(f"not known to this version of nvidia-ml-py: {error}") from None
        except UnicodeDecodeError as error:
            raise QueryError(f"not readable: {error}") from None

    def _registered(self) -> Any:
        """Return an event set that receives the Xids of all GPUs that report them."""
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        registered = 0
        for handle in self._gpus.values():
            if known(nvml, 0, nvml.nvmlDeviceGetSupportedEventTypes, handle) & 8:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                registered += 1
        if not registered:
            raise Unsupported("no GPU reports Xids")
        return events

    def _handles(self, count: int) -> tuple[dict[str, Any], list[str]]:
        """Return the handles of GPUs by plain UUID, and the failures. A MIG device gets the handle of its GPU."""
        nvml = self._nvml
        found: dict[str, Any] = {}
        trouble = []
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                found[_plain(nvml.nvmlDeviceGetUUID(handle))] = handle
            except nvml.NVMLError as error:
                trouble.append(f"its GPU {index} does not answer: {error}")
                continue
            for uuid in self._mig_devices(handle):
                found[_plain(uuid)] = handle
        return found, trouble

    def _mig_devices(self, handle: Any) -> list[str]:
        """Return the UUIDs of the MIG devices of a GPU."""
        nvml = self._nvml
        found: list[str] = []
        with contextlib.suppress(nvml.NVMLError):  # the GPU has no MIG mode
            for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with contextlib.suppress(nvml.NVMLError):  # no device in this place
                    mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                    found.append(nvml.nvmlDeviceGetUUID(mig))
        return found


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
