"""Values that are not finite: where they begin, equality ends."""

from __future__ import annotations

import math
from functools import partial

import torch

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.rounding import Repeat, Rounding, repeatability
from mgpu_check.compare.verdict import verdict_of
from tests.compare.training import Training, case, checks, having, own, start, summary, times


def no_numbers(first, value=math.nan):
    """From that step on, counted from 0, on one device and on the ranks."""
    return times(lambda number: value if number >= first else 1)


def overflow(made):
    made.steps[2].parameters.update({"net.bias": summary(torch.full((6,), math.inf))})


AT_STEP_3 = "at step 3, on one device, the gradient of net.weight is not finite"
END = "; later values are not finite\n"
ends = partial(case, kind="equal", headline="equal: steps 1 to 2 on 2 ranks", remark=AT_STEP_3, said=END, compared=2)
DOUBLED_AT_STEP_3 = times(lambda number: 2 if number == 2 else 1)


@checks(
    on_ranks_only=case(times(lambda number: math.nan if number == 2 else 1), step=3),
    nan=ends(one=no_numbers(2)),
    inf=ends(one=no_numbers(2, math.inf)),
    from_the_first_step_on=case(
        kind="not comparable", one=no_numbers(0), compared=0,
        headline="not a number from the first step on: on one device the gradient of net.weight",
    ),
    after_a_difference=case(times((1, 1.7, math.nan).__getitem__), one=no_numbers(2), step=2),
    after_gradients=case(kind="equal", one=having(change=overflow), compared=2),
    after_wrong_gradients=case(
        DOUBLED_AT_STEP_3, "differs", "world-size-factor", one=having(change=overflow), step=3, tensor="gradient"
    ),
    and_fewer_steps=case(
        own(steps=lambda of: 3 if of.world == 1 else 2), one=no_numbers(1), compared=1,
        headline="the first 1 common steps are equal, and later values are not finite",
    ),
)  # fmt: skip
def test_where_numbers_end_equality_ends(check):
    check()


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


def test_what_follows_the_last_numbers_is_not_asked_to_repeat_itself():
    runs = [Training(), Training(0, 2), Training(1, 2)]
    for training in runs:
        no_numbers(2)(training)
    reference, *ranks = (training.trace() for training in runs)
    aligned, rounding = Aligned(reference, ranks), Rounding(reference, [reference])
    assert verdict_of(aligned, rounding, Repeat(2, "")).kind == "equal"
    assert verdict_of(aligned, rounding, Repeat(1, "")).kind == "not comparable"


def test_a_start_without_numbers_repeats_itself():
    training = Training()
    training.begin = [value * math.nan for value in start()]
    assert repeatability(training.trace(), training.trace()) is None
