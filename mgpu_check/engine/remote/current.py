"""Hold the driver of this process. Every pytest run imports this module, so it must not import the driver's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mgpu_check.engine.remote.driver import Driver

_driver: Driver | None = None


def become(one: Driver) -> None:
    global _driver
    _driver = one


def driver() -> Driver | None:
    """Return the driver of this process; None in a run without a launcher."""
    return _driver
