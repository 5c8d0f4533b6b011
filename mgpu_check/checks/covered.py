"""Tell what a check goes through besides what its examples were given, for the closing table.

The table shows the arguments of each example. A check that enumerates in itself says what, in one line, in whatever process::

    covered(dtype=[str(case.dtype) for case in cases], elements=[case.numel for case in cases])
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["covered", "heard_by"]

_hear: Callable[[Mapping[str, Any]], None] | None = None


@contextlib.contextmanager
def heard_by(hear: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Have `hear` told what checks in this process go through, for the time of the context."""
    global _hear
    before, _hear = _hear, hear
    try:
        yield
    finally:
        _hear = before


def covered(**facts: Any) -> None:
    """Tell what is gone through: by name a word, a number, or a list of them. Of ranks the first one is heard."""
    if _hear is not None:
        _hear({name: sorted(value) if isinstance(value, (set, frozenset)) else value for name, value in facts.items()})
