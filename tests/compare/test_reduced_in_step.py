"""Optimizers that reduce the gradients of the ranks within their step, and keep states of a rank's own rows."""

from __future__ import annotations

import pytest

from tests.compare.conftest import script
from tests.compare.training import gradients, verdict

REDUCED = script("reduced_in_step")


def test_gradients_may_be_reduced_within_the_step(compare):
    outcome = compare(REDUCED, code=0)
    assert "equal: 3 steps on 2 ranks train the same 4 parameters" in outcome.text
    assert "the gradients of 4 parameters differ between ranks before the step, and their mean is" in outcome.text
    assert outcome.json["not_compared"] == {}


@pytest.mark.parametrize(
    ("old", "new", "tensor", "mistake"),
    [
        (
            "                if world > 1:\n",
            "                if world > 1 and shared:\n",
            "gradient",
            "gradients-not-synchronized",
        ),
        pytest.param(
            *("                    grad /= world\n", "", "parameter", "world-size-factor"), marks=pytest.mark.slow
        ),
        pytest.param(
            *('state["momentum"].mul_(0.9)', 'state["momentum"].mul_(0.9 / world)', "parameter", "optimizer-differs"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mistake_within_the_step_is_refuted(compare, changed, old, new, tensor, mistake):
    outcome = compare(changed(REDUCED, (old, new)), code=1)
    assert (outcome.json["tensor"], outcome.json["mistakes"]) == (tensor, [mistake])


def test_steps_smaller_than_the_tolerance_do_not_hide_that_nothing_is_reduced():
    def slow(training):
        training.rate, training.steps = 1e-7, 2

    def own(training):
        sign = 1 if training.rank == 0 else -1
        training.gradient = lambda number: [g + sign * 0.5 * g.flip(0) for g in gradients(number)]

    found = verdict(own, one=slow)
    assert (found.kind, found.report.mistakes) == ("differs", ("gradients-not-synchronized",))


@pytest.mark.parametrize(
    ("factor", "reduces", "mistakes"),
    [(0.5, True, ("world-size-factor",)), (0.5, False, ("gradients-not-synchronized",)), (1.7, True, ())],
)
def test_a_factor_of_gradients_that_are_reduced_within_the_step(factor, reduces, mistakes):
    def own(training):
        sign = 1 if training.rank == 0 else -1
        training.gradient = lambda number: [factor * (g + sign * 0.5 * g.flip(0)) for g in gradients(number)]
        if reduces:
            training.reduced = lambda number: [factor * g for g in gradients(number)]

    found = verdict(own)
    assert (found.kind, found.report.mistakes) == ("differs", mistakes)
