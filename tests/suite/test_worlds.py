"""Drawn numbers of devices and places follow the run's number of devices at the time of the draw."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mgpu_check import settings, strategies
from mgpu_check.suite.mismatch.cases import GROUPS

T = TypeVar("T")


@pytest.fixture
def run_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give this process the settings of a run with the given number of devices."""

    def activate(count: int) -> None:
        run = settings.resolve({"gpus": str(count)}, {}, {})
        monkeypatch.setattr(settings, "active", lambda: run)

    return activate


def drawn(strategy: st.SearchStrategy[T], count: int = 200) -> set[T]:
    """The different values among `count` examples."""
    found: set[T] = set()

    @hypothesis_settings(max_examples=count, phases=[Phase.generate], database=None, derandomize=True)
    @given(strategy)
    def collect(value: T) -> None:
        found.add(value)

    collect()
    return found


def test_counts_reach_from_least_to_all(run_with: Callable[[int], None]) -> None:
    worlds, devices = strategies.world_sizes(), strategies.device_counts(2)
    run_with(4)
    assert drawn(worlds) == {1, 2, 3, 4}
    assert drawn(devices) == {2, 3, 4}
    assert drawn(strategies.world_sizes(most=2)) == {1, 2}
    run_with(2)
    assert drawn(worlds) == {1, 2}
    assert drawn(strategies.all_devices()) == {2}


def test_places_and_pairs(run_with: Callable[[int], None]) -> None:
    run_with(2)
    assert drawn(strategies.places()) == {"cpu", "cuda:0", "cuda:1"}
    assert drawn(strategies.places(cpu=False)) == {"cuda:0", "cuda:1"}
    pairs = drawn(strategies.device_pairs())
    assert len(pairs) == 6
    assert all(first != second for first, second in pairs)


def test_too_few_devices_are_named(run_with: Callable[[int], None]) -> None:
    run_with(1)
    with pytest.raises(ValueError, match="at least 2 were asked for, but the run has 1"):
        drawn(strategies.world_sizes(2))
    with pytest.raises(ValueError, match="cpu=False needs two devices"):
        drawn(strategies.device_pairs(cpu=False))


def test_tables_of_operators_have_each_operator_on_each_device(run_with: Callable[[int], None]) -> None:
    run_with(3)
    for table in drawn(strategies.operator_tables(must_raise=True)):
        assert all(case.must_raise for case in table.cases())
        assert len({(case.operator, case.first) for case in table.cases() if case.operator == "add"}) == 4
    for table in drawn(strategies.operator_tables(must_raise=False, only="copies")):
        assert {case.operator for case in table.cases()} == {"copy_", "slice assignment", "to", "load_state_dict"}
        assert {place for case in table.cases() for place in (case.first, case.second)} == {
            "cpu",
            "cuda:0",
            "cuda:1",
            "cuda:2",
        }
    run_with(1)
    (table, *_) = drawn(strategies.operator_tables(must_raise=True, without=("scalars",)))
    assert all("cpu" in (case.first, case.second) for case in table.cases())
    assert not {case.operator for case in table.cases()} & set(GROUPS["scalars"])


@pytest.mark.parametrize("count", [1, 3, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4, 8))])
def test_splits_cover_the_sizes_that_matter(run_with: Callable[[int], None], count: int) -> None:
    run_with(count)
    found = drawn(strategies.splits(leaves=True))
    spread = {(split.size, split.devices) for split in found}
    assert any(size == 0 for size, _ in spread)
    assert any(size == devices for size, devices in spread)
    assert any(size > devices and size % devices == 0 for size, devices in spread)
    assert {devices for _, devices in spread} >= {1, count}
    if count > 1:
        assert any(0 < size < devices for size, devices in spread)
        assert any(size > devices and size % devices for size, devices in spread)
        assert {split.dim for split in found} >= {0, 1, -1}


def test_pairs_of_worlds_begin_with_the_largest_and_the_one_below(run_with):
    run_with(4)
    assert drawn(strategies.world_pairs()) == {(4, 3), (4, 2), (4, 1)}
    assert drawn(strategies.world_pairs(), 1) == {(4, 3)}
    assert drawn(strategies.world_pairs(least=2, most=3)) == {(3, 2)}
    assert drawn(strategies.world_pairs(least=4)) == {(4,)}
    assert drawn(strategies.large_worlds(), 1) == {4}
    assert drawn(strategies.large_worlds(least=2)) == {2, 3, 4}


def test_orders_of_devices_are_not_ascending_only(run_with):
    run_with(3)
    found = drawn(strategies.device_orders(least=2))
    assert drawn(strategies.device_orders(least=2), 1) == {(2, 1, 0)}
    assert found == {order for size in (2, 3) for order in itertools.permutations(range(3), size)}
