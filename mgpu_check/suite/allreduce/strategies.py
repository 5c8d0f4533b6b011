"""Strategies of the inputs of a reduction."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from mgpu_check.suite.allreduce.cases import REDUCIBLE, Contributions
from mgpu_check.suite.common.strategies.tensors import shapes, tensors
from mgpu_check.suite.common.tensors import LAYOUTS


@st.composite
def contributions(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = REDUCIBLE,
    layouts: Sequence[str] = LAYOUTS,
    values: Sequence[str] = ("exact", "random"),
    operations: Sequence[str] = ("sum",),
    min_dims: int = 0,
    min_size: int = 0,
) -> Contributions:
    """Draw the inputs of a reduction: vectors of up to 70 elements, few divisible by the world size; or tensors."""
    vector = st.integers(min_size, 70).map(lambda length: (length,))
    shape = draw(st.one_of(vector, shapes(min_dims, 4, min_size, 6)))
    operation = draw(st.sampled_from(tuple(operations)))
    return Contributions(draw(tensors(shape=shape, dtypes=dtypes, values=values, layouts=layouts)), operation)
