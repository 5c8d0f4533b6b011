"""Strategies of operators with operands on two devices."""

from __future__ import annotations

from hypothesis import strategies as st

from mgpu_check.suite.common.strategies import all_devices, seeds
from mgpu_check.suite.mismatch.operators import OperatorTable


@st.composite
def operator_tables(
    draw: st.DrawFn, *, must_raise: bool, only: str | None = None, without: tuple[str, ...] = ()
) -> OperatorTable:
    """Draw tables of operators: the number of rows, the data, and the pairs of devices.

    Args:
        must_raise: whether to take the cases that must raise, or those that must work.
        only: a name in `GROUPS`, to restrict the operators; None for all.
        without: names in `GROUPS` to leave out.
    """
    devices = draw(all_devices())
    turn = draw(st.integers(1, max(1, devices - 1)))
    return OperatorTable(must_raise, only, without, devices, turn, draw(st.integers(1, 4)), draw(seeds()))
