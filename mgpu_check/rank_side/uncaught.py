"""Exceptions in a rank that nobody can catch: those that end a thread, and those of finalizers, such as ``__del__``.

Python prints them and goes on. They are kept here until someone tells of them, as pytest does in its own process.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any

__all__ = ["Stray", "listen", "take"]

_MOST = 100  # that nobody has taken yet: a thread that is started for each step is not to fill the memory


@dataclass(frozen=True)
class Stray:
    """An exception or warning that no call reported.

    Attributes:
        warning: name of pytest's class of warnings for it.
        summary: what it has ended, in one line.
        text: the same with the traceback.
        file, line: where it was raised.
        error: the exception itself.
    """

    warning: str
    summary: str
    text: str
    file: str
    line: int
    error: BaseException | None

    @property
    def plain(self) -> tuple[str, str, str, int]:
        """The part that another process can be told: warning, text, file, line."""
        return self.warning, self.text, self.file, self.line


_found: deque[Stray] = deque(maxlen=_MOST)


def listen() -> None:
    """Keep them from now on, also where the code under test has set hooks of its own."""
    threading.excepthook = _of_thread
    sys.unraisablehook = _of_finalizer


def take() -> list[Stray]:
    """Return those that came since the last call."""
    taken = []
    while _found:
        taken.append(_found.popleft())
    return taken


def _of_thread(args: Any) -> None:
    name = "<unknown>" if args.thread is None else args.thread.name
    _keep("PytestUnhandledThreadExceptionWarning", f"Exception in thread {name}", args)
    threading.__excepthook__(args)  # to the output of the rank, which may be all that is left of it


def _of_finalizer(args: Any) -> None:
    try:
        what = f"{args.err_msg or 'Exception ignored in'}: {args.object!r}"
    except Exception:
        what = f"{args.err_msg or 'Exception ignored in'}: an object of {type(args.object).__name__}"
    _keep("PytestUnraisableExceptionWarning", what, args)
    sys.__unraisablehook__(args)


def _keep(warning: str, summary: str, args: Any) -> None:
    frames = traceback.extract_tb(args.exc_traceback)
    file, line = (frames[-1].filename, frames[-1].lineno or 0) if frames else ("<unknown>", 0)
    lines = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    _found.append(Stray(warning, summary, f"{summary}\n\n{lines}", file, line, args.exc_value))
