"""Compute the speed of a PCIe link (PCI Express Base Specification)."""

from __future__ import annotations

from collections.abc import Mapping

TRANSFERS: Mapping[int, float] = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
"""Bits per second on one lane, in one direction, by generation."""

_DATA: Mapping[int, float] = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 242 / 256}
"""Share of these bits that carry data; the others belong to the encoding or correct errors."""


def bytes_per_second(generation: int, width: int) -> float:
    """Return the bytes of data per second that a link carries in one direction, before packet overhead.

    Raises:
        KeyError: an unknown generation.
    """
    return TRANSFERS[generation] * _DATA[generation] / 8 * width
