"""Register planted faults that are one expression each, as rows of a table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from mgpu_check.suite.common.faults.breaking import Planter
from mgpu_check.suite.common.faults.registry import row
from mgpu_check.suite.common.faults.when import When

__all__ = ["FaultRow", "register"]


class FaultRow(NamedTuple):
    """A fault; see `mgpu_check.suite.common.faults.registry.fault`.

    Attributes:
        by: plants `change`.
        when: the calls that it affects: as a condition that selects them, or in words if `change` or `by` selects them.
    """

    name: str
    summary: str
    caught_by: str | tuple[str, ...]
    by: Planter
    change: Callable[..., Any]
    when: When | str = ""
    least_gpus: int = 1


def register(module: str, *rows: FaultRow) -> None:
    """Register faults for the property of `module`."""
    for name, summary, caught_by, by, change, when, least_gpus in rows:
        checks = (caught_by,) if isinstance(caught_by, str) else caught_by
        row(
            module,
            name,
            summary,
            *checks,
            plant=functools.partial(_planted, by, change, when),
            condition=str(when),
            least_gpus=least_gpus,
        )


def _planted(by: Planter, change: Callable[..., Any], when: When | str) -> AbstractContextManager[None]:
    return by(when.guards(change) if isinstance(when, When) else change)
