"""The real binding of NVIDIA's management library, over a substitute for the library below it.

`MGPU_TEST_NVML` has, as JSON, what differs from a healthy machine: ``{"gpus": [{}, {...}], "init": code, "events":
[...]}``. Of a GPU, by name of a C function, with its arguments after the handle where they matter: a value, a list of
several, a mapping of the fields of a struct, ``{"error": code}`` or ``{"hang": true}``. Field values are under
"fields", by id, or id/scope. "driver" and "cuda" are of the machine. A call that hangs is in `hanging`, until `released`.
"""

from __future__ import annotations

import ctypes as _ctypes
import importlib.metadata as _metadata
import json as _json
import os as _os
import queue as _queue
import threading as _threading
import time as _time
from typing import Any

_source = _metadata.distribution("nvidia-ml-py").locate_file("pynvml.py")
exec(compile(_source.read_text(), str(_source), "exec"), globals())

hanging: _queue.Queue[str] = _queue.Queue()
released = _threading.Event()

_LINKS = 4
_HEALTHY: dict[str, Any] = {
    "nvmlDeviceGetSerial": "1650000000",
    "nvmlDeviceGetPciInfo_v3": {"busId": "00000000:1B:00.0"},
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetBoardPartNumber": "692-2G520-0200-000",
    "nvmlDeviceGetMemoryInfo": {"total": 85520809984},
    "nvmlDeviceGetVbiosVersion": "96.00.89.00.01",
    "nvmlDeviceGetInforomImageVersion": "G520.0200.00.05",
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetVirtualizationMode": 0,
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetEnforcedPowerLimit": 700000,
    "nvmlDeviceGetMaxClockInfo(1)": 1980,
    "nvmlDeviceGetMaxClockInfo(2)": 2619,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetRemappedRows": [0, 0, 0, 0],
    "nvmlDeviceGetRetiredPages": {"error": 3},
    "nvmlDeviceGetRetiredPagesPendingStatus": {"error": 3},
    "nvmlDeviceGetRepairStatus": {"bChannelRepairPending": 0, "bTpcRepairPending": 0},
    "nvmlDeviceGetSramEccErrorStatus": {"bThresholdExceeded": 0},
    "nvmlDeviceGetGpuFabricInfo": {"state": 3, "status": 0},
    "nvmlDeviceGetTemperature": 41,
    "nvmlDeviceGetTemperatureThreshold(1)": 89,
    "nvmlDeviceGetTemperatureThreshold(2)": 95,
    "nvmlDeviceGetMarginTemperature": {"marginTemperature": 48},
    "nvmlDeviceGetPowerManagementDefaultLimit": 700000,
    "nvmlDeviceGetMultiGpuBoard": 0,
    "nvmlDeviceGetRowRemapperHistogram": {"max": 640, "high": 0, "partial": 0, "low": 0, "none": 0},
    "nvmlDeviceGetPowerUsage": 123456,
    "nvmlDeviceGetUtilizationRates": {"gpu": 97},
    "nvmlDeviceGetClockInfo(1)": 1755,
    "nvmlDeviceGetClockInfo(2)": 2619,
    "nvmlDeviceGetCurrentClocksEventReasons": 0,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetPcieReplayCounter": 0,
    "nvmlDeviceGetSupportedEventTypes": 0x1F,
    "nvmlDeviceRegisterEvents": [],
    "nvmlDeviceGetMaxMigDeviceCount": 0,
    "nvmlDeviceGetTopologyCommonAncestor": 50,
    "nvmlDeviceGetP2PStatus": 0,
    "nvmlDeviceGetNvLinkErrorCounter": 0,
    **{f"nvmlDeviceGetNvLinkState({link})": 1 for link in range(_LINKS)},
}
_HEALTHY_FIELDS: dict[str, int] = {
    "82": 52,  # temperature of the memory
    "75": 0,  # time held down by heat
    "74": 0,  # by the power limit
    "77": 0,  # by the limit of the board
    "79": 0,  # by reliability
    "179": 0,
    "180": 0,  # PCIe
    "230": 0,  # recovery action
    **{f"{field}/{link}": 0 for field in (161, 162, 163) for link in range(_LINKS)},
    **{f"164/{link}": 26562 for link in range(_LINKS)},
}


class _Gpu(_ctypes.Structure):
    _fields_ = [("number", _ctypes.c_int)]


class _Library:
    """Has the functions that the binding looks for, as C would call them: the last arguments are where results go."""

    def __init__(self) -> None:
        machine = _json.loads(_os.environ.get("MGPU_TEST_NVML", "{}"))
        self._init = machine.get("init", 0)
        self._gpus = machine.get("gpus", [{}])
        self._structs = [_Gpu(number) for number in range(len(self._gpus))]
        self._events = list(machine.get("events", []))
        self._driver = machine.get("driver", "580.95.05")
        self._cuda = machine.get("cuda", 13000)

    def __getattr__(self, name: str) -> Any:
        if name in _special:
            return lambda *arguments: _special[name](self, *arguments)
        known = name.startswith("nvmlDevice") and any(
            key.partition("(")[0] == name for gpu in (_HEALTHY, *self._gpus) for key in gpu
        )
        if not known:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, *arguments)

    def handle(self, number: int) -> Any:
        return _ctypes.cast(_ctypes.pointer(self._structs[number]), c_nvmlDevice_t)  # type: ignore[name-defined]  # noqa: F821

    def mig(self, number: int, place: int) -> Any:
        self._structs.append(_Gpu(100 * (number + 1) + place))
        return _ctypes.cast(_ctypes.pointer(self._structs[-1]), c_nvmlDevice_t)  # type: ignore[name-defined]  # noqa: F821

    def number(self, handle: Any) -> int:
        return int(_ctypes.cast(handle, _ctypes.POINTER(_Gpu)).contents.number)

    def _call(self, name: str, handle: Any, *arguments: Any) -> int:
        gpu = self._gpus[self.number(handle)]
        given = [int(getattr(a, "value", a)) for a in arguments if isinstance(a, (int, _ctypes.c_uint, _ctypes.c_int))]
        key = f"{name}({','.join(map(str, given))})"
        answer = next((of[k] for of in (gpu, _HEALTHY) for k in (key, name) if k in of), {"error": 3})
        return _fill(answer, [a for a in arguments if hasattr(a, "_obj") or isinstance(a, _ctypes.Array)])


def _fill(answer: Any, places: list[Any]) -> int:
    if isinstance(answer, dict) and "error" in answer:
        return int(answer["error"])
    if isinstance(answer, dict) and "hang" in answer:
        hanging.put("")
        released.wait()
        return 999
    if isinstance(answer, str):
        places[0].value = answer.encode()
    elif isinstance(answer, dict):
        for field, value in answer.items():
            setattr(places[0]._obj, field, value.encode() if isinstance(value, str) else value)
    else:
        for place, value in zip(places, answer if isinstance(answer, list) else [answer], strict=False):
            place._obj.value = value
    return 0


def _count(library: _Library, place: Any) -> int:
    place._obj.value = len(library._gpus)
    return 0


def _by_index(library: _Library, index: Any, place: Any) -> int:
    answer = library._gpus[index.value].get("nvmlDeviceGetHandleByIndex", {})
    if "error" in answer:
        return int(answer["error"])
    place._obj.contents = library.handle(index.value).contents
    return 0


def _mig_device(library: _Library, handle: Any, place: Any, out: Any) -> int:
    number = library.number(handle)
    if place.value >= library._gpus[number].get("mig", 0):
        return 6
    out._obj.contents = library.mig(number, place.value).contents
    return 0


def _uuid(library: _Library, handle: Any, place: Any, length: Any) -> int:
    number = library.number(handle)
    if number >= 100:
        return _fill(f"MIG-0000000{number // 100 - 1}-BBB{number % 100}", [place])
    return _fill(library._gpus[number].get("nvmlDeviceGetUUID", f"GPU-0000000{number}-AAAA"), [place])


def _field_values(library: _Library, handle: Any, count: Any, place: Any) -> int:
    gpu = library._gpus[library.number(handle)]
    for value in place._obj:
        given = {**_HEALTHY_FIELDS, **gpu.get("fields", {})}
        answer = next(
            (given[k] for k in (f"{value.fieldId}/{value.scopeId}", str(value.fieldId)) if k in given), {"error": 3}
        )
        if isinstance(answer, dict):
            value.nvmlReturn = _fill(answer, [])
        else:
            value.nvmlReturn, value.valueType, value.value.ullVal = 0, 3, answer
    return 0


def _retired(library: _Library, handle: Any, cause: Any, count: Any, pages: Any) -> int:
    answer = library._gpus[library.number(handle)].get("nvmlDeviceGetRetiredPages", {"error": 3})
    if isinstance(answer, dict):
        return _fill(answer, [])
    count._obj.value = answer
    return 0


def _wait(library: _Library, events: Any, place: Any, milliseconds: Any) -> int:
    if not library._events:
        _time.sleep(min(milliseconds.value / 1000, 0.01))
        return 10
    event = library._events.pop(0)
    if "error" in event:
        return int(event["error"])
    place._obj.device = library.handle(event["gpu"])
    place._obj.eventType, place._obj.eventData = event.get("type", 8), event.get("xid", 0)
    return 0


_special: dict[str, Any] = {
    "nvmlInitWithFlags": lambda library, flags: _fill(library._init or [], []),
    "nvmlShutdown": lambda library: 0,
    "nvmlErrorString": lambda library, code: f"error {code}".encode(),
    "nvmlDeviceGetCount_v2": _count,
    "nvmlDeviceGetHandleByIndex_v2": _by_index,
    "nvmlDeviceGetUUID": _uuid,
    "nvmlDeviceGetMigDeviceHandleByIndex": _mig_device,
    "nvmlSystemGetDriverVersion": lambda library, place, length: _fill(library._driver, [place]),
    "nvmlSystemGetCudaDriverVersion_v2": lambda library, place: _fill(library._cuda, [place]),
    "nvmlDeviceGetFieldValues": _field_values,
    "nvmlDeviceGetRetiredPages": _retired,
    "nvmlEventSetCreate": lambda library, place: 0,
    "nvmlEventSetWait_v2": _wait,
}

nvmlLib = _Library()
