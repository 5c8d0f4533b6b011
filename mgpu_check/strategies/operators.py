"""Strategies of operators with operands on two devices."""

from __future__ import annotations

from hypothesis import strategies as st

from mgpu_check.specs.operators import OperatorTable
from mgpu_check.strategies.tensors import seeds
from mgpu_check.strategies.worlds import all_devices

__all__ = ["operator_tables"]


@st.composite
def operator_tables(
    draw: st.DrawFn, *, must_raise: bool, only: str | None = None, without: tuple[str, ...] = ()
) -> OperatorTable:
    """Draw rows, data, and which devices are paired, for all operators that must raise, or must work.

    Args:
        must_raise: which of the two.
        only: the name in `GROUPS` to take.
        without: names in `GROUPS` to leave out.
    """
    devices = draw(all_devices())
    turn = draw(st.integers(1, max(1, devices - 1)))
    return OperatorTable(must_raise, only, without, devices, turn, draw(st.integers(1, 4)), draw(seeds()))
