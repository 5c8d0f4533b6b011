"""Rows of options that have each pair of values."""

from __future__ import annotations

import itertools

from mgpu_check.oracles.pairs import drawn_rows, in_pairs

OPTIONS = {"a": (1, 2), "b": (False, True), "c": ("x", "y", "z"), "d": (None, 0, 1)}


def pairs(rows):
    return {frozenset(pair) for row in rows for pair in itertools.combinations(row.items(), 2)}


def test_each_pair_of_values_occurs_in_few_rows():
    rows = in_pairs(OPTIONS)
    every = itertools.product(*OPTIONS.values())
    assert pairs(rows) == pairs([dict(zip(OPTIONS, values, strict=True)) for values in every])
    assert 9 <= len(rows) <= 12
    assert all(row.keys() == OPTIONS.keys() for row in rows)
    assert rows == in_pairs(OPTIONS)


def test_what_is_not_allowed_together_is_left_out():
    def allowed(row):
        return not (row.get("b") and row.get("c") == "x")

    rows = in_pairs(OPTIONS, allowed)
    assert all(map(allowed, rows))
    assert pairs(in_pairs(OPTIONS)) - pairs(rows) == {frozenset({("b", True), ("c", "x")})}


def test_few_examples_take_a_share_of_the_rows_with_each_value_and_over_seeds_all():
    rows = in_pairs(OPTIONS)
    assert drawn_rows(OPTIONS, seed=5, more=True) == rows
    shares = [drawn_rows(OPTIONS, seed=seed, more=False) for seed in range(4)]
    assert {str(row) for share in shares for row in share} == set(map(str, rows))
    for share in shares:
        assert {item for row in share for item in row.items()} == {item for row in rows for item in row.items()}
        assert len(share) <= len(rows) // 4 + 3
