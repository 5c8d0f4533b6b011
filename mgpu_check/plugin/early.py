"""Start the fork server before pytest imports the first test file that needs it, so that both import torch at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

import mgpu_check
from mgpu_check.errors import StartupFailure
from mgpu_check.plugin.session import GATES, GpuSession
from mgpu_check.processes.heap import importing

_PACKAGE = Path(mgpu_check.__file__).parent
_NEEDS_RANKS = re.compile(rb"\b(ranks|gpus)\b")
_HAS_GATES = re.compile(rb"\bassert_(step|metric)")


def started(start: Callable[[], None]) -> None:
    """Call what starts a fork server during the collection, where no test can report a failure: it is wrong usage."""
    try:
        start()
    except StartupFailure as error:
        raise pytest.UsageError(f"mgpu-check: {error}") from error


class EarlyStart:
    """A pytest plugin for runs with GPUs."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._started = False

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        with importing():
            return (yield)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Look for words that a test with ranks has. Without them, the fork server starts after the collection."""
        path = collector.path
        if self._started or not isinstance(collector, pytest.Module) or _PACKAGE in path.parents:
            return
        try:
            text = path.read_bytes()
        except OSError:
            return  # pytest reports it
        if _NEEDS_RANKS.search(text):
            self._started = True
            if _HAS_GATES.search(text):
                self._session.preload += GATES
            started(self._session.pool.start)
