"""Values that are not finite: where they begin, equality ends."""

from __future__ import annotations

import math

import pytest
import torch

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.rounding import Repeat, Rounding, repeatability
from mgpu_check.compare.verdict import verdict_of
from tests.compare.training import Training, having, start, summary, times, verdict


def test_no_number_hides():
    found = verdict(times(lambda number: math.nan if number == 2 else 1))
    assert (found.kind, found.step) == ("differs", 3)


def no_numbers(first, value=math.nan):
    """From that step on, counted from 0, on one device and on the ranks."""
    return times(lambda number: value if number >= first else 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_where_numbers_end_equality_ends(value):
    found = verdict(one=no_numbers(2, value))
    assert (found.kind, found.compared) == ("equal", 2)
    assert found.report.headline.startswith("equal: steps 1 to 2 on 2 ranks")
    assert found.report.headline.endswith("; later values are not finite")
    assert "at step 3, on one device, the gradient of net.weight is not finite" in found.report.remarks[0]


def test_no_numbers_from_the_first_step_on():
    found = verdict(one=no_numbers(0))
    assert (found.kind, found.compared) == ("not comparable", 0)
    assert "not a number from the first step on: on one device the gradient of net.weight" in found.report.headline


def test_a_difference_before_numbers_end():
    found = verdict(times((1, 1.7, math.nan).__getitem__), one=no_numbers(2))
    assert (found.kind, found.step) == ("differs", 2)


def test_numbers_that_ranks_have_where_one_device_has_none():
    single, moved = Training(), Training()
    no_numbers(2)(single)
    no_numbers(2)(moved)
    reference, ranks = single.trace(), [Training(rank, 2).trace() for rank in range(2)]
    found = verdict_of(Aligned(reference, ranks), Rounding(reference, [moved.trace()]), None)
    assert (found.kind, found.step, found.tensor, found.ranks) == ("differs", 3, "gradient", (0, 1))
    # Where rounding makes numbers of them, too, that tells nothing.
    found = verdict_of(Aligned(reference, ranks), Rounding(reference, [Training().trace()]), None)
    assert (found.kind, found.compared) == ("equal", 2)


def test_gradients_that_lead_to_no_numbers_are_compared():
    def no_numbers_after(made):
        made.steps[2].parameters.update({"net.bias": summary(torch.full((6,), math.inf))})

    overflow = having(change=no_numbers_after)
    found = verdict(one=overflow)
    assert (found.kind, found.compared) == ("equal", 2)
    found = verdict(times(lambda number: 2 if number == 2 else 1), one=overflow)
    assert (found.kind, found.step, found.tensor) == ("differs", 3, "gradient")
    assert found.report.mistakes == ("world-size-factor",)


def test_what_follows_the_last_numbers_is_not_asked_to_repeat_itself():
    runs = [Training(), Training(0, 2), Training(1, 2)]
    for training in runs:
        no_numbers(2)(training)
    reference, *ranks = (training.trace() for training in runs)
    aligned, rounding = Aligned(reference, ranks), Rounding(reference, [reference])
    assert verdict_of(aligned, rounding, Repeat(2, "")).kind == "equal"
    assert verdict_of(aligned, rounding, Repeat(1, "")).kind == "not comparable"


def test_another_number_of_steps_after_the_last_numbers():
    def change(training):
        training.steps = 3 if training.world == 1 else 2

    found = verdict(change, one=no_numbers(1))
    assert (found.kind, found.compared) == ("differs", 1)
    assert "the first 1 common steps are equal, and later values are not finite" in found.report.headline


def test_a_start_without_numbers_repeats_itself():
    training = Training()
    training.begin = [value * math.nan for value in start()]
    assert repeatability(training.trace(), training.trace()) is None
