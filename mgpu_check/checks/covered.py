"""Tell what a check goes through besides what its examples were given, for the closing table.

The table shows the arguments of each example. A check that enumerates in itself says what, in one line, in whatever process::

    covered(dtype=[str(case.dtype) for case in cases], elements=[case.numel for case in cases])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_check.checks.hearing import Channel

__all__ = ["covered", "heard_by"]

_facts = Channel[Mapping[str, Any]]()

heard_by = _facts.heard_by
"""Have a function told what checks in this process go through, for the time of the context."""


def covered(**facts: Any) -> None:
    """Tell what is gone through: by name a word, a number, or a list of them. Of ranks the first one is heard."""
    _facts.tell(
        {name: sorted(value) if isinstance(value, (set, frozenset)) else value for name, value in facts.items()}
    )
