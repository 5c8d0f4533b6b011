"""Strategies of exact training."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from mgpu_check.suite.common.exact_training.cases import ExactTraining


@st.composite
def exact_trainings(
    draw: st.DrawFn,
    *,
    hidden: Sequence[int] = (10, 7, 13),
    batch: Sequence[int] = (7, 8, 5, 2, 13),
    momentum: Sequence[float] = (0.5, 0.0),
) -> ExactTraining:
    """Draw exact training of a perceptron with one hidden layer, in two steps.

    Args:
        hidden, batch, momentum: the values to draw from, simplest first.
    """
    return ExactTraining(
        widths=(6, draw(st.sampled_from(tuple(hidden))), 5),
        batch=draw(st.sampled_from(tuple(batch))),
        momentum=draw(st.sampled_from(tuple(momentum))),
        seed=draw(st.integers(0, 999)),
    )
