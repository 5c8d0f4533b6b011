"""Votes among GPUs of one model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.acceptance.comparison import Vote, vote


def test_the_odd_one_is_named_by_model():
    models = dict.fromkeys(range(4), "A") | dict.fromkeys(range(4, 7), "B")
    ballots = {0: 1, 1: 1, 2: 9, 3: 1, 4: 5, 5: 5, 6: 5}
    assert vote(ballots, models) == [Vote((0, 1, 2, 3), (2,), 1)]


def test_two_that_differ_have_no_majority():
    assert vote({0: 1, 5: 2}, {0: "A", 5: "A"}) == [Vote((0, 5), (0, 5), None)]
    assert vote({0: 1, 5: 2}, {0: "A", 5: "B"}) == []


def test_half_is_no_majority():
    (result,) = vote({0: 1, 1: 1, 2: 2, 3: 3}, dict.fromkeys(range(4), "A"))
    assert not result.decided and result.odd == (0, 1, 2, 3)


@given(st.lists(st.integers(0, 3), max_size=9))
def test_a_majority_is_never_odd(values):
    ballots = dict(enumerate(values))
    for result in vote(ballots, dict.fromkeys(ballots, "A")):
        if result.decided:
            assert 2 * sum(value == result.usual for value in values) > len(values)
            assert {ballots[gpu] == result.usual for gpu in result.odd} == {False}
        else:
            assert result.odd == result.voters
