"""The driver that this process is, if it is one. Apart, because every pytest run asks, and few are launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mgpu_check.engine.remote.driver import Driver

__all__ = ["become", "driver"]

_driver: Driver | None = None


def become(one: Driver) -> None:
    """Make this process `one`."""
    global _driver
    _driver = one


def driver() -> Driver | None:
    """Return what `become` was told last; None in a run that was not launched."""
    return _driver
