"""Calls of collectives that follow from a number: none that would be left out, and each way of calling."""

from __future__ import annotations

import pytest

from mgpu_check.suite.collectives import call_strategies as calls
from mgpu_check.suite.collectives.cases import COPYING, REDUCING, left_out

GROUPS = [(0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 2, 3)]


@pytest.mark.parametrize("seed", range(0, 60, 7))
def test_no_call_is_one_that_no_backend_takes(seed):
    drawn = [*calls.sizes(seed), *calls.asynchronous(seed), *calls.in_groups(GROUPS, seed)]
    assert [str(call) for call in drawn if left_out(call)] == []


@pytest.mark.parametrize("seed", range(0, 60, 7))
def test_every_collective_is_called_in_groups_on_devices_and_the_cpu(seed):
    places = {(call.function, call.place) for call in calls.in_groups(GROUPS, seed)}
    assert places == {(function, place) for function in (*REDUCING, *COPYING) for place in calls.PLACES}
    sums = {call.function for call in calls.in_groups(GROUPS, seed) if call.op == "SUM" and call.function in REDUCING}
    assert sums == set(REDUCING)
