"""Strategies of operators with operands on two devices."""

from __future__ import annotations

from hypothesis import strategies as st

from mgpu_check.specs.operators import GROUPS, OPERATORS, OperatorCase, placement
from mgpu_check.strategies.tensors import seeds
from mgpu_check.strategies.worlds import all_pairs

__all__ = ["operator_cases"]


@st.composite
def operator_cases(
    draw: st.DrawFn, *, must_raise: bool, only: str | None = None, without: tuple[str, ...] = ()
) -> OperatorCase:
    """Draw operators over two different places, all of which must raise, or all of which must work.

    Args:
        must_raise: which of the two.
        only: the name in `GROUPS` to draw from.
        without: names in `GROUPS` to leave out.
    """
    left_out = {name for group in without for name in GROUPS[group]}
    names = [name for name in (GROUPS[only] if only else OPERATORS) if name not in left_out]
    pairs = all_pairs()
    # The operator is drawn first: some have few pairs on which they must work, and would seldom be met there.
    fitting = {
        name: [pair for pair in pairs if (placement(*pair) in OPERATORS[name].raises) == must_raise] for name in names
    }
    operator = draw(st.sampled_from([name for name, places in fitting.items() if places]))
    first, second = draw(st.sampled_from(fitting[operator]))
    return OperatorCase(operator, first, second, draw(st.integers(1, 4)), draw(seeds()))
