"""Slow parts are accused after a second look, GPUs that differ are not, and reports say what would be found."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from mgpu_check.acceptance.comparison import amount
from mgpu_check.acceptance.findings import judged
from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.performance.checks import judge
from mgpu_check.acceptance.performance.test_performance import test_gpus_and_links_are_fast_enough as check
from mgpu_check.acceptance.plan import Plan
from mgpu_check.acceptance.run_report import RunLog
from mgpu_check.acceptance.verdict import explain
from mgpu_check.devices.observations import Measurement, Part, Subject, median_and_spread
from mgpu_check.settings import activate, resolve
from tests.acceptance.speeds import KINDS, NONE, SIZE, all_of, failed, gpus, measurement, node, of_measurements

# --- a second look ---


def test_a_slow_gpu_is_named_if_both_looks_show_it():
    one, healthy = node("gpu", 4, lambda m: 0.5 if m[0] == 2 else 1.0), node("gpu", 4, lambda m: 1.0)
    both = judge(one, gpus(4), floors=NONE, second_look=one[::-1])
    assert failed(both) == {(2,)} and "again when measured in another order" in both[2].seen
    for first, again in ((one, healthy), (healthy, one)):
        found = [judged(o, {}) for o in judge(first, gpus(4), floors=NONE, second_look=again)]
        assert not failed(found)
        (warned,), rest = [o for o in found if o.finding], [o for o in found if not o.finding]
        assert (warned.finding, warned.ruling) == ("MGPU-SPEED-ONCE", "warn") and "in one of two looks" in warned.seen
        assert {o.outcome for o in of_measurements(rest)} == {"passed"}


class Pool:
    """The part of a pool that a node uses: its GPU 1 is slow in the first calls. It keeps the orders of the GPUs."""

    def __init__(self, slow_calls: int) -> None:
        self.orders: list[tuple[int, ...]] = []
        self.slow_calls = slow_calls

    def run(self, fn: Any, *args: Any, devices: Any, **more: Any) -> list[list[Measurement]]:
        self.orders.append(tuple(devices))
        slow = 1 if len(self.orders) <= self.slow_calls else None
        values = [3e14 * (0.5 if gpu == slow else 1.0) for gpu in devices]
        return [[measurement("gpu", (rank,), value)] for rank, value in enumerate(values)]


@pytest.mark.parametrize(("slow_calls", "finding"), [(0, None), (1, "MGPU-SPEED-ONCE"), (2, "MGPU-GPU-SLOW")])
def test_a_slow_gpu_is_measured_again_in_the_reverse_order(slow_calls, finding):
    pool, log = Pool(slow_calls), RunLog()
    activate(resolve({}, {}, {}))
    try:
        one = Node(pool, log, gpus(3), Plan("quick", 0.9, None, None))  # type: ignore[arg-type]
        one.on_ranks("compute", amount)
        check(one)
    finally:
        activate(None)
    assert pool.orders == [(0, 1, 2), (2, 1, 0)][: 1 + bool(slow_calls)]
    found = {(o.subject.members, o.finding) for o in log.observations() if o.finding}
    assert found == ({((1,), finding)} if finding else set())


def test_what_was_not_measured_again_keeps_its_failure():
    slow = node("gpu", 4, lambda m: 0.5 if m[0] == 2 else 1.0)
    found = judge(slow, gpus(4), floors=NONE, second_look=node("copy", 4, lambda m: 1.0))
    assert failed(found) == {(2,)}


# --- pairs in collectives ---


def in_pairs(count, speed):
    return [
        Measurement("x", Subject("group", pair), "all_reduce of a pair", "B/s", 1e11 * speed(pair), 5, SIZE)
        for pair in itertools.combinations(range(count), 2)
    ]


@pytest.mark.parametrize("count", [4, 8])
def test_a_gpu_or_a_pair_that_is_slow_in_collectives_of_pairs_is_found(count):
    for wrong in ({p for p in itertools.combinations(range(count), 2) if 1 in p}, {(0, 2)}):
        found = judge(in_pairs(count, lambda p, w=wrong: 0.5 if p in w else 1.0), gpus(count), floors=NONE)
        assert failed(found) == wrong
        named = set(explain([judged(o, {}) for o in found], [0] * count).parts)
        assert named == ({Part("gpu", (1,))} if len(wrong) > 1 else {Part("link", (0, 2)), Part("link", (2, 0))})
    assert not failed(judge(in_pairs(count, lambda p: 1.0), gpus(count), floors=NONE))


# --- noise ---


def test_noise_of_healthy_repeats_accuses_nobody():
    """Each repeat scatters by 4 %."""
    drawn, found = random.Random(5), 0
    for _ in range(40):
        for kind in KINDS:
            made = []
            for members in all_of(kind, 8):
                value, spread = median_and_spread([KINDS[kind][2] * drawn.gauss(1, 0.04) for _ in range(3)])
                made.append(measurement(kind, members, value, 3, spread=spread))
            seen = judge(made, gpus(8), floors=NONE)
            assert not failed(seen)
            found += len(of_measurements(seen))
    assert found == 40 * (8 + 56 + 8 + 8 + 56)
