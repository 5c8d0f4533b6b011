"""The real binding, on an imitation of NVIDIA's management library: known values, unknown ones, and errors."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from mgpu_check.devices.telemetry.fields import FIELDS, Kind, asked
from mgpu_check.devices.telemetry.nvml import QUERIES, NvmlSource
from mgpu_check.devices.telemetry.sampler import TelemetrySampler
from mgpu_check.devices.telemetry.sources import GpuLost, NoTelemetry, QueryError, Unsupported, XidEvent

STANDIN = Path(__file__).parent / "nvml"
UUIDS = {0: "GPU-00000000-aaaa", 1: "00000001-aaaa"}  # torch returns them without "GPU-", in small letters

Machine = Callable[..., NvmlSource]


@pytest.fixture(scope="module")
def binding() -> Any:
    spec = importlib.util.spec_from_file_location("pynvml", STANDIN / "pynvml.py")
    found = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # it looks for itself
        patch.setitem(sys.modules, "pynvml", found)
        spec.loader.exec_module(found)
    return found


@pytest.fixture
def machine(binding: Any, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with GPUs that differ so from healthy ones, as a source sees it."""

    def machine(*gpus: dict[str, Any], uuids: dict[int, str] | None = None, **more: Any) -> NvmlSource:
        monkeypatch.setenv("MGPU_TEST_NVML", json.dumps({"gpus": gpus or [{}, {}], **more}))
        monkeypatch.setitem(sys.modules, "pynvml", binding)
        binding._nvmlGetFunctionPointer_cache.clear()
        binding.nvmlLib = binding._Library()
        return NvmlSource(uuids or {number: UUIDS[number] for number in range(len(gpus or [{}, {}]))})

    return machine


def read(source: NvmlSource, gpu: int = 0) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in asked(get_args(Kind), gpu, (0, 1)):
        try:
            values[field] = source.query(gpu, field)
        except Unsupported as error:
            values[field] = str(error)
    return values


def test_there_is_a_query_for_each_field() -> None:
    assert set(QUERIES) == {name for name, field in FIELDS.items() if field.kind != "pair"}


def test_a_healthy_gpu_is_read_in_its_units(machine: Machine) -> None:
    values = read(machine())
    counters = {name for name, field in FIELDS.items() if field.kind == "counter"}
    unsupported = {name for name, value in values.items() if value == "not supported"}
    # Ampere and later remap rows, and retire no pages; counters of packets came with Blackwell
    assert unsupported == {"retired_pages", "retired_pending", "nvlink_packets"}
    assert values["unrepairable_memory"] == "not supported by this driver"
    assert {values[name] for name in counters - unsupported} == {0}
    expected = {
        "uuid": "GPU-00000000-AAAA", "pci": "00000000:1B:00.0", "name": "NVIDIA H100 80GB HBM3", "memory": 85520809984,
        "driver": "580.95.05", "cuda": "13.0", "ecc": "on", "mig": "off", "multi_gpu_board": False,
        "power_limit": 700.0, "power_limit_default": 700.0, "power": 123.456, "sm_clock_max": 1980, "sm_clock": 1755,
        "nvlinks": 4, "nvlinks_up": 4, "nvlinks_down": "", "nvlink_speed": 26562,
        "p2p_1": "read+write+nvlink+atomics", "topology_1": "system", "throttle": "", "utilization": 97,
        "recovery_action": "none", "fabric": "completed", "remap_pending": False, "repair_pending": False,
        "temperature_slowdown": 89, "memory_temperature_max": 95, "temperature_margin": 48,
        "banks_without_spares": 0, "banks_low_on_spares": 0,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("gpu", "field", "value"),
    [
        ({"nvmlDeviceGetRemappedRows": [1, 2, 1, 0]}, "remap_pending", True),
        ({"nvmlDeviceGetRemappedRows": [1, 2, 0, 1]}, "remap_failed", True),
        ({"nvmlDeviceGetRemappedRows": [1, 2, 1, 0]}, "remapped_uncorrected", 2),
        ({"nvmlDeviceGetRepairStatus": {"bTpcRepairPending": 1}}, "repair_pending", True),
        ({"nvmlDeviceGetSramEccErrorStatus": {"bThresholdExceeded": 1}}, "sram_threshold", True),
        ({"nvmlDeviceGetUnrepairableMemoryFlag_v1": {"unrepairableMemory": 1}}, "unrepairable_memory", True),
        ({"nvmlDeviceGetRetiredPages": 3}, "retired_pages", 6),  # by either cause
        ({"fields": {"230": 4}}, "recovery_action", "drain and reset"),
        ({"nvmlDeviceGetGpuFabricInfo": {"state": 3, "status": 9}}, "fabric", "completed with error 9"),
        ({"nvmlDeviceGetEccMode": [0, 1]}, "ecc_pending", "on"),
        ({"nvmlDeviceGetNvLinkState(2)": 0}, "nvlinks_down", "2"),
        ({"fields": {"163/1": 7, "163/3": 2}}, "nvlink_crc", 9),
        # an older driver has no such fields, and counts flits and data of each link
        ({"fields": {f"163/{n}": {"error": 2} for n in range(4)}, "nvmlDeviceGetNvLinkErrorCounter(1,3)": 5}, "nvlink_crc", 5),
        # Blackwell counts recoveries elsewhere
        ({"fields": {"215": 2}}, "nvlink_recovery", 8),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x1064}, "throttle",
         "power cap, thermal (software), thermal (hardware), 0x1000"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": {"error": 13}, "nvmlDeviceGetCurrentClocksThrottleReasons": 1},
         "throttle", "idle"),
        ({"nvmlDeviceGetP2PStatus(0)": 3, "nvmlDeviceGetP2PStatus": 3}, "p2p_1", "topology not supported"),
        ({"nvmlDeviceGetTotalEccErrors(1,0)": 4}, "ecc_uncorrected", 4),
        ({"nvmlDeviceGetTemperatureThreshold(2)": 105}, "memory_temperature_max", 105),
        ({"nvmlDeviceGetMarginTemperature": {"marginTemperature": -3}}, "temperature_margin", -3),
        ({"nvmlDeviceGetPowerManagementDefaultLimit": 650500}, "power_limit_default", 650.5),
        ({"nvmlDeviceGetRowRemapperHistogram": {"low": 5, "none": 2}}, "banks_without_spares", 2),
        ({"nvmlDeviceGetRowRemapperHistogram": {"low": 5, "none": 2}}, "banks_low_on_spares", 5),
        ({"nvmlDeviceGetNvLinkState(2)": 0}, "nvlinks_up", 3),
        ({"fields": {"74": 7}}, "power_violation", 7),
        ({"nvmlDeviceGetTotalEccErrors(1,1)": 4}, "ecc_uncorrected_ever", 4),
        ({"nvmlDeviceGetEnforcedPowerLimit": {"error": 3}, "nvmlDeviceGetPowerManagementLimit": 5000}, "power_limit", 5.0),
    ],
)  # fmt: skip
def test_what_is_wrong_is_read(machine: Machine, gpu: dict[str, Any], field: str, value: Any) -> None:
    assert machine(gpu, {}).query(0, field) == value


@pytest.mark.parametrize(
    ("code", "raised", "text"),
    [
        (15, GpuLost, "GPU is lost"),
        (16, GpuLost, "GPU must be reset"),
        (999, QueryError, "Unknown Error"),
        (14, QueryError, "Corrupted infoROM"),
        (4711, QueryError, "error 4711"),
    ],
)
def test_an_error_is_no_lack(machine: Machine, code: int, raised: type[QueryError], text: str) -> None:
    source = machine({"nvmlDeviceGetTemperature": {"error": code}, "fields": {"82": {"error": code}}}, {})
    for field in ("temperature", "memory_temperature"):
        with pytest.raises(raised) as caught:
            source.query(0, field)
        assert (caught.value.code, text in str(caught.value)) == (code, True)


EVERY = [field for field in asked(get_args(Kind), 0, (0, 1)) if field != "uuid"]  # which is read once, to find the GPU


def answering(binding: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """Give all functions of the library, and all field values of a GPU, one answer."""
    names = {name.partition("(")[0] for name in binding._HEALTHY} | {"nvmlDeviceGetUnrepairableMemoryFlag_v1"}
    ids = {*binding._HEALTHY_FIELDS, *map(str, range(300))}
    return {**dict.fromkeys(names, answer), "fields": dict.fromkeys(ids, answer)}


@pytest.mark.parametrize(
    ("code", "raised"), [(999, QueryError), (15, GpuLost), *((code, Unsupported) for code in (3, 4, 13, 22))]
)
def test_each_query_reports_errors_a_lost_gpu_and_what_is_not_supported(
    machine: Machine, binding: Any, code: int, raised: type[Exception]
) -> None:
    """As a vGPU or a Jetson does not know much."""
    answer = {"error": code}
    source = machine(answering(binding, answer), {}, driver=answer, cuda=answer)
    lacks = {"not supported", "not permitted", "not supported by this driver", "not supported on a vGPU"}
    for field in EVERY:
        with pytest.raises((QueryError, Unsupported)) as caught:
            source.query(0, field)
        assert type(caught.value) is raised and (raised is not Unsupported or str(caught.value) in lacks), field


@pytest.mark.parametrize("field", [name for name in EVERY if "nvlink" in name])
def test_an_error_of_one_link_is_not_lost_among_the_others(machine: Machine, field: str) -> None:
    wrong = {"error": 999}
    fields = {f"{number}/2": wrong for number in (161, 162, 163, 164)} | {str(n): wrong for n in range(200, 230)}
    with pytest.raises(QueryError):
        machine({"nvmlDeviceGetNvLinkState(2)": wrong, "fields": fields}, {}).query(0, field)


def test_each_query_that_hangs_waits_in_the_library(machine: Machine, binding: Any) -> None:
    """None gives an answer of its own, so that the sampler can say which query hangs."""
    answer = {"hang": True}
    source = machine({}, {})
    library = binding.nvmlLib
    library._gpus[0], library._driver, library._cuda = answering(binding, answer), answer, answer
    ended: list[str] = []

    def ask(field: str) -> None:
        with contextlib.suppress(QueryError):  # when it is released
            source.query(0, field)
        ended.append(field)

    binding.released.clear()
    threads = [threading.Thread(target=ask, args=(field,), daemon=True) for field in EVERY]
    try:
        for thread in threads:
            thread.start()
            binding.hanging.get(timeout=60)
        assert not ended
    finally:
        binding.released.set()
        for thread in threads:
            thread.join(60)
    assert sorted(ended) == sorted(EVERY)


def test_gpus_are_known_by_uuid_wherever_they_stand(machine: Machine) -> None:
    gpus = [{"nvmlDeviceGetName": name} for name in "abc"]
    source = machine(*gpus, uuids={0: "00000002-aaaa", 1: "gpu-00000000-AAAA", 2: "deadbeef"})
    assert (source.query(0, "name"), source.query(1, "name")) == ("c", "a")
    assert source.unmatched == {2: "NVML knows no GPU with the UUID deadbeef"}
    with pytest.raises(Unsupported, match="peer"):
        source.query(0, "p2p_2")


def test_of_a_mig_device_the_gpu_below_is_asked(machine: Machine) -> None:
    gpus = [{"nvmlDeviceGetMaxMigDeviceCount": {"error": 4}}, {"nvmlDeviceGetMaxMigDeviceCount": 7, "mig": 2}]
    source = machine(*gpus, uuids={0: "00000000-aaaa", 1: "00000001-bbb1"}, events=[{"gpu": 1, "xid": 13}])
    assert source.query(1, "uuid") == "GPU-00000001-AAAA"
    assert source.events(0.01) == [XidEvent(1, 13)]


def test_a_gpu_that_does_not_answer_at_the_start_is_said(machine: Machine) -> None:
    source = machine({}, {"nvmlDeviceGetHandleByIndex": {"error": 15}})
    assert source.unmatched == {
        1: "NVML knows no GPU with the UUID 00000001-aaaa; its GPU 1 does not answer: GPU is lost"
    }


@pytest.mark.parametrize("code", [9, 12, 18])
def test_without_a_driver_there_is_no_telemetry(machine: Machine, code: int) -> None:
    with pytest.raises(NoTelemetry, match="nvidia-smi"):
        machine(init={"error": code})


def test_without_the_binding_there_is_no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoTelemetry, match="nvidia-ml-py is not installed"):
        NvmlSource({})


def test_xids_are_events_of_their_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("mgpu_check.devices.telemetry.nvml.time.sleep", waited.append)
    events = [{"gpu": 1, "xid": 79}, {"gpu": 0, "type": 2}, {"error": 15}, {"error": 999}]
    source = machine({}, {}, events=events)
    assert source.events(0.01) == [XidEvent(1, 79)]
    assert [source.events(0.01), source.events(0.01)] == [[], []]
    assert waited == [0.01]  # the library has not waited, when a GPU is lost: a loop of queries must not spin
    with pytest.raises(QueryError):
        source.events(0.01)
    assert source.events(0.01) == []  # a timeout
    with pytest.raises(Unsupported):
        machine({"nvmlDeviceGetSupportedEventTypes": 0}).events(0.01)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TelemetrySampler]:
    """A process beside this one that asks the binding about such a machine."""

    def watched(machine: dict[str, Any], every: float, **more: Any) -> TelemetrySampler:
        monkeypatch.setenv("MGPU_TEST_NVML", json.dumps(machine))
        monkeypatch.setenv("PYTHONPATH", str(STANDIN), prepend=os.pathsep)
        return TelemetrySampler(list(UUIDS.items())[: len(machine.get("gpus", UUIDS))], None, every, **more)

    return watched


def test_an_initialization_that_hangs_is_a_trouble_of_no_gpu(watched: Callable[..., TelemetrySampler]) -> None:
    with watched({"init": {"hang": True}}, 1.0, deadline=0.1) as sampler:
        taken = sampler.snapshot()
        (trouble,) = sampler.troubles()
    assert (trouble.kind, trouble.gpu, trouble.field) == ("hang", None, "initialization")
    assert taken.absent == "the driver's library has not answered within 0.3 s" and set(taken.missing) == {0, 1}


def test_where_no_xids_are_told_a_snapshot_says_so(watched: Callable[..., TelemetrySampler]) -> None:
    with watched({"gpus": [{"nvmlDeviceGetSupportedEventTypes": 0}]}, 1.0) as sampler:
        while "xid" not in (taken := sampler.snapshot()).unknown[0]:
            pass
    assert taken.unknown[0]["xid"] == "no GPU reports Xids"


def test_the_process_beside_a_run_asks_the_binding(watched: Callable[..., TelemetrySampler]) -> None:
    """Two GPUs; one has a query that hangs."""
    gpus = [{}, {"nvmlDeviceGetPowerUsage": {"hang": True}}]
    with watched({"gpus": gpus, "events": [{"gpu": 0, "xid": 63}]}, 0.05, deadline=1.0) as sampler:
        taken = sampler.snapshot()
        troubles = {(t.kind, t.gpu, t.field, t.code) for t in sampler.troubles()}
    assert taken.facts[0]["name"] == "NVIDIA H100 80GB HBM3"
    assert taken.unknown[0]["retired_pages"] == "not supported"
    assert taken.missing == {1: "power: the driver has not answered within 1 s"}
    assert troubles == {("hang", 1, "power", None), ("xid", 0, "", 63)}
