"""A plugin of the inner runs: writes down, as lines of JSON, how each test ended and how long it took to say so."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import changes
import faults
import pytest
from _pytest.stash import Stash

SHOWN = 30_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record")
    parser.addoption("--names", help="of the faults that are wanted, with commas")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each fault is followed, on the same worker, by the test that finds what it left."""
    if (wanted := config.option.names) is not None:
        items[:] = [item for item in items if _fault_of(item) in wanted.split(",")]
    names = list(faults.FAULTS)
    items.sort(key=lambda item: names.index(_fault_of(item)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_fault_of(item)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test is there for each fault of its module, if it does not say itself for which."""
    if not any(metafunc.definition.iter_markers("parametrize")):
        metafunc.parametrize("name", metafunc.module.NAMES)


def _fault_of(item: pytest.Item) -> str:
    assert isinstance(item, pytest.Function)
    return str(item.callspec.params["name"])


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and config.option.record:
        config.pluginmanager.register(Recorder(Path(config.option.record)))


class Recorder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **row: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        function, _, name = report.nodeid.rpartition("::")[2].partition("@")[0].rstrip("]").partition("[")
        self.write(
            function=function,
            name=name,
            when=report.when,
            outcome=report.outcome,
            seconds=time.time() - float(properties.get("began", report.start)),
            text=report.longreprtext[:SHOWN],
            sections=[(title, len(text), text[-2000:]) for title, text in report.sections],
            properties=properties,
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, config: pytest.Config) -> Iterator[None]:
        session = _session(config.stash)
        kinds = {name: fault.kind for name, fault in faults.FAULTS.items()}
        self.write(
            function="run",
            kinds=kinds,
            take_longer=sorted(faults.TAKE_LONGER),
            deaths=session.notes.deaths,
            remarks=session.notes.remarks,
        )
        return (yield)


def _session(stash: Stash) -> Any:
    from mgpu_check.plugin.stash import SESSION

    return stash[SESSION]


@pytest.fixture(scope="session")
def clean(ranks: Any) -> list[dict[str, Any]]:
    """What fresh ranks see."""
    return ranks.run(changes.observe, size=faults.SIZE)


@pytest.fixture
def value(name: str) -> object:
    return faults.argument(name)


@pytest.fixture
def warm(ranks: Any, clean: object) -> list[tuple[int, int]]:
    """The ranks are up: what is timed after this is not their start."""
    return ranks.run(_pids, size=faults.SIZE)


def _pids() -> tuple[int, int]:
    import os

    return os.getpid(), os.getppid()
