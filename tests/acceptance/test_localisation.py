"""A fault in a group of GPUs is tried again in smaller groups until a pair or a GPU is left."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.plan import Plan
from mgpu_check.acceptance.run import Run
from mgpu_check.acceptance.run_report import Gpu, RunLog
from mgpu_check.acceptance.verdict import LOCALISATION_SECONDS, Look, control, explain, look_again
from mgpu_check.devices.observations import Observation, Outcome, Part, Subject, Work
from mgpu_check.settings import activate, resolve

Rule = Callable[[tuple[int, ...], Mapping[str, str]], bool | int]
"""Return whether a collective on these GPUs fails; or the rank that the data point at."""

CONTROL = "MGPU_CHECK_CONTROL"


@pytest.fixture(autouse=True, scope="module")
def own_settings() -> Any:
    activate(resolve({}, {}, {}))
    yield
    activate(None)


class Pool:
    """The part of a pool that a node uses: it calls a function for the given GPUs."""

    def __init__(self, wrong: Rule, every: int = 1) -> None:
        self.wrong = wrong
        self.every = every
        self.calls: list[tuple[int, ...]] = []
        self.environments: list[Mapping[str, str]] = []
        self.log = RunLog()

    def run(
        self, fn: Any, *args: Any, devices: Sequence[int], environment: Mapping[str, str] | None, timeout: float
    ) -> list[Any]:
        self.calls.append(tuple(devices))
        self.environments.append(environment or {})
        ranks = tuple(range(len(devices)))
        said = self.wrong(tuple(devices), environment or {}) if len(self.calls) % self.every == 0 else False
        suspects = () if isinstance(said, bool) else (said,)
        wrong = said is not False
        outcome: Outcome = "failed" if wrong else "passed"
        group = Subject("group", ranks)
        seen = Observation("collectives", group, outcome, work=Work(operations=1), suspects=suspects if wrong else ())
        return [[seen]] + [[] for _ in ranks[1:]]


def node_of(pool: Pool, count: int, level: str = "quick") -> Node:
    gpus = [Gpu(number, 0, number, "GPU", f"uuid-{number}") for number in range(count)]
    return Node(pool, pool.log, gpus, Plan(level, 0.9, None, "cpu"))  # type: ignore[arg-type]


def collective() -> None:
    """Stands for what runs on ranks."""


def looked(count: int, wrong: Rule, every: int = 1, level: str = "quick") -> tuple[set[Part], Any, Pool]:
    """The parts that are accused after a first and a second look, the second look, and the pool."""
    pool = Pool(wrong, every)
    node = node_of(pool, count, level)
    for _ in range(every):
        node.on_ranks("collectives", collective, environment={"OWN": "1"})
    looks, seen = list(look_again(node, pool.log)), list(pool.log.observations())
    failed = [n for n, entry in enumerate(seen) if entry.outcome == "failed" and looks and looks[0].follows_rank]
    return set(explain(seen, (0,) * count, failed).parts), looks, pool


@settings(max_examples=40)
@given(count=st.integers(3, 8), data=st.data())
def test_a_link_is_left(count: int, data: st.DataObject) -> None:
    pair = set(data.draw(st.permutations(range(count)))[:2])
    parts, (look,), pool = looked(count, lambda gpus, _: pair <= set(gpus))
    assert {part.kind for part in parts} == {"link"}
    assert set(itertools.chain(*(part.members for part in parts))) == pair
    assert set(look.group) == pair
    assert len(parts) == 2  # a collective does not show the direction
    assert len(pool.calls) < 3 * 4 * count**2


@given(count=st.integers(4, 8), data=st.data())
def test_a_gpu_is_left(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    parts, (look,), _ = looked(count, lambda gpus, _: bad in gpus and len(gpus) > 1)
    assert parts == {Part("gpu", (bad,))}
    assert bad in look.group


@given(count=st.integers(2, 8), data=st.data())
def test_a_fault_that_follows_the_device_is_hardware(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    parts, (look,), _ = looked(count, lambda gpus, _: gpus.index(bad) if bad in gpus else False)
    assert parts == {Part("gpu", (bad,))}
    assert "follows the device" in "".join(look.seen)
    assert not look.follows_rank


@pytest.mark.parametrize(
    ("count", "wrong"),
    [
        *((count, lambda gpus, _: 0) for count in (3, 4, 8)),
        (3, lambda gpus, _: 1 if len(gpus) == 3 else False),  # of the rank in the middle
    ],
)
def test_a_fault_that_follows_the_rank_is_software(count: int, wrong: Rule) -> None:
    parts, (look,), _ = looked(count, wrong)
    assert parts == {Part("host", (0,))}
    assert look.follows_rank


@settings(max_examples=40)
@given(count=st.integers(3, 8), root=st.integers(0, 20), data=st.data())
def test_a_gpu_that_receives_wrong_data_is_named_and_no_link(count: int, root: int, data: st.DataObject) -> None:
    """As root of a broadcast it is right, so with one order of ranks some pairs pass."""
    bad = data.draw(st.integers(0, count - 1).filter(lambda bad: bad != root % count))
    parts, _, _ = looked(count, lambda gpus, _: bad in gpus and gpus.index(bad) != root % len(gpus))
    assert parts == {Part("gpu", (bad,))}


@settings(max_examples=40)
@given(count=st.integers(3, 8), root=st.integers(0, 20))
def test_a_gpu_that_is_wrong_as_root_is_named_and_no_software(count: int, root: int) -> None:
    bad = root % count
    parts, (look,), _ = looked(count, lambda gpus, _: bad in gpus and gpus.index(bad) == root % len(gpus))
    assert parts == {Part("gpu", (bad,))}
    assert not look.follows_rank


def test_a_fault_on_the_rank_of_some_devices_only_is_not_called_software() -> None:
    parts, (look,), _ = looked(4, lambda gpus, _: 0 if gpus[0] < 2 else False)
    assert not look.follows_rank
    assert Part("host", (0,)) not in parts


def test_what_needs_the_direct_path_is_told_from_what_does_not() -> None:
    def direct(gpus: tuple[int, ...], environment: Mapping[str, str]) -> bool:
        return {0, 2} <= set(gpus) and "NCCL_P2P_DISABLE" not in environment

    _, (look,), pool = looked(4, direct)
    assert all(environment.get("OWN") == "1" for environment in pool.environments)
    assert "only over the direct path between GPUs: right with NCCL_P2P_DISABLE=1" in look.seen
    _, (look,), _ = looked(4, lambda gpus, _: {0, 2} <= set(gpus))
    assert "fails without the direct path between GPUs (NCCL_P2P_DISABLE=1), too" in look.seen


WITHOUT_SHARED_MEMORY = "without shared memory (NCCL_SHM_DISABLE=1)"
BLOCKING = "with launches that block (CUDA_LAUNCH_BLOCKING=1)"
OVER_ALL_PATHS = "fails without the direct path between GPUs (NCCL_P2P_DISABLE=1), too"


def beside(pair: str, one: int, ends: str, other: int, others: str) -> list[str]:
    """What is said of a pair of which the second is right with others."""
    too = ", too" * (ends == "fails")
    first, second = f"GPU {one} {ends} with GPU {others}{too}", f"GPU {other} is right with GPU {others}"
    return [f"fails on GPUs {pair} alone", first, second]


@pytest.mark.parametrize(
    ("count", "wrong", "level", "seen"),
    [
        (4, lambda gpus, _: {0, 2} <= set(gpus), "quick", beside("0 and 2", 0, "is right", 2, "1 and 3")),
        (4, lambda gpus, _: 2 in gpus, "quick", beside("2 and 3", 2, "fails", 3, "0 and 1")),
        # Two others are enough.
        (6, lambda gpus, _: {0, 1} <= set(gpus), "quick", beside("0 and 1", 0, "is right", 1, "2 and 3")),
        (2, lambda gpus, _: True, "quick", []),
        (3, lambda gpus, _: len(gpus) == 3, "quick", []),
        (5, lambda gpus, _: {1, 2, 4} <= set(gpus), "quick", []),
        (2, lambda _, environment: "NCCL_SHM_DISABLE" not in environment, "standard",
         [f"is right {WITHOUT_SHARED_MEMORY}", f"fails {BLOCKING}"]),
        (2, lambda _, environment: "CUDA_LAUNCH_BLOCKING" not in environment, "long",
         [f"fails {WITHOUT_SHARED_MEMORY}", f"is right {BLOCKING}"]),
    ],
    ids=["a link", "a GPU", "a link of six", "pair", "three", "no failing half or pair", "shared memory", "launches"],
)  # fmt: skip
def test_all_that_a_second_look_finds_is_said(count: int, wrong: Rule, level: str, seen: list[str]) -> None:
    _, (look,), _ = looked(count, wrong, level=level)
    place = len(seen) if level == "quick" else 0
    assert list(look.seen) == [*seen[:place], OVER_ALL_PATHS, *seen[place:]]


def test_what_fails_now_and_then_is_repeated() -> None:
    parts, (look,), _ = looked(4, lambda gpus, _: {1, 2} <= set(gpus), every=5, level="standard")
    assert parts == {Part("link", (1, 2)), Part("link", (2, 1))}, look


def test_what_does_not_come_again_is_said() -> None:
    calls = itertools.count()
    parts, (look,), _ = looked(4, lambda gpus, _: next(calls) == 0)
    assert look.seen == ("did not fail again in 4 repeats on the same GPUs",)
    assert not parts  # it failed, and the report says so; the part is unknown


def test_second_looks_end_when_their_time_is_over_and_conclude_nothing() -> None:
    pool = Pool(lambda gpus, _: {0, 2} <= set(gpus))
    node, log = node_of(pool, 4), pool.log
    node.on_ranks("collectives", collective)
    passed = itertools.count(0.0, LOCALISATION_SECONDS["quick"] / 2)  # each look at the clock takes half of the time
    (look,) = look_again(node, log, clock=lambda: next(passed))
    assert look.seen == ("a second look did not end: the time for all of them, 60 s, was over",)
    assert not look.follows_rank and look.group == (0, 1, 2, 3)
    assert len(pool.calls) == 3
    assert log.sections[-1].ended >= log.sections[-1].started


def controlled(wrong: Rule, every: int = 1) -> tuple[Look, Pool]:
    """Return the look of a control of a call that has failed, and the pool."""
    pool = Pool(wrong, every)
    node = node_of(pool, 2)
    looks: list[Look] = []
    node.on_failed = lambda call, failed: looks.append(control(node, call))
    for _ in range(every):
        node.on_ranks("collectives", collective)
    (look,) = looks
    return look, pool


def test_a_failure_that_needs_what_ran_before_accuses_no_part() -> None:
    look, pool = controlled(lambda gpus, environment: CONTROL not in environment)
    assert look.needs_history and "GPUs 0 and 1 does not come again in 3 fresh processes" in look.seen[0]
    fresh = [environment[CONTROL] for environment in pool.environments if CONTROL in environment]
    assert len(fresh) == len(set(fresh)) == 3, "each in processes of its own"
    observations = list(pool.log.observations())
    failed = [number for number, entry in enumerate(observations) if entry.outcome == "failed"]
    explanation = explain(observations, (0, 0), needs_history=range(len(observations)))
    assert (explanation.parts, explanation.unexplained) == ({}, tuple(failed))


@pytest.mark.parametrize(
    ("wrong", "every", "calls"),
    [
        (lambda gpus, environment: True, 1, 1),  # the first fresh processes fail, too
        (lambda gpus, environment: CONTROL not in environment, 2, 5),  # not each time in those of the run
        (lambda gpus, environment: True, 3, 3),  # now and then
    ],
)
def test_hardware_stays_accused(wrong: Rule, every: int, calls: int) -> None:
    look, pool = controlled(wrong, every)
    assert not look.needs_history and not look.seen
    assert len(pool.calls) - every <= calls


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (lambda gpus, environment: 1 if CONTROL not in environment else False, set()),
        (lambda gpus, environment: 1, {Part("gpu", (1,))}),  # also in fresh processes
    ],
)
def test_a_run_accuses_only_what_fails_in_fresh_processes(wrong: Rule, parts: set[Part]) -> None:
    pool = Pool(wrong)
    run = object.__new__(Run)
    run.log, run.looks, run._of_history, run._controlled = pool.log, [], set(), set()
    run.node = node_of(pool, 3)
    run.node.on_failed = run._control
    for case in range(6):
        run.node.on_ranks("collectives", collective, environment={"CASE": str(case)})
    explanation = run._explained(tuple(pool.log.observations()))
    assert set(explanation.parts) == parts and bool(explanation.unexplained) == (not parts)
    assert len(pool.calls) <= 6 + 2 * 6, "a few controls of each check suffice"
