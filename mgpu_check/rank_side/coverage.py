"""Count what ranks run in the coverage of a pytest run: pass them how coverage.py measures here, and measure there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Measuring", "coverage_here"]


def coverage_here() -> str | None:
    """Return how coverage.py measures this process, for `Measuring` in another; None where it does not."""
    coverage = sys.modules.get("coverage")
    current = getattr(getattr(coverage, "Coverage", None), "current", lambda: None)()
    if current is None:
        return None
    try:
        configuration: str = current.config.serialize()
    except AttributeError:  # before 7.10
        return None
    return configuration


class Measuring:
    """Coverage of what one rank runs.

    Args:
        at_rest: called with a function that is to be called at the end of each test: data is written then, because a
            rank may end by a signal at any time afterwards.
    """

    def __init__(self, at_rest: Callable[[Callable[[], None]], None]) -> None:
        self._at_rest = at_rest
        self._measured: Any = None
        self._runs = False

    def start(self, configuration: str | None) -> None:
        """Measure from here to the end of the test, by what `coverage_here` said in the pytest process."""
        if configuration is None or self._runs:
            return
        if self._measured is None:
            import coverage

            inherited = coverage.Coverage.current()
            if inherited is not None and inherited.config.serialize() == configuration:
                # coverage.py measures every process, this one since it was forked: write what it has at rest, no more.
                self._at_rest(inherited.save)
                self._runs = True
                return
            if inherited is not None:  # of the fork server
                inherited._auto_save = False
                inherited.stop()
            # A file for each rank; pytest-cov combines them with its own.
            self._measured = coverage.Coverage(config_file=f":data:{configuration}", data_suffix=True)
            for kind in ("no_data", "unimported_source", "preimported_source"):
                setattr(self._measured, f"_warn_{kind}", False)
            self._at_rest(self._write)
        self._measured.start()
        self._runs = True

    def _write(self) -> None:
        if self._runs:
            self._runs = False
            self._measured.stop()
            self._measured.save()
