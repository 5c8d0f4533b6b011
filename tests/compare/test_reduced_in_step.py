"""Optimizers that reduce the gradients of the ranks within their step, and keep states of a rank's own rows."""

from __future__ import annotations

import pytest

from tests.compare.conftest import script
from tests.compare.training import case, checks, gradients, having

REDUCED = script("reduced_in_step")


def test_gradients_may_be_reduced_within_the_step(compare):
    outcome = compare(REDUCED, code=0)
    assert "equal: 3 steps on 2 ranks train the same 4 parameters" in outcome.text
    assert "the gradients of 4 parameters differ between ranks before the step, and their mean is" in outcome.text
    assert outcome.json["not_compared"] == {}


@pytest.mark.slow  # beside the traces of such mistakes below
@pytest.mark.parametrize(
    ("old", "new", "tensor", "mistake"),
    [
        (
            "                if world > 1:\n",
            "                if world > 1 and shared:\n",
            "gradient",
            "gradients-not-synchronized",
        ),
        ("                    grad /= world\n", "", "parameter", "world-size-factor"),
        ('state["momentum"].mul_(0.9)', 'state["momentum"].mul_(0.9 / world)', "parameter", "optimizer-differs"),
    ],
)
def test_a_mistake_within_the_step_is_refuted(compare, changed, old, new, tensor, mistake):
    outcome = compare(changed(REDUCED, (old, new)), code=1)
    assert (outcome.json["tensor"], outcome.json["mistakes"]) == (tensor, [mistake])


def local(factor: float = 1.0, reduces: bool = False):
    """Gradients of two ranks that differ, and whose mean is a multiple of those of one device."""

    def change(training):
        sign = 1 if training.rank == 0 else -1
        training.gradient = lambda number: [factor * (g + sign * 0.5 * g.flip(0)) for g in gradients(number)]
        if reduces:
            training.reduced = lambda number: [factor * g for g in gradients(number)]

    return change


@checks(
    small_steps=case(local(), "differs", "gradients-not-synchronized", one=having(rate=1e-7, steps=2)),
    factor=case(local(0.5, reduces=True), "differs", "world-size-factor"),
    factor_of_what_is_not_reduced=case(local(0.5), "differs", "gradients-not-synchronized"),
    factor_without_a_name=case(local(1.7, reduces=True)),
)
def test_gradients_that_differ_before_the_step(check):
    """Steps smaller than the tolerance do not hide that nothing is reduced."""
    check()
