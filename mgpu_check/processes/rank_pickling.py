"""What ranks pickle: their exceptions, in a form that the pytest process can show, and functions and classes, by
value, for processes that they spawn, if `multiprocessing` cannot name them.

`multiprocessing` pickles functions and classes by the name of their module. The functions of tests came to the
rank by value, so their module may be missing in the spawned process, or be another one.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
import types
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

from mgpu_check.processes import channel, pickling
from mgpu_check.processes.pickling import Pickler
from mgpu_check.processes.tracebacks import is_engine

EXPLAIN = "_mgpu_check_explain"
"""Attribute of an exception: a function that renders a fuller traceback, set by a wrapper around the call."""

_MOST_CHAINED = 20  # exceptions that a traceback shows
_MOST_TEXT = 100_000  # characters at its beginning, and at its end

# Keyed by module and name, because this module must not import pytest or Hypothesis. Some of pytest's exceptions have
# `__module__` "builtins".
_KINDS: dict[tuple[str, str], Any] = {
    ("builtins", "Skipped"): "skip",
    ("unittest.case", "SkipTest"): "skip",
    ("_pytest.outcomes", "Skipped"): "skip",
    ("_pytest.outcomes", "XFailed"): "xfail",
    ("hypothesis.errors", "UnsatisfiedAssumption"): "reject",
}


def _kind(error: BaseException) -> Any:
    class_names = ((base.__module__, base.__qualname__) for base in type(error).__mro__)
    return next((_KINDS[name] for name in class_names if name in _KINDS), "error")


def _message(error: BaseException) -> str:
    try:
        return str(error).strip()
    except BaseException as broken:  # the error to report is `error`
        return f"<str() of it raised {type(broken).__name__}>"


def failure_of(error: BaseException) -> channel.RaisedInRank:
    origin = traceback.extract_tb(error.__traceback__)
    # Skip the wrappers around C++ methods: Hypothesis would confuse all failures that are raised in the same wrapper.
    others = [frame for frame in origin if not is_engine(frame.filename)] or origin
    last = others[-1] if others else None
    message = _message(error)
    return channel.RaisedInRank(
        kind=_kind(error),
        type=type(error).__name__,
        message=next(iter(message.splitlines()), ""),
        text=clipped(_render(error)),
        filename=last.filename if last else "",
        lineno=(last.lineno or 1) if last else 1,
        pickled=_pickled(error),
    )


def _render(error: BaseException) -> str:
    with shortened(error):
        rendered = traceback.TracebackException.from_exception(error)
    todo = [rendered]
    while todo:
        summary = todo.pop()
        kept = [frame for frame in summary.stack if not is_engine(frame.filename)]
        summary.stack = traceback.StackSummary.from_list(kept or list(summary.stack))
        todo += [
            linked
            for linked in (summary.__cause__, summary.__context__, *(summary.exceptions or ()))
            if linked is not None
        ]
    return "".join(rendered.format()).rstrip()


@contextlib.contextmanager
def shortened(error: BaseException) -> Iterator[None]:
    """Cut the chain of exceptions behind `error` for a while: rendering thousands exceeds Python's recursion limit."""
    last = error
    for _ in range(_MOST_CHAINED):
        behind = last.__cause__ if last.__cause__ is not None or last.__suppress_context__ else last.__context__
        if behind is None:
            yield
            return
        last = behind
    cut = last.__cause__, last.__context__, last.__suppress_context__
    last.__cause__ = last.__context__ = None
    last.add_note("[the exceptions before this one are left out]")
    try:
        yield
    finally:
        last.__cause__, last.__context__, last.__suppress_context__ = cut
        last.__notes__.pop()


def clipped(text: str) -> str:
    """Return `text`, without its middle if it is very long."""
    if len(text) <= 2 * _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]}\n[{len(text) - 2 * _MOST_TEXT} characters are left out]\n{text[-_MOST_TEXT:]}"


def without_engine(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Return `tb` from its first frame outside the engine and its wrappers."""
    while tb is not None and tb.tb_next is not None and is_engine(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def _pickled(error: BaseException) -> bytes | None:
    explanation = getattr(error, "__dict__", {}).pop(EXPLAIN, None)
    try:
        return pickling.dumps(error)
    except BaseException:  # pickling runs code of the exception's class
        return None
    finally:
        if explanation is not None:
            setattr(error, EXPLAIN, explanation)


def give_by_value() -> None:
    """Make `multiprocessing` in this process pickle functions and classes of test modules by value."""
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign,assignment]


def _reduce(pickler: ForkingPickler, value: object) -> Any:
    if isinstance(value, (types.FunctionType, type)) and pickling.named_like(value) is not value:
        buffer = io.BytesIO()
        Pickler(buffer).dump(value)
        return pickle.loads, (buffer.getvalue(),)
    return NotImplemented
