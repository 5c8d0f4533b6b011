"""Drawn numbers of devices and places follow the run's number of devices at the time of the draw."""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import mgpu_check.suite
from mgpu_check import settings, strategies
from mgpu_check.oracles import strategies as drawing

T = TypeVar("T")


@pytest.fixture
def run_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give this process the settings of a run with the given number of devices."""

    def activate(count: int) -> None:
        run = settings.resolve({"gpus": str(count)}, {}, {})
        monkeypatch.setattr(settings, "active", lambda: run)

    return activate


SUITE = Path(mgpu_check.suite.__path__[0])


def strategies_of(path: Path) -> dict[str, dict[str, str]]:
    """Return the strategies of each test in a file, with module-level names replaced by their values."""
    tree = ast.parse(path.read_text())
    named = {
        ast.unparse(node.targets[0]): ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)
    }
    found = {}
    for node in (one for one in tree.body if isinstance(one, ast.FunctionDef)):
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "given":
                given = {one.arg: ast.unparse(one.value) for one in call.keywords}
                found[node.name] = {str(name): named.get(text, text) for name, text in given.items()}
    return found


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


PROMISING = re.compile(r"\b(world_pairs|large_worlds|device_orders|mostly_all|worlds)\(")
"""Strategies whose first example has all devices, or as many as their argument `most` lets them."""


def checks_of_many() -> list[Any]:
    """Return a row for each test of the suite, and each argument, that promises to begin with all devices."""
    return [
        pytest.param(f"mgpu_check.suite.{path.parent.name}.{path.stem}", name, argument, text, id=f"{name}-{argument}")
        for path in sorted(SUITE.glob("*/test_*.py"))
        for name, strategies in strategies_of(path).items()
        for argument, text in strategies.items()
        if PROMISING.search(text)
    ]


class Enough(Exception):
    """Two examples were drawn."""


def first_examples_of(test: Any, count: int, seed_of_run: int) -> list[dict[str, Any]]:
    """Return the first examples of a test of the suite, which is not run."""
    examples: list[dict[str, Any]] = []
    own = test._hypothesis_internal_use_settings

    @seed(seed_of_run)
    @hypothesis_settings(own, max_examples=count, phases=[Phase.generate], database=None)
    @given(**{name: value for name, value in test.hypothesis._given_kwargs.items() if name != "data"})
    def record(**example: Any) -> None:
        examples.append(example)
        if len(examples) > 1:
            raise Enough

    with contextlib.suppress(Enough):
        record()
    return examples


@pytest.mark.parametrize(("module", "name", "argument", "text"), checks_of_many())
def test_a_check_that_promises_all_devices_has_them_in_its_first_examples(
    run_with: Callable[[int], None], module: str, name: str, argument: str, text: str
) -> None:
    run_with(5)
    test = getattr(importlib.import_module(module), name)
    _, standard, quick = drawing._settings_by_id[id(test._hypothesis_internal_use_settings)]
    most = min([5, *map(int, re.findall(r"most=(\d)", text))])
    for count in {quick or 12, standard}:
        drawn_sizes = [example[argument] for example in first_examples_of(test, count, seed_of_run=count)]
        assert len(drawn_sizes) >= min(count, 2), "Hypothesis rejected an example"
        sizes = [len(size) if "device_orders" in text else size for size in drawn_sizes]
        if "world_pairs" in text:
            assert sizes[0] == (most, most - 1), "all devices, and an odd size"
        else:
            assert sizes[0] == most
        if "device_orders" in text:
            assert drawn_sizes[0][0] == 4, "the last device is first"


def test_the_seed_of_a_test_of_one_example_differs_between_runs() -> None:
    def first_seed(count: int, run: int) -> int:
        values: list[int] = []

        @seed(run)
        @hypothesis_settings(max_examples=count, phases=[Phase.generate], database=None)
        @given(strategies.seeds())
        def collect(value: int) -> None:
            values.append(value)

        collect()
        return values[0]

    assert len({first_seed(1, run) for run in range(6)}) > 3
    assert {first_seed(2, run) for run in range(6)} == {0}


def test_every_seed_is_drawn_by_the_strategy_that_says_why():
    tests = {
        f"{path.parent.name}::{name}": strategies
        for path in SUITE.glob("*/test_*.py")
        for name, strategies in strategies_of(path).items()
    }
    assert len(tests) > 130
    seeds = {strategies["seed"] for strategies in tests.values() if "seed" in strategies}
    assert seeds == {"strategies.seeds()", "seeds()", "calls.seeds"}
    listed = [name for name, strategies in tests.items() if set(strategies) <= {"seed", "size", "sizes", "order"}]
    assert len(listed) < 66  # a test draws more than a seed where a smaller example simplifies a failure
