"""The sizes of the batches that the gate for steps tries."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from mgpu_check.gates.search.scenario_search import families
from mgpu_check.gates.search.scenarios import CHANGES


def sizes_of(family):
    """Return the sizes of some scenarios; none where no size is of the family's kind."""
    found: set[Any] = set()
    if family.scenarios.is_empty:
        return found

    @settings(max_examples=40, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(family.scenarios)
    def note(scenario):
        found.add(scenario.samples)

    with contextlib.suppress(Unsatisfiable):
        note()
    return found


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (6, {6}),
        ([4, 8], {4, 8}),
        (st.sampled_from([4, 12]), {4, 12}),
        (lambda world: st.just(3 * world), {6}),
        (lambda world: [world, 5], {2, 5}),
        (range(2, 12, 2), {2, 4, 6, 8, 10}),
        ("divisible", {2, 4, 6, 8}),
        (None, {1, 2, 3, 4, 5, 6, 7, 8, 9, 11}),
    ],
    ids=["one", "several", "a strategy", "a function", "a function to several", "a range", "divisible", "all"],
)
def test_sizes_are_as_given(sizes, expected):
    found: set[Any] = set()
    for family in families([(2, ())], sizes, None, 24):
        if family.name not in CHANGES:
            found |= sizes_of(family)
    assert found == expected


@pytest.mark.parametrize("sizes", ["divisible", None])
def test_few_examples_have_several_sizes_and_begin_with_the_smallest(sizes):
    per_rank = []
    kinds = {family.name for family in families([(2, ()), (4, ())], sizes, None, 12)}
    assert {"scaled", "ragged", "sorted", "duplicated", "permuted"} <= kinds, "each is there for some mistake"
    for family in families([(2, ()), (4, ())], sizes, None, 12):
        if family.scenarios.is_empty:
            continue

        @settings(
            max_examples=family.examples, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        @given(family.scenarios)
        def note(scenario):
            per_rank.append(scenario.samples / scenario.world_size)

        note()
    assert {1, 2, 3} <= set(per_rank) and max(per_rank) >= 3
    assert per_rank[0] == 1
