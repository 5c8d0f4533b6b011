"""Strategies of transformer training."""

from __future__ import annotations

from hypothesis import strategies as st

from mgpu_check.acceptance.training.cases import OPTIMIZERS, PRECISIONS, TransformerCase


@st.composite
def transformers(draw: st.DrawFn, precision: str) -> TransformerCase:
    """Draw cases of a precision, with the smallest sizes.

    The simplest case differs between precisions, so that one example per precision covers all variants.
    """
    place = PRECISIONS.index(precision)

    def either(number: int, values: tuple[object, object]) -> object:
        return draw(st.sampled_from(values if not number % 2 else values[::-1]))

    return TransformerCase(
        precision=precision,
        optimizer=str(either(place, OPTIMIZERS)),
        tied=bool(either(place // 2, (False, True))),
        dropout=bool(either((place + 1) // 2, (False, True))),
        seed=draw(st.integers(0, 999)),
    )
