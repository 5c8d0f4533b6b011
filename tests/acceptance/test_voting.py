"""Votes among GPUs of one model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.acceptance.comparison import vote


@given(st.lists(st.integers(0, 3), max_size=9))
def test_a_majority_is_never_odd(values):
    ballots = dict(enumerate(values))
    for result in vote(ballots, dict.fromkeys(ballots, "A")):
        if result.decided:
            assert 2 * sum(value == result.usual for value in values) > len(values)
            assert {ballots[gpu] == result.usual for gpu in result.odd} == {False}
        else:
            assert result.odd == result.voters
