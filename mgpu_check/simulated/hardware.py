"""The hardware of simulated devices, right or defect, below everything that computes, copies or reduces on them."""

from __future__ import annotations

__all__ = ["Defect"]


class Defect:
    """Something that is wrong with simulated hardware. What it overrides is called after the right thing was done."""
