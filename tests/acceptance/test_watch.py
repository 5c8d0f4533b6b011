"""Telemetry of several hosts: all the time on the first, in calls on the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu_check.acceptance import telemetry
from mgpu_check.acceptance.health.checks import examine_health
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.acceptance.telemetry import Watch
from mgpu_check.devices.telemetry.sampler import Visit
from mgpu_check.devices.telemetry.sources import LAG, Override, SimulatedTelemetry
from mgpu_check.errors import RankFailure


class Pool:
    """Calls here what another host would run."""

    calls = 0
    broken = False

    def run_in_node_process(self, fn: Any, *args: Any, host: int, timeout: float) -> list[Any]:
        assert host == 1
        self.calls += 1
        if self.broken:
            raise RankFailure("rank 0 failed")
        return [fn(*args)]


GPUS = [Gpu(number, number // 2, number % 2, "x", f"uuid-{number}") for number in range(4)]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@contextlib.contextmanager
def watching(pool: Any, *overrides: Override) -> Iterator[Watch]:
    of = Watch(GPUS, pool, SimulatedTelemetry(overrides=overrides), 0.02, time.monotonic())
    try:
        yield of
    finally:
        of.close()


def later(of: Watch) -> None:
    """Let time pass, so that simulated counters grow between calls."""
    until = of.now() + 2 * LAG
    while of.now() < until:
        of.samples()


def test_gpus_of_another_host_are_asked_in_calls(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters continue to grow from one call to the next; an Xid is reported once."""
    monkeypatch.setattr(telemetry, "_EVERY", 0.0)
    told = Override(2, "xid", 48), Override(3, "pcie_replays", 0, grows=50), Override(1, "nvlink_replay", 0, grows=1)
    with watching(pool, *told) as of:
        taken = [of.snapshot()]
        later(of)
        taken.append(of.snapshot(full=False))
        later(of)
        monkeypatch.setattr(telemetry, "keep_busy", lambda rank, seconds: None)
        of.under_load(SimpleNamespace(numbers=[0, 1, 2, 3], on_ranks=on_ranks), "health", 0.1)  # type: ignore[arg-type]
        while len({sample.gpu for sample in of.samples()}) < len(GPUS) or not of.troubles():
            of.snapshot(full=False)
        taken.append(of.snapshot())
    assert [[bool(one.facts[gpu.number]) for gpu in GPUS] for one in taken] == [[True] * 4, [False] * 4, [True] * 4]
    assert [sorted(one.counters) for one in taken] == [[0, 1, 2, 3]] * 3
    assert of.hosts == {0: [0, 1], 1: [2, 3]}
    assert [(trouble.gpu, trouble.code) for trouble in of.troubles()] == [(2, 48)]
    replays = [one.counters[3]["pcie_replays"] for one in taken]
    assert replays == sorted(set(replays))
    assert all(0 <= sample.at <= of.now() for sample in of.samples())
    entries = examine_health([("", one.only([2, 3])) for one in taken], of.samples(), of.troubles(), host=1)
    assert {str(entry.subject) for entry in entries if entry.outcome == "failed"} == {"GPU 2", "GPU 3"}


def on_ranks(check: str, fn: Any, seconds: float, guests: Any) -> list[Any]:
    found = [fn(SimpleNamespace(index=index), seconds, guests) for index in range(4)]
    assert [isinstance(result, Visit) for result in found] == [False, False, True, False]
    return found


def test_another_host_is_not_asked_after_each_test(pool: Pool) -> None:
    with watching(pool) as of:
        first, second = of.snapshot(), of.snapshot(full=False)
    assert pool.calls == 1
    assert set(first.counters) == {0, 1, 2, 3} and set(second.counters) == {0, 1}


def test_a_host_that_cannot_be_asked_is_unknown(pool: Pool) -> None:
    pool.broken = True
    with watching(pool) as of:
        taken = of.snapshot()
    assert set(taken.facts) == {0, 1}
    assert taken.missing == dict.fromkeys((2, 3), "telemetry could not be read: rank 0 failed")
