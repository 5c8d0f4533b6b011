"""Collect uncaught exceptions of a rank: those that end a thread, and those of finalizers, such as ``__del__``.

Python prints them and continues. They are kept here until the rank reports them, as pytest does in its own process.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any

_MOST = 100  # kept until the next `take`, so that a failing thread in each step does not fill the memory


@dataclass(frozen=True)
class Stray:
    """An exception or warning that no call reported.

    Attributes:
        warning: name of pytest's warning class for it.
        summary: the thread or object that raised it, in one line.
        text: the same with the traceback.
    """

    warning: str
    summary: str
    text: str
    file: str
    line: int
    error: BaseException | None

    @property
    def plain(self) -> tuple[str, str, str, int]:
        return self.warning, self.text, self.file, self.line


_found: deque[Stray] = deque(maxlen=_MOST)


def listen() -> None:
    threading.excepthook = _of_thread
    sys.unraisablehook = _of_finalizer


def take() -> list[Stray]:
    taken = []
    while _found:
        taken.append(_found.popleft())
    return taken


def _of_thread(args: Any) -> None:
    name = "<unknown>" if args.thread is None else args.thread.name
    _keep("PytestUnhandledThreadExceptionWarning", f"Exception in thread {name}", args)
    threading.__excepthook__(args)  # also print it, because the rank may die before it reports


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
