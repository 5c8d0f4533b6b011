"""The sampler beside a run: what it reports, and what becomes of it and of the run when the driver hangs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from mgpu_check.devices.telemetry.sampler import MOST, History, TelemetrySample, TelemetrySampler
from mgpu_check.devices.telemetry.sources import Override, SimulatedTelemetry

GPUS = [(number, f"uuid-{number}") for number in range(4)]


def test_snapshots_samples_and_troubles_name_the_gpu_and_the_field() -> None:
    overrides = (
        Override(1, "pcie_replays", 7, grows=3),
        Override(3, "vbios", error="Unknown Error"),
        Override(2, "p2p_0", "chipset not supported"),
        Override(0, "xid", 48),
    )
    with TelemetrySampler(GPUS, SimulatedTelemetry({"memory": 1 << 20}, overrides), 0.01) as sampler:
        first, second = sampler.snapshot(), sampler.snapshot()
        assert sampler.snapshot().counters[1]["pcie_replays"] > first.counters[1]["pcie_replays"] >= 7
        while len(sampler.samples()) < 8:
            sampler.snapshot()
        troubles = sampler.troubles()
    assert first.facts[2]["p2p_0"] == "chipset not supported"
    assert first.facts[2]["uuid"] == "uuid-2" and first.facts[0]["memory"] == 1 << 20
    assert second.facts[3]["vbios"] is None and second.unknown[3] == {"vbios": "error: Unknown Error"}
    assert second.counters[0] == dict.fromkeys(second.counters[0], 0) and second.gauges[0]["pcie_width"] == 16
    assert [(t.kind, t.gpu, t.field, t.text, t.code) for t in troubles if t.kind == "error"] == [
        ("error", 3, "vbios", "Unknown Error", 999)
    ]
    assert [(t.gpu, t.code) for t in troubles if t.kind == "xid"] == [(0, 48)]
    assert {sample.gpu for sample in sampler.samples()} == {0, 1, 2, 3}
    assert sampler.snapshot().absent == "the process that queries the driver has ended"


def test_one_that_hangs_and_one_that_is_lost_cost_the_others_nothing() -> None:
    overrides = (Override(2, "power", error="timeout"), Override(0, "", error="lost"))
    with TelemetrySampler(GPUS, SimulatedTelemetry(overrides=overrides), 0.05, deadline=0.2) as sampler:
        taken = sampler.snapshot()
        again = sampler.snapshot()
        troubles = {(t.kind, t.gpu, t.field) for t in sampler.troubles()}
    assert set(taken.facts) == set(again.facts) == {1, 3}
    assert taken.missing == {0: "GPU is lost", 2: "power: the driver has not answered within 0.2 s"}
    # Its identity was read before the query that hangs.
    assert taken.identity[2] == {"uuid": "uuid-2", "serial": "SIMULATED-2", "pci": "00000000:02:00.0"}
    assert set(taken.only([2]).identity) == {2} and 0 not in taken.identity
    assert ("hang", 2, "power") in troubles and {(k, g) for k, g, _ in troubles} == {("hang", 2), ("lost", 0)}


def test_where_there_is_no_telemetry_a_snapshot_says_why() -> None:
    with TelemetrySampler(GPUS, SimulatedTelemetry(absent="no driver"), 1.0) as sampler:
        taken = sampler.snapshot()
    assert taken.absent == "no driver" and taken.facts == {} and set(taken.missing) == {0, 1, 2, 3}


def test_a_process_that_dies_is_a_trouble_with_what_it_had_asked() -> None:
    with TelemetrySampler(
        GPUS, SimulatedTelemetry(overrides=(Override(2, "power", error="timeout"),)), 0.05
    ) as sampler:
        while sampler.asked_now() != [(2, "power")]:
            pass
        os.kill(sampler.pid, signal.SIGSEGV)
        taken = sampler.snapshot()
    (trouble,) = sampler.troubles()
    assert (trouble.kind, trouble.gpu, trouble.field) == ("sampler", 2, "power")
    assert trouble.text == "the process that queries the driver has ended with signal SIGSEGV"
    assert taken.absent == "the process that queries the driver has ended"


def test_it_ends_with_the_process_that_has_it() -> None:
    code = (
        "import os, sys\n"
        "from mgpu_check.devices.telemetry.sampler import TelemetrySampler\n"
        "from mgpu_check.devices.telemetry.sources import Override, SimulatedTelemetry\n"
        "hanging = SimulatedTelemetry(overrides=(Override(0, 'power', error='timeout'),))\n"
        "sampler = TelemetrySampler([(0, 'a')], hanging, 0.05)\n"
        "while not sampler.asked_now(): pass\n"
        "print(sampler.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        ended = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    with open(ended) as file:
        assert select.select([file], [], [], 30.0)[0]


def test_a_long_run_keeps_what_tells_most() -> None:
    history = History()
    for place in range(3 * MOST):
        history.add(TelemetrySample(float(place), 0, {"throttle": "thermal (hardware)" if place == 5 else ""}))
    kept = history.samples()
    assert MOST // 2 < len(kept) <= MOST
    assert [sample.at for sample in kept if sample.values["throttle"]] == [5.0]


def test_what_is_no_field_or_no_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="fan"):
        SimulatedTelemetry({"fan": 1})
    with pytest.raises(ValueError, match="interval=0"):
        TelemetrySampler(GPUS, None, 0)
