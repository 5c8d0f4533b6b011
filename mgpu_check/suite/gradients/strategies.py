"""Strategies of training runs."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from mgpu_check.suite.gradients.cases import TrainingSpec


@st.composite
def trainings(
    draw: st.DrawFn,
    models: Sequence[str] = ("mlp",),
    *,
    batch: st.SearchStrategy[int] | None = None,
    steps: st.SearchStrategy[int] | None = None,
    windows: st.SearchStrategy[int] | None = None,
) -> TrainingSpec:
    """Draw training runs with even and uneven batches, of one to three steps.

    Args:
        models: names in `MODELS`; repeat a name to draw it more often.
        batch: samples in a batch; by default 1 to 13, so that some ranks get fewer samples than others, or none.
        steps, windows: as in `TrainingSpec`; by default 1 to 3 steps and one window.
    """
    return TrainingSpec(
        model=draw(st.sampled_from(tuple(models))),
        batch=draw(st.integers(1, 13) if batch is None else batch),
        steps=draw(st.integers(1, 3) if steps is None else steps),
        windows=1 if windows is None else draw(windows),
        momentum=draw(st.sampled_from((0.0, 0.9))),
        seed=draw(st.integers(0, 999)),
    )
