"""Ranks measure for coverage.py if it measures their fork server too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mgpu_check.engine.rank_side.python_hooks import Measuring

coverage = pytest.importorskip("coverage")


class Inherited:
    """A measurement that a rank has since it was forked."""

    def __init__(self, configuration: str) -> None:
        self.config = self
        self.configuration = configuration
        self.calls: list[str] = []
        self._auto_save = True

    def serialize(self) -> str:
        return self.configuration

    def save(self) -> None:
        self.calls.append("save")

    def stop(self) -> None:
        self.calls.append("stop")


def started(inherited: Inherited, configuration: str, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Start to measure as the pytest process does; what is to be called at the end of each test."""
    at_rest: list[Callable[[], None]] = []
    monkeypatch.setattr(coverage.Coverage, "current", lambda: inherited)
    monkeypatch.setattr(coverage.Coverage, "start", lambda self: None)
    measuring = Measuring(at_rest.append)
    measuring.start(configuration)
    measuring.start(configuration)  # of the next test
    return at_rest


def test_what_measures_every_process_goes_on_and_is_written_at_rest(monkeypatch):
    inherited = Inherited(coverage.Coverage(config_file=False).config.serialize())
    at_rest = started(inherited, inherited.serialize(), monkeypatch)
    assert inherited.calls == [], "what the rank does between tests counts, too"
    for call in at_rest:
        call()
    assert inherited.calls == ["save"]


def test_what_measures_the_fork_server_in_another_way_is_stopped(monkeypatch):
    inherited = Inherited("another configuration")
    started(inherited, coverage.Coverage(config_file=False, branch=True).config.serialize(), monkeypatch)
    assert inherited.calls == ["stop"]
    assert not inherited._auto_save, "its file would have the fork server's lines once for each rank"
