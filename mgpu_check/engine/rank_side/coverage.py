"""Measure the coverage of code in ranks, with the configuration that coverage.py has in the pytest process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def coverage_here() -> str | None:
    """Return the configuration of coverage.py in this process, for `Measuring` in a rank, or None."""
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
    """Coverage of one rank.

    Args:
        at_rest: registers a function to call at the end of each test. The data is written then, because a signal may
            end the rank at any later time.
    """

    def __init__(self, at_rest: Callable[[Callable[[], None]], None]) -> None:
        self._at_rest = at_rest
        self._measured: Any = None
        self._runs = False

    def start(self, configuration: str | None) -> None:
        """Measure from here to the end of the test; `configuration` is from `coverage_here` in the pytest process."""
        if configuration is None or self._runs:
            return
        if self._measured is None:
            import coverage

            inherited = coverage.Coverage.current()
            if inherited is not None and inherited.config.serialize() == configuration:
                # coverage.py measures every process, and so this one since its fork: only write its data at rest.
                self._at_rest(inherited.save)
                self._runs = True
                return
            if inherited is not None:  # of the fork server
                inherited._auto_save = False
                inherited.stop()
            # Each rank has its own data file, which pytest-cov combines with its own.
            self._measured = coverage.Coverage(config_file=f":data:{configuration}", data_suffix=True)
            for warning in ("no_data", "unimported_source", "preimported_source"):
                setattr(self._measured, f"_warn_{warning}", False)
            self._at_rest(self._write)
        self._measured.start()
        self._runs = True

    def _write(self) -> None:
        if self._runs:
            self._runs = False
            self._measured.stop()
            self._measured.save()
