"""Report the cases that a check enumerates itself, for the closing table.

The table shows the arguments of each example. A check that enumerates further cases reports them in one line, in any
process::

    covered(dtype=[str(case.dtype) for case in cases], elements=[case.numel for case in cases])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_check.asserts.hearing import Hearing

_facts = Hearing[Mapping[str, Any]]()

heard_by = _facts.heard_by
"""Call a function with the facts that checks in this process report, for the time of the context."""


def covered(**facts: Any) -> None:
    """Report facts about the enumerated cases: each is a word, a number, or a list of them.

    On ranks, only the first counts.
    """
    _facts.tell(
        {name: sorted(value) if isinstance(value, (set, frozenset)) else value for name, value in facts.items()}
    )
