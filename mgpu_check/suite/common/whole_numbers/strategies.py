"""Strategies of training runs in integers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from mgpu_check.suite.common.strategies.worlds import all_devices, is_only_example, world_sizes
from mgpu_check.suite.common.whole_numbers.cases import OPTIMIZERS, WholeRun


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
    """Draw one run for each model.

    Rows, optimizers and steps cycle through the models, from a drawn position. So the first example, which is always
    the same, already has even and uneven batches.

    Args:
        least, most: limits of the number of steps.
        rows: numbers of rows of a batch.
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


@st.composite
def mostly_all(draw: st.DrawFn, least: int = 1) -> int:
    """Draw world sizes; two of three examples, the first included, use all devices, so that few examples find an error
    of one device."""
    sizes = () if is_only_example() else (all_devices(), world_sizes(least=least))
    size: int = draw(st.one_of(all_devices(), *sizes))
    return size
