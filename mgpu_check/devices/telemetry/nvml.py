"""Telemetry of real GPUs from NVIDIA's management library, through its binding `pynvml`, and Xids of the past from
the kernel log.

Only the library's error codes distinguish a GPU that lacks a feature from a GPU that is broken. UUIDs identify the
GPUs of a run, so CUDA_VISIBLE_DEVICES and the order of devices do not matter. A MIG device reports the telemetry
of its GPU.

Each field has one query, in the field's unit. The codes are written as numbers where the binding lacks the
constant, or has it wrong (``NVML_P2P_CAPS_INDEX_READ`` is a tuple).

The library reports only those Xids that come while it listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_check.devices.telemetry.fields import Value, peer_of
from mgpu_check.devices.telemetry.sources import GpuLost, NoTelemetry, QueryError, Unsupported, XidEvent

Query = Callable[[Any, Any], Value]

_NOT_SUPPORTED = 3
_NONE = (2, 3, 13, 25)
"""Error codes of a missing link, field or function: invalid argument, not supported, not found, another version."""

_VIRTUALIZATION = {0: "none", 1: "passthrough", 2: "vGPU", 3: "host of vGPUs", 4: "host of vSGA"}
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_RECOVERY_WORDS = (
    *("none", "reset the GPU", "reboot the node", "drain peer-to-peer", "drain and reset"),
    *("recover the IMEX domain", "reset the bus", "reboot the system"),
)
_RECOVERY = dict(enumerate(_RECOVERY_WORDS))
_FABRIC = {1: "not started", 2: "in progress", 3: "completed"}
_TOPOLOGY = {0: "board", 10: "one PCIe switch", 20: "PCIe switches", 30: "host bridge", 40: "NUMA node", 50: "system"}
_P2P_CAPABILITIES = {0: "read", 1: "write", 2: "nvlink", 3: "atomics"}
_NO_P2P = (
    *("", "chipset not supported", "GPU not supported", "topology not supported", "disabled by a registry key"),
    *("not supported", "unknown"),
)
_THROTTLE = (
    *("idle", "application clocks", "power cap", "hardware slowdown", "sync boost", "thermal (software)"),
    *("thermal (hardware)", "power brake", "display clocks", "board limit", "reliability"),
)
"""The reasons for low clocks, from bit 0 on."""
_TYPES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def known(nvml: Any, otherwise: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `ask`, or `otherwise` if the library reports that the queried item does not exist.
    Raises `NVMLError`: any other error."""
    try:
        return ask(*arguments)
    except nvml.NVMLError as error:
        if error.value in _NONE:
            return otherwise
        raise


def _fields(nvml: Any, handle: Any, ids: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the values of fields by (id, scope); None for a missing field."""
    results: list[Any] = []
    for value in nvml.nvmlDeviceGetFieldValues(handle, list(ids)):
        if value.nvmlReturn == 0:
            results.append(getattr(value.value, _TYPES[value.valueType]))
        elif value.nvmlReturn in _NONE:
            results.append(None)
        else:
            raise nvml.NVMLError(value.nvmlReturn)
    return results


def _field(name: str) -> Query:
    def query(nvml: Any, handle: Any) -> Value:
        (value,) = _fields(nvml, handle, [(getattr(nvml, name), 0)])
        if value is None:
            raise nvml.NVMLError(_NOT_SUPPORTED)
        return value

    return query


def _call(name: str, *arguments: Any, scale: float | None = None) -> Query:
    """Return a query that calls a function of the library and divides the result by `scale`."""
    divide = (lambda value: value) if scale is None else (lambda value: value / scale)
    return lambda nvml, handle: divide(getattr(nvml, name)(handle, *arguments))


def _named(query: Query, labels: dict[int, str]) -> Query:
    def named(nvml: Any, handle: Any) -> Value:
        value = query(nvml, handle)
        assert isinstance(value, int)
        return labels.get(value, str(value))

    return named


def _element(name: str, index: int, convert: Callable[[int], Value]) -> Query:
    """Return a query that picks element `index` of the result of a function."""
    return lambda nvml, handle: convert(getattr(nvml, name)(handle)[index])


_ON = {0: "off", 1: "on"}


def _cuda(nvml: Any, handle: Any) -> Value:
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def _first(*queries: Query) -> Query:
    """Return a query that takes the first answer. List new functions first, then those of older drivers."""

    def query(nvml: Any, handle: Any) -> Value:
        for candidate in queries[:-1]:
            answer = known(nvml, None, candidate, nvml, handle)
            if answer is not None:
                return answer
        return queries[-1](nvml, handle)

    return query


def _throttle(name: str) -> Query:
    def query(nvml: Any, handle: Any) -> Value:
        mask = int(getattr(nvml, name)(handle))
        reasons = [text for bit, text in enumerate(_THROTTLE) if mask >> bit & 1]
        unnamed = mask >> len(_THROTTLE) << len(_THROTTLE)
        return ", ".join(reasons + ([hex(unnamed)] if unnamed else []))

    return query


def _links(nvml: Any, handle: Any) -> dict[int, bool]:
    """Return the NVLinks of a GPU, and whether each is active. Raises `NVMLError`: the GPU has no NVLinks."""
    states = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = known(nvml, None, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is not None:
            states[link] = bool(state)
    if not states:
        raise nvml.NVMLError(_NOT_SUPPORTED)
    return states


def _active(nvml: Any, handle: Any) -> list[int]:
    return [link for link, active in _links(nvml, handle).items() if active]


def _nvlinks(nvml: Any, handle: Any) -> Value:
    return len(_active(nvml, handle))


def _nvlink_speed(nvml: Any, handle: Any) -> Value:
    speeds = _fields(nvml, handle, [(nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link) for link in _active(nvml, handle)])
    if not speeds or None in speeds:
        raise nvml.NVMLError(_NOT_SUPPORTED)
    return int(min(speeds))


def _over_links(*field_names: str, counter: Sequence[int] = ()) -> Query:
    """Return a query that adds up fields over all NVLinks, or, with an older driver, counters of each link."""

    def query(nvml: Any, handle: Any) -> Value:
        links = list(_links(nvml, handle))
        ids = [getattr(nvml, name) for name in field_names]
        values = _fields(nvml, handle, [(field_id, link) for field_id in ids for link in links])
        if all(value is None for value in values) and counter:
            count, pairs = nvml.nvmlDeviceGetNvLinkErrorCounter, itertools.product(counter, links)
            values = [known(nvml, None, count, handle, link, error_type) for error_type, link in pairs]
        counted = [value for value in values if value is not None]
        if not counted:
            raise nvml.NVMLError(_NOT_SUPPORTED)
        return int(sum(counted))

    return query


def _sram_threshold(nvml: Any, handle: Any) -> Value:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return bool(status.bThresholdExceeded)


def _fabric(nvml: Any, handle: Any) -> Value:
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    if info.state not in _FABRIC:
        raise nvml.NVMLError(_NOT_SUPPORTED)
    failed = info.state == 3 and info.status
    return f"completed with error {info.status}" if failed else _FABRIC[info.state]


def _pci(nvml: Any, handle: Any) -> Value:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    return bus.decode() if isinstance(bus, bytes) else str(bus)


def _histogram(attribute: str) -> Query:
    """Return a query for the number of banks of memory with this many spare rows: max, high, partial, low, none."""
    return lambda nvml, handle: int(getattr(nvml.nvmlDeviceGetRowRemapperHistogram(handle), attribute))


QUERIES: dict[str, Query] = {
    "uuid": _call("nvmlDeviceGetUUID"),
    "serial": _call("nvmlDeviceGetSerial"),
    "pci": _pci,
    "name": _call("nvmlDeviceGetName"),
    "part_number": _call("nvmlDeviceGetBoardPartNumber"),
    "memory": lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    "driver": lambda nvml, handle: str(nvml.nvmlSystemGetDriverVersion()),
    "cuda": _cuda,
    "vbios": _call("nvmlDeviceGetVbiosVersion"),
    "inforom": _call("nvmlDeviceGetInforomImageVersion"),
    "ecc": _element("nvmlDeviceGetEccMode", 0, _ON.__getitem__),
    "mig": _element("nvmlDeviceGetMigMode", 0, _ON.__getitem__),
    "virtualization": _named(_call("nvmlDeviceGetVirtualizationMode"), _VIRTUALIZATION),
    "compute_mode": _named(_call("nvmlDeviceGetComputeMode"), _COMPUTE_MODES),
    "persistence": _named(_call("nvmlDeviceGetPersistenceMode"), _ON),
    "power_limit": _first(
        _call("nvmlDeviceGetEnforcedPowerLimit", scale=1000), _call("nvmlDeviceGetPowerManagementLimit", scale=1000)
    ),
    "sm_clock_max": _call("nvmlDeviceGetMaxClockInfo", 1),
    "memory_clock_max": _call("nvmlDeviceGetMaxClockInfo", 2),
    "pcie_generation_max": _call("nvmlDeviceGetMaxPcieLinkGeneration"),
    "pcie_width_max": _call("nvmlDeviceGetMaxPcieLinkWidth"),
    "nvlinks": _nvlinks,
    "nvlink_speed": _nvlink_speed,
    "multi_gpu_board": lambda nvml, handle: bool(nvml.nvmlDeviceGetMultiGpuBoard(handle)),
    "temperature_slowdown": _call("nvmlDeviceGetTemperatureThreshold", 1),
    "memory_temperature_max": _call("nvmlDeviceGetTemperatureThreshold", 2),
    "power_limit_default": _call("nvmlDeviceGetPowerManagementDefaultLimit", scale=1000),
    "banks_without_spares": _histogram("none"),
    "banks_low_on_spares": _histogram("low"),
    "nvlinks_down": lambda nvml, handle: ", ".join(str(n) for n, active in _links(nvml, handle).items() if not active),
    "ecc_pending": _element("nvmlDeviceGetEccMode", 1, _ON.__getitem__),
    "remap_pending": _element("nvmlDeviceGetRemappedRows", 2, bool),
    "remap_failed": _element("nvmlDeviceGetRemappedRows", 3, bool),
    "retired_pending": lambda nvml, handle: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)),
    "repair_pending": lambda nvml, handle: any(nvml.nvmlDeviceGetRepairStatus(handle)),
    "sram_threshold": _sram_threshold,
    "unrepairable_memory": lambda nvml, handle: bool(nvml.nvmlDeviceGetUnrepairableMemoryFlag_v1(handle)),
    "recovery_action": _named(_field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"), _RECOVERY),
    "fabric": _fabric,
    "temperature": _call("nvmlDeviceGetTemperature", 0),
    "memory_temperature": _field("NVML_FI_DEV_MEMORY_TEMP"),
    "temperature_margin": _call("nvmlDeviceGetMarginTemperature"),
    "nvlinks_up": _nvlinks,
    "power": _call("nvmlDeviceGetPowerUsage", scale=1000),
    "utilization": lambda nvml, handle: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
    "sm_clock": _call("nvmlDeviceGetClockInfo", 1),
    "memory_clock": _call("nvmlDeviceGetClockInfo", 2),
    "throttle": _first(
        _throttle("nvmlDeviceGetCurrentClocksEventReasons"), _throttle("nvmlDeviceGetCurrentClocksThrottleReasons")
    ),
    "pcie_generation": _call("nvmlDeviceGetCurrPcieLinkGeneration"),
    "pcie_width": _call("nvmlDeviceGetCurrPcieLinkWidth"),
    "ecc_corrected": _call("nvmlDeviceGetTotalEccErrors", 0, 0),
    "ecc_uncorrected": _call("nvmlDeviceGetTotalEccErrors", 1, 0),
    "ecc_corrected_ever": _call("nvmlDeviceGetTotalEccErrors", 0, 1),
    "ecc_uncorrected_ever": _call("nvmlDeviceGetTotalEccErrors", 1, 1),
    "remapped_corrected": _element("nvmlDeviceGetRemappedRows", 0, int),
    "remapped_uncorrected": _element("nvmlDeviceGetRemappedRows", 1, int),
    "retired_pages": lambda nvml, handle: sum(len(nvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in (0, 1)),
    "pcie_replays": _call("nvmlDeviceGetPcieReplayCounter"),
    "pcie_nonfatal": _field("NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR"),
    "pcie_fatal": _field("NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR"),
    "nvlink_crc": _over_links("NVML_FI_DEV_NVLINK_ERROR_DL_CRC", counter=(2, 3)),
    "nvlink_replay": _over_links("NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY", counter=(0,)),
    "nvlink_recovery": _first(
        _over_links("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS"),
        _over_links("NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY", counter=(1,)),
    ),
    "nvlink_packets": _over_links(
        "NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS",
        "NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS",
        "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
        "NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
        "NVML_FI_DEV_NVLINK_COUNT_XMIT_DISCARDS",
    ),
    "thermal_violation": _field("NVML_FI_DEV_PERF_POLICY_THERMAL"),
    "power_violation": _field("NVML_FI_DEV_PERF_POLICY_POWER"),
    "reliability_violation": _field("NVML_FI_DEV_PERF_POLICY_RELIABILITY"),
    "board_violation": _field("NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT"),
}
"""The query of each field, by name; `pair_query` covers the pair fields."""


def pair_query(nvml: Any, field: str, handle: Any, peer: Any) -> Value:
    assert peer_of(field) is not None
    if field.startswith("topology"):
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(handle, peer)
        return _TOPOLOGY.get(level, str(level))
    states = {index: nvml.nvmlDeviceGetP2PStatus(handle, peer, index) for index in _P2P_CAPABILITIES}
    able = [text for index, text in _P2P_CAPABILITIES.items() if states[index] == 0]
    return "+".join(able) if able else dict(enumerate(_NO_P2P)).get(states[0], str(states[0]))


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

    `gpus`: number in the run -> UUID, with or without "GPU-" or "MIG-" before it. Raises `NoTelemetry`: the binding or
    the library is not installed, or the driver does not answer.
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
            text = f"NVIDIA's management library does not work ({error}): run nvidia-smi"
            raise NoTelemetry(f"{text}; GPUs of other makers have no telemetry") from None
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
        handle = self._gpus[gpu]
        peer = peer_of(field)
        if peer is None:
            return self._asked(lambda: QUERIES[field](self._nvml, handle))
        if peer not in self._gpus:
            raise Unsupported("the peer is not known")
        return self._asked(lambda: pair_query(self._nvml, field, handle, self._gpus[peer]))

    def events(self, seconds: float) -> Sequence[XidEvent]:
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
        address = _address(data.device)
        numbers = [number for number, handle in self._gpus.items() if _address(handle) == address]
        return [XidEvent(number, int(data.eventData)) for number in numbers]  # empty for a GPU outside the run

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _asked(self, ask: Callable[[], Any]) -> Any:
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
        handles: dict[str, Any] = {}
        trouble = []
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                handles[_plain(nvml.nvmlDeviceGetUUID(handle))] = handle
            except nvml.NVMLError as error:
                trouble.append(f"its GPU {index} does not answer: {error}")
                continue
            with contextlib.suppress(nvml.NVMLError):  # the GPU has no MIG mode
                for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                    with contextlib.suppress(nvml.NVMLError):  # no device in this place
                        mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                        handles[_plain(nvml.nvmlDeviceGetUUID(mig))] = handle
        return handles, trouble


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


_KMSG = Path("/dev/kmsg")
_FILES = (Path("/var/log/kern.log"), Path("/var/log/messages"))
_MOST = 16 << 20  # bytes from the end of a log file: a few weeks of a server
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?\): (\d+)")


def past_xids() -> dict[tuple[str, int], int] | None:
    """Return how often each Xid is in the kernel log, by PCI bus id and number; None if no log can be read. The ring
    buffer of the kernel is preferred: it begins with the boot. Log files are older, and may be kept for root."""
    lines = _ring(_KMSG)
    if lines is None:
        lines = next((tail for path in _FILES if (tail := _end_of(path)) is not None), None)
    return None if lines is None else xids_in(lines)


def xids_in(lines: Iterable[str]) -> dict[tuple[str, int], int]:
    """Return how often each Xid is in these lines of a log, by PCI bus id as the driver's library writes it."""
    counts: Counter[tuple[str, int]] = Counter()
    for line in lines:
        if match := _XID.search(line):
            domain, bus, device, number = match.groups()
            counts[f"{int(domain, 16):08X}:{bus.upper()}:{device.upper()}.0", int(number)] += 1
    return dict(counts)


def _ring(path: Path) -> list[str] | None:
    """Return the records of the kernel's ring buffer without waiting for more."""
    lines = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # for root only, as by default on many systems
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while True:
            try:
                record = os.read(file.fileno(), 8192)
            except BrokenPipeError:  # the record was overwritten; the next read gets the oldest that is left
                continue
            except OSError:  # no more records
                break
            if not record:
                break
            lines += record.decode(errors="replace").splitlines()
    return lines


def _end_of(path: Path) -> list[str] | None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST))
        return file.read().decode(errors="replace").splitlines()
    return None
