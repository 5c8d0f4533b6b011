"""Keep a verdict whose diagnosis fails: report the part that failed, and attempt the others."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mgpu_check.errors import RankHang
from mgpu_check.processes.rank_lists import few

RAISE = "_MGPU_CHECK_RAISE"
"""Environment variable that lets errors of a diagnosis propagate; set in this project's own tests, which must see
them."""

_SHOWN = 3
"""Most parts that one line names: an error in shared evidence fails every rule."""

_S = TypeVar("_S")
_T = TypeVar("_T")
_P = ParamSpec("_P")


class Attempts:
    """The parts of one diagnosis, rules and pieces of evidence, each attempted on its own."""

    def __init__(self) -> None:
        self._failed: dict[str, list[str]] = {}  # error -> parts

    @property
    def remarks(self) -> list[str]:
        """A line for the report on each error, with the parts that failed with it."""
        return [
            f"the diagnosis is incomplete: {few(parts, _SHOWN)} failed with {error}; the verdict does not depend on "
            "it; please report this line"
            for error, parts in self._failed.items()
        ]

    def of(self, what: str, otherwise: _T, part: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return the result of a part of the diagnosis, or `otherwise` if it fails."""
        try:
            return part(*args, **kwargs)
        except (Exception, RankHang) as error:  # the verdict does not depend on the diagnosis
            if os.environ.get(RAISE):
                raise
            self._failed.setdefault(_told(error), []).append(what)
            return otherwise

    def piece(self, read: Callable[[_S], _T], subject: _S, otherwise: _T) -> _T:
        """Return a piece of evidence, or `otherwise` if reading it fails."""
        return self.of(f"the evidence of {read.__name__.strip('_').replace('_', ' ')}", otherwise, read, subject)


def _told(error: BaseException) -> str:
    """Return type and message of an error, and the line that raised it."""
    message = next(iter(str(error).splitlines()), "")
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {message}' if message else ''}{at}"
