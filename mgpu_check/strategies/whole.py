"""Strategies of training runs in whole numbers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from mgpu_check.specs.whole import OPTIMIZERS, PLAIN, WholeRun
from mgpu_check.strategies.worlds import all_devices, world_sizes

__all__ = ["PLAIN", "WholeRun", "mostly_all", "whole_runs"]


@st.composite
def whole_runs(
    draw: st.DrawFn,
    models: Sequence[str] = ("mlp",),
    *,
    least: int = 1,
    most: int = 3,
    rows: Sequence[int] = (8, 5, 13, 24, 12, 9, 7, 2, 1),
    optimizers: Sequence[str] = OPTIMIZERS,
    small: bool = False,
) -> tuple[WholeRun, ...]:
    """Draw one run of each of the models.

    Numbers of rows, optimizers and numbers of steps go round among the models, from a place that is drawn: so the first
    example, which is always the same, has even and uneven batches, too.

    Args:
        least, most: steps.
        rows: of a batch.
        small: as in `WholeRun`.
    """
    first, seed = draw(st.integers(0, 999)), draw(st.integers(0, 999))
    return tuple(
        WholeRun(
            model,
            rows[place % len(rows)],
            least + place % (most - least + 1),
            optimizers[place % len(optimizers)],
            small,
            seed + place,
        )
        for place, model in enumerate(models, start=first)
    )


def mostly_all(least: int = 1) -> st.SearchStrategy[int]:
    """Draw world sizes, two of three times that of all devices: what is wrong with one of them is seen in few examples."""
    return st.one_of(all_devices(), all_devices(), world_sizes(least=least))
