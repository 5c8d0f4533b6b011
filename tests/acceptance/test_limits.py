"""Telemetry against limits: the value that exceeds one, its GPU, and what a healthy node may do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from mgpu_check.acceptance.findings import judged
from mgpu_check.acceptance.health.checks import examine_health
from mgpu_check.devices.observations import Observation, Subject
from mgpu_check.devices.telemetry.sampler import Snapshot, TelemetrySample
from mgpu_check.devices.telemetry.sources import Override
from tests.acceptance.watching import GPUS, Run, watched


def found(run: Run) -> list[Observation]:
    entries = [judged(entry, {}) for entry in examine_health(run.snapshots, run.samples, run.troubles)]
    return [entry for entry in entries if entry.finding]


def told(run: Run) -> list[tuple[str, Subject, str]]:
    return [(entry.finding.removeprefix("MGPU-"), entry.subject, entry.seen) for entry in found(run)]


ONE = Subject("gpu", (1,))


@pytest.mark.parametrize(
    ("field", "value", "finding", "seen"),
    [
        ("temperature", 89, "TEMPERATURE", "temperature was 89 degrees Celsius under load, and the temperature at"),
        ("memory_temperature", 105, "TEMPERATURE", "and the highest temperature of its memory is 95, in 40 of 40"),
        ("temperature_margin", -1, "TEMPERATURE", "it was as hot as its slowdown limit under load, in 40 of 40"),
        ("sm_clock", 345, "CLOCK-LOW", "SM clock was 345 MHz at most under load, and can be 1980; the driver gives no"),
        ("memory_clock", 810, "CLOCK-LOW", "memory clock was 810 MHz at most under load, and can be 2619"),
        ("power", 805.0, "POWER-OVER", "it drew 805 W, and its power limit is 700 W, in 40 of 40 samples"),
        ("pcie_width", 8, "PCIE-TRAINED-DOWN", "PCIe width was 8 under load, and can be 16, in 40 of 40 samples"),
        ("pcie_generation", 1, "PCIE-TRAINED-DOWN", "PCIe generation was 1 under load, and can be 5"),
        ("nvlinks_up", 17, "NVLINK-DOWN", "only 17 of 18 NVLinks were active under load, in 40 of 40 samples"),
        ("banks_without_spares", 2, "REMAP-SPARE", "2 banks of memory have no spare rows left"),
    ],
)
def test_what_misses_a_limit_rejects_its_gpu(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, finding: str, seen: str
) -> None:
    run = watched(monkeypatch, [Override(1, field, value)])
    rejected = [entry for entry in found(run) if entry.ruling == "reject"]
    assert {(entry.finding, entry.subject, entry.outcome) for entry in rejected} == {(f"MGPU-{finding}", ONE, "failed")}
    assert seen in rejected[0].seen


@pytest.mark.parametrize(
    ("field", "value", "finding", "seen"),
    [
        ("banks_low_on_spares", 3, "REMAP-MANY", "3 banks of memory have few spare rows left"),
        ("remapped_uncorrected", 407, "REMAP-MANY",
         "407 rows of memory were remapped before the run, 407 of them after"),
        ("ecc_uncorrected_ever", 5, "ECC-LIFETIME", "5 uncorrected memory errors in its life, before the run"),
        ("power", 150.0, "POWER-UNLIKE", "power was 150 under load, and that of the others 420 (medians)"),
        ("power_limit_default", 750, "POWER-BELOW-DEFAULT",
         "power limit is 700 W, and the default of the board is 750"),
    ],
)  # fmt: skip
def test_what_is_only_a_warning_passes_with_its_text(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, finding: str, seen: str
) -> None:
    (entry,) = found(watched(monkeypatch, [Override(1, field, value)]))
    assert (entry.finding, entry.subject, entry.outcome) == (f"MGPU-{finding}", ONE, "passed")
    assert seen in entry.seen


@pytest.mark.parametrize("field", ["reliability_violation", "board_violation"])
def test_a_violation_longer_than_a_hundredth_of_the_time_rejects(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    assert found(watched(monkeypatch, [Override(1, field, 0, grows=5e6)])) == []
    entries = found(watched(monkeypatch, [Override(1, field, 0, grows=50e6)]))
    assert {(one.finding, one.subject) for one in entries} == {("MGPU-THROTTLED", ONE)}
    assert all("has held clocks down: " in one.seen for one in entries)


def test_a_power_cap_that_holds_one_gpu_down_far_longer_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    run = watched(monkeypatch)
    for gpu, share in zip(GPUS, (0.2, 0.9, 0.3, 0.25), strict=True):
        last = run.snapshots[-1][1]
        grown = {**last.counters[gpu], "power_violation": int(share * 30e9)}
        run.snapshots[-1] = ("test_c", replace(last, counters={**last.counters, gpu: grown}))
    (entry,) = found(run)
    assert (entry.finding, entry.subject) == ("MGPU-POWER-UNLIKE", ONE)
    assert entry.seen == "its power limit held clocks down for 90% of the time, and the others for 25%"


@pytest.mark.parametrize(("after", "rejected"), [(5.0, True), (37.5, True), (38.5, False)])
def test_a_pcie_link_that_trains_down_late_is_seen_at_the_end(
    monkeypatch: pytest.MonkeyPatch, after: float, rejected: bool
) -> None:
    found_ = found(watched(monkeypatch, [Override(1, "pcie_generation", 1, after=after)]))
    assert [(entry.finding, entry.subject) for entry in found_] == [("MGPU-PCIE-TRAINED-DOWN", ONE)] * rejected


def test_a_gpu_whose_clock_is_far_below_the_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = found(watched(monkeypatch, [Override(1, "sm_clock", 1300)]))
    assert (entry.finding, entry.subject) == ("MGPU-CLOCK-LOW", ONE)
    assert "SM clock was 1300 under load, and that of the others 1980 (medians)" in entry.seen
    assert found(watched(monkeypatch, [Override(1, "sm_clock", 1600)])) == []  # GPUs of one model differ


def test_a_power_cap_explains_a_low_sm_clock_and_not_one_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = [Override(gpu, "throttle", "power cap") for gpu in GPUS]
    assert found(watched(monkeypatch, [*capped, *(Override(gpu, "sm_clock", 900) for gpu in GPUS)])) == []
    slow = found(watched(monkeypatch, [*capped, *(Override(gpu, "memory_clock", 810) for gpu in GPUS)]))
    assert {entry.subject.members[0] for entry in slow} == set(GPUS)  # all alike, and none as it should be


def test_an_idle_gpu_misses_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = {"utilization": 0, "sm_clock": 345, "memory_clock": 810, "pcie_generation": 1, "power": 60.0}
    assert found(watched(monkeypatch, profile=idle)) == []


UNKNOWN = ("temperature_slowdown", "memory_temperature_max", "temperature_margin", "power_limit_default", "nvlinks_up")


def test_a_limit_that_is_not_known_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = [Override(1, name, None) for name in (*UNKNOWN, "banks_without_spares", "sm_clock_max", "pcie_width_max")]
    hot = [Override(1, "temperature", 96), Override(1, "memory_temperature", 105)]
    assert told(watched(monkeypatch, [*unknown, *hot])) == []


def test_a_query_of_a_limit_that_fails_is_an_error_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNKNOWN:
        run = watched(monkeypatch, [Override(1, name, error="Unknown Error")])
        assert {(finding, subject) for finding, subject, _ in told(run)} == {("DRIVER-ERROR", ONE)}


def test_one_sample_is_a_momentary_event(monkeypatch: pytest.MonkeyPatch) -> None:
    run = watched(monkeypatch)
    for field, value in (("temperature", 95), ("sm_clock", 345), ("power", 900.0), ("pcie_width", 8)):
        samples = list(run.samples)
        place = next(n for n, sample in enumerate(samples) if sample.gpu == 1)
        samples[place] = replace(samples[place], values={**samples[place].values, field: value})
        assert told(replace(run, samples=samples)) == [], field


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 8])
def test_healthy_gpus_with_noise_have_no_finding(seed: int, count: int) -> None:
    """Clocks, power and temperature of a node under a power cap, as they scatter from GPU to GPU and from time to
    time."""
    draw = random.Random(seed)
    gpus = range(count)
    facts: dict[str, Any] = {
        "name": "H100", "sm_clock_max": 1980, "memory_clock_max": 2619, "power_limit": 700.0, "power_limit_default": 700.0,
        "temperature_slowdown": 89, "memory_temperature_max": 95, "pcie_generation_max": 5, "pcie_width_max": 16,
        "nvlinks": 18, "banks_without_spares": 0, "banks_low_on_spares": 0, "remap_pending": False,
    }  # fmt: skip
    counters = dict.fromkeys(("ecc_uncorrected", "ecc_uncorrected_ever", "thermal_violation"), 0)
    first = Snapshot(0.0, dict.fromkeys(gpus, facts), {gpu: {**counters, "power_violation": 0} for gpu in gpus})
    capped = {gpu: {**counters, "power_violation": int(draw.uniform(0.3, 0.7) * 300e9)} for gpu in gpus}
    last = Snapshot(300.0, dict.fromkeys(gpus, facts), capped)
    base = {gpu: (draw.gauss(1500, 80), draw.gauss(640, 15), draw.gauss(66, 5)) for gpu in gpus}
    samples = []
    for at in range(300):
        for gpu, (clock, power, heat) in base.items():
            idle = draw.random() < 0.1
            values = {
                "utilization": 0 if idle else draw.randint(40, 100),
                "sm_clock": 345 if idle or draw.random() < 0.01 else min(1980, draw.gauss(clock, 100)),
                "memory_clock": 2619,
                "power": 90.0 if idle else min(735, draw.gauss(power, 40)),
                "temperature": round(min(84, draw.gauss(heat, 3))),
                "memory_temperature": round(min(92, draw.gauss(heat + 8, 3))),
                "throttle": "idle" if idle else "power cap",
                "pcie_generation": 1 if idle else 5 if draw.random() < 0.98 else 4,
                "pcie_width": 16,
                "nvlinks_up": 18,
            }
            samples.append(TelemetrySample(float(at), gpu, values))
    assert told(Run([("", first), ("test", last)], samples)) == []
