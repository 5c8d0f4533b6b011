"""A soak lasts for the requested time, and sees faults under load, and faults that begin meanwhile."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mgpu_check.acceptance.cases import Loaded, SoakCase, Trained, TransformerCase
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.acceptance.soak.test_soak import Rate, Soak, slower
from mgpu_check.devices.observations import Measurement, Observation, Subject

MODEL = dict.fromkeys(range(4), "G")


def speeds(*values: float, spread: float = 0.0) -> list[Rate]:
    return [Rate(value, spread, 20) for value in values]


STEADY = speeds(*[5.0] * 8)
BY_40 = "became slower by 40% under load"


@pytest.mark.parametrize(
    ("rates", "failed"),
    [
        ({0: STEADY, 1: STEADY, 2: STEADY}, {}),
        ({0: STEADY, 1: speeds(9, 5, 5, 5, 5, 4, 4, 4), 2: STEADY},
         {1: "became slower by 20% under load, the others by 0%"}),
        ({0: STEADY, 1: speeds(9, 5, 5, 5, 5, 4.6, 4.6, 4.6), 2: STEADY}, {}),
        ({0: STEADY, 1: speeds(9, 5, 5, 5, 5, 4, 4, 4, spread=0.4), 2: STEADY}, {}),  # as noisy as that
        ({0: speeds(5, 5, 5, 4, 4, 4, 4, 4)}, {}),
        ({0: speeds(5, 5, 5, 4, 4, 3, 3, 3)}, {0: f"{BY_40}, the others by 0%"}),
        (dict.fromkeys(range(3), speeds(5, 5, 5, 4, 4, 3, 3, 3)),
         dict.fromkeys(range(3), f"{BY_40}, as the others did")),
        ({0: speeds(5, 5, 1, 1)}, None),  # too few rounds
    ],
)  # fmt: skip
def test_a_gpu_that_becomes_slower_is_found(rates, failed):
    found = slower(rates, MODEL)
    if failed is None:
        assert found == []
        return
    assert {one.subject.members[0]: one.seen for one in found if one.outcome == "failed"} == failed
    assert len(found) == len(rates)


class Stub:
    """The part of the fixture `node` that a soak needs; each round takes a second, and `answer` gives the GPUs' results.

    `answer(gpu, case)` returns what differs in the answer of a GPU, or None where it does not answer.
    """

    depth = "quick"

    def __init__(self, count, answer=lambda gpu, case: {}):
        self.gpus = tuple(Gpu(number, 0, number, "G", f"GPU-{number}", 16 << 20) for number in range(count))
        self.numbers = list(range(count))
        self.results: list[Observation | Measurement] = []
        self.cases: list[SoakCase] = []
        self.now = 0.0
        self.answer = answer

    def on_ranks(self, check, fn, case, *, gpus, environment, timeout):
        assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        self.cases.append(case)
        self.now += 1.0
        steps = case.training.steps
        digests = tuple((step, step + 1) for step in range(steps))
        right = Loaded(Trained(case.training, ("loss", "a"), digests, 0.5), 0.9, (0.1,) * steps, 10, 0, {})
        answers = {gpu: self.answer(gpu, case) for gpu in gpus}
        if None in answers.values():
            return []
        return [[dataclasses.replace(right, **changed)] for changed in answers.values()]

    def record(self, entries):
        self.results += entries

    def failed(self):
        return [one for one in self.results if isinstance(one, Observation) and one.outcome == "failed"]

    def soak(self, seconds):
        node: Any = self
        Soak(node, seconds, clock=lambda: self.now).run()
        return self


def test_it_ends_when_the_load_was_long_enough():
    node = Stub(3).soak(9.0)
    assert node.failed() == []
    load = dict.fromkeys(range(3), 0.0)
    for one in node.results:
        if isinstance(one, Observation):
            load[one.subject.members[0]] += one.work.seconds
    assert list(load.values()) == [pytest.approx(9.0)] * 3  # ten rounds, each with a tenth of its time without load
    assert [case.number for case in node.cases] == list(range(1, 11))
    measured = [one for one in node.results if isinstance(one, Measurement)]
    assert {one.subject.members[0] for one in measured} == {0, 1, 2}
    assert all(one.repeats >= 3 and one.unit == "FLOP/s" for one in measured)


def test_it_ends_although_there_was_no_load_and_with_the_first_gpu_that_is_lost():
    node = Stub(1, lambda gpu, case: {"seconds": 0.0}).soak(2.0)
    assert [case.training.steps for case in node.cases] == [4, 32, 256, 2000]
    node = Stub(3, lambda gpu, case: None if (gpu, case.number) == (1, 4) else {}).soak(100.0)
    assert len(node.cases) == 4


def test_steps_of_a_round_follow_from_how_long_they_take():
    node = Stub(1, lambda gpu, case: {"seconds": 0.1 * case.training.steps}).soak(80.0)
    assert [case.training.steps for case in node.cases][:3] == [4, 20, 20]  # rounds of two seconds
    large = Stub(1, lambda gpu, case: {"seconds": 0.1 * case.training.steps})
    large.gpus = (dataclasses.replace(large.gpus[0], memory=80 << 30),)
    assert [(case.every, case.training.steps) for case in large.soak(80.0).cases][:3] == [(8, 32), (8, 32), (8, 32)]


def wrong_in(step, case):
    digests = tuple((number, number + 1 + (number >= step)) for number in range(case.training.steps))
    return {"trained": Trained(case.training, ("loss", "a"), digests, 0.5)}


def test_a_gpu_that_trains_otherwise_than_before_or_than_the_others_is_accused():
    late = Stub(2, lambda gpu, case: wrong_in(2, case) if gpu == 1 and case.number > 3 else {}).soak(5.0)
    assert {one.subject for one in late.failed()} == {Subject("gpu", (1,))}
    assert late.failed()[0].seen == "does not train as in earlier rounds: step 3, a"
    odd = Stub(3, lambda gpu, case: wrong_in(1, case) if gpu == 2 else {}).soak(3.0)
    assert {one.subject for one in odd.failed()} == {Subject("gpu", (2,))}
    assert odd.failed()[0].seen == "departs from the other GPUs by step 2, in a"
    two = Stub(2, lambda gpu, case: wrong_in(1, case) if gpu == 1 else {}).soak(3.0)
    assert {one.subject for one in two.failed()} == {Subject("group", (0, 1))}


def test_what_is_wrong_in_collectives_is_of_groups():
    node = Stub(4, lambda gpu, case: {"reduced": 7, "exchanged": {0: 2, 2: 1}} if gpu == 2 else {}).soak(1.0)
    found = {(one.subject.kind, one.subject.members, one.suspects) for one in node.failed()}
    assert found == {("group", (0, 1, 2, 3), (2,)), ("group", (0, 2), ()), ("gpu", (2,), ())}
    most = Stub(2, lambda gpu, case: {"reduced": 7}).soak(1.0)
    assert {one.suspects for one in most.failed()} == {()}


LOAD = SoakCase(TransformerCase("autocast", batch=4, steps=2), 1, 0.1, 1 << 10, 1 << 12, 1)


def loaded(rank, faults):
    from mgpu_check.acceptance.faults import hardware_planted, hardware_text, planted_from
    from mgpu_check.acceptance.soak.checks import examine_load

    seen = []
    for fault in faults:
        with hardware_planted(hardware_text([planted_from(name) for name in fault.split()])):
            results: list[Any] = examine_load(rank, LOAD)
        *failed, said = results
        kinds = {one.subject.kind + (" memory" if "memory under" in one.seen else "") for one in failed}
        seen.append((sorted(kinds), said.reduced, sorted(said.exchanged), said.trained.digests, said.bytes > 10**6))
    return seen


@pytest.mark.slow
def test_each_kind_of_work_is_looked_at(ranks):
    """On two ranks: all is right; the ways of the host to and from the device; memory; a sum; an exchange; a
    product."""
    faults = (
        "",
        "upload-truncated",
        "download-truncated",
        "memory-stuck-at-one:address=8000003 memory-stuck-at-zero:address=8000011",
        "collective-wrong:device=1,operation=all_reduce",
        "all-to-all-wrong:device=1",
        "product-lane",
    )
    here, there = ranks.run(loaded, faults, size=2)
    digests = here[0][3]
    assert here == [([], 0, [], digests, True)] * len(faults)
    right, up, down, memory, reduced, exchanged, product = there
    assert right == here[0]
    assert up[0] == ["upload"] and "gpu memory" in memory[0]
    assert set(down[0]) <= {"download", "download memory"} and "download" in down[0]
    assert reduced[1] > 0 and reduced[3] == digests
    assert exchanged[2] != [] and exchanged[:2] == ([], 0)
    assert product[3] != digests and product[0] == []
