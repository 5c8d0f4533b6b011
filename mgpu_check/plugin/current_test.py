"""The state of the test that runs: a new one for each test."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mgpu_check.asserts.known_defects import Met


@dataclass
class CurrentTest:
    """What one test has done so far.

    Attributes:
        examples: number of examples, or plain runs, that it has completed.
        met: the known defects that it has met.
        left_out: the cases that it has left out, each with the reason.
        drawn: whether it draws examples.
        in_body: whether its body is running, not a fixture.
        not_seen: what the passes of its gates do not show.
        modules: the modules that are pickled by value for it: its own, and conftests.
    """

    examples: int = 0
    met: list[Met] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    drawn: bool = False
    in_body: bool = False
    not_seen: list[str] = field(default_factory=list)
    modules: list[types.ModuleType] = field(default_factory=list)
