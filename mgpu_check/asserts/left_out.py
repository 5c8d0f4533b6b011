"""Report the cases that a check leaves out because this torch or these devices lack something.

The closing table names them, and a pass does not speak for them. Any process may report::

    left_out("interpolate", "this torch does not have it for all placements")
"""

from __future__ import annotations

from mgpu_check.asserts.hearing import Hearing

_cases = Hearing[tuple[str, str]]()

heard_by = _cases.heard_by
"""Call a function with the cases that checks in this process leave out, for the time of the context."""


def left_out(case: str, why: str) -> None:
    """Report a case that was left out, and why. Equal reports of several ranks count once."""
    _cases.tell((case, why))
