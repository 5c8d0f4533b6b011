"""Choose which real devices a process sees: how it is told, and by what it knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mgpu_check.devices.placement import Slot

__all__ = ["Mask", "Masks"]


@dataclass(frozen=True)
class Mask:
    """The devices that a process is told to see.

    Attributes:
        environment: the variables that mask all others.
        uuids: of those that it must see, in this order; empty where they are not known, and not looked at.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    uuids: tuple[str, ...] = ()


Masks = Callable[[Sequence[Slot]], Mask]
"""The mask of a process that is to see these devices of its host."""
