"""Strategies of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from mgpu_check.suite.common.strategies.worlds import is_only_example
from mgpu_check.suite.common.tensors import DTYPES, LAYOUTS, TensorSpec, layouts_for


def seeds() -> st.SearchStrategy[int]:
    """Draw seeds for a spec's data; small numbers, so that a printed spec stays readable.

    A test draws a seed in place of data for one of these reasons. Sizes, roots, positions and orders have strategies of
    their own, because a smaller one simplifies a failure.

    - All elements must differ, or all sums must be exact, so that a misplaced, lost or rounded element shows. Drawn
      elements would repeat, and shrink to zeros.
    - The example is a table of all operators, dtypes, sizes or layouts. The first example must have all of it, and a
      failure names the wrong case and its first wrong element, so no smaller example would say more.
    - The seed itself is under test, as that of a generator or a sampler.

    A test of one example draws another seed in each run. A test of several begins with 0, and so with the first value
    of all its arguments.
    """
    return st.integers(0, 999).filter(lambda seed: seed or not is_only_example())


def dtypes(choices: Sequence[str] = DTYPES) -> st.SearchStrategy[str]:
    """Draw names of dtypes; simplest first."""
    return st.sampled_from(tuple(choices))


def layouts(dims: int) -> st.SearchStrategy[str]:
    """Draw names of layouts that exist for tensors with `dims` dimensions; shrinks to contiguous."""
    return st.sampled_from(layouts_for(dims))


def shapes(
    min_dims: int = 0, max_dims: int = 4, min_size: int = 0, max_size: int = 6
) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes with `min_dims` to `max_dims` dimensions of `min_size` to `max_size` each."""
    return st.lists(st.integers(min_size, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def tensors(
    draw: st.DrawFn,
    *,
    shape: st.SearchStrategy[tuple[int, ...]] | tuple[int, ...] | None = None,
    dtypes: Sequence[str] = DTYPES,
    values: Sequence[str] = ("distinct",),
    layouts: Sequence[str] = LAYOUTS,
) -> TensorSpec:
    """Draw specs of tensors: shape, dtype, layout, seed and kind of values.

    Args:
        shape: a shape, or a strategy of shapes; by default 0 to 4 dimensions of 0 to 6 elements.
        dtypes: the dtypes to draw from, simplest first.
        values: the kinds of values to draw from, simplest first.
        layouts: the layouts to draw from, simplest first; those that do not exist for the shape are left out.
    """
    drawn = shape if isinstance(shape, tuple) else draw(shapes() if shape is None else shape)
    possible = [name for name in layouts if name in layouts_for(len(drawn))] or ["contiguous"]
    return TensorSpec(
        drawn,
        draw(st.sampled_from(tuple(dtypes))),
        draw(st.sampled_from(possible)),
        draw(seeds()),
        draw(st.sampled_from(tuple(values))),
    )
