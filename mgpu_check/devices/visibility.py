"""Restrict a process to some real devices, and let it verify them by UUID."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mgpu_check.devices.placement import Slot


@dataclass(frozen=True)
class Mask:
    """The devices that are visible to a process.

    Attributes:
        environment: the variables that hide all other devices.
        uuids: UUIDs of the visible devices, in order, for the process to verify; empty if they are unknown.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    uuids: tuple[str, ...] = ()


Masks = Callable[[Sequence[Slot]], Mask]
"""Return the mask that makes exactly these devices of a host visible to a process."""
