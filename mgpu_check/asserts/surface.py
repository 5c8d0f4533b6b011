"""Report calls of torch, as classes of their arguments, from any process to the run.

A rank reports to the pytest process, and only what it has not reported before. Without a listener nothing is recorded.
"""

from __future__ import annotations

from mgpu_check.asserts.hearing import Hearing

Call = tuple[str, str, str]
"""A function, one of its parameters, and a class of a value; the parameter "" has the class "called"."""

_calls = Hearing[tuple[Call, ...]]()

heard_by = _calls.heard_by
"""Call a function with the calls that are reported in this process, for the time of the context."""
tell = _calls.tell
"""Pass calls to the listener, if there is one."""
