"""Runs of pytest, and of the command, on a machine with real devices that the stand-in for CUDA imitates."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT, fork_runs
from tests.plugin.conftest import MARK, processes_with
from tests.standin.building import build, environment, is_for_cpus, preloaded
from tests.warm import Template

_OTHERS = re.compile(r"(MGPU_CHECK_|STANDIN_|CUDA_VISIBLE_DEVICES$|CI$)|PYTEST_(?!DEBUG_TEMPROOT$)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA build of torch there is nothing to run; with one, what is missing besides is a failure."""
    if reason := is_for_cpus():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def library() -> Path:
    """The compiled stand-in."""
    return build()


@pytest.fixture(scope="session")
def template_on_it(library: Path) -> Iterator[Template]:
    """A template that has imported torch with the stand-in, which reads its variables at its first use."""
    template = Template({**ENVIRONMENT, **preloaded(library)})
    yield template
    template.close()


LIMIT = 150.0
"""Seconds that one run may take, far more than it should."""


class Machine:
    """An imitated machine that runs pytest.

    Attributes:
        log: what its processes did with CUDA, a line each: the process, and what.
    """

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
        self._pytester = pytester
        self._monkeypatch = monkeypatch
        self._library = library
        self.directory = pytester.path / "machine"
        self.path = pytester.path / "standin.log"

    @property
    def log(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def said(self, pattern: str) -> list[str]:
        """The lines of the log that match `pattern`, without the process."""
        return [text for line in self.log if re.search(pattern, text := line.partition(" ")[2])]

    def has(self, gpus: int, **settings: object) -> Machine:
        """Set the number of devices, and settings of the stand-in: ``init_error=802`` is
        ``STANDIN_INIT_ERROR``."""
        for name in list(os.environ):
            if name.startswith("STANDIN_"):
                self._monkeypatch.delenv(name)
        for name, value in environment(gpus, self.directory, self._library, log=self.path, **settings).items():
            if name.startswith("STANDIN_"):  # the preloaded library is for the inner run only: see `run`
                self._monkeypatch.setenv(name, value)
        return self

    def run(self, *arguments: str, code: str | None = None) -> pytest.RunResult:
        """Run pytest in a process of its own, on `code` as a test file where it is given."""
        if code is not None:
            self._pytester.makepyfile(test_it=code)
        return self.python("-mpytest", "-p", "no:cacheprovider", "--hypothesis-seed=0", *arguments)

    def command(self, module: str, *arguments: str) -> pytest.RunResult:
        """Run a Python module as a program."""
        return self.python("-m", module, *arguments)

    def python(self, *arguments: str) -> pytest.RunResult:
        """Run Python with these arguments."""
        with self._monkeypatch.context() as here:
            for name, value in preloaded(self._library).items():
                here.setenv(name, value)
            return self._pytester.run(sys.executable, *arguments, timeout=LIMIT)


@pytest.fixture
def machine(
    request: pytest.FixtureRequest,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    library: Path,
    template_on_it: Template,
) -> Iterator[Machine]:
    """A machine with four devices, until it is said otherwise. At the end, no process of it may be left."""
    if not request.config.getoption("cold"):
        fork_runs(pytester, template_on_it, monkeypatch)
    for name in list(os.environ):
        if _OTHERS.match(name):
            monkeypatch.delenv(name)
    value = str(pytester.path)
    monkeypatch.setenv(MARK, value)
    machine = Machine(pytester, monkeypatch, library)
    yield machine.has(4)
    assert processes_with(value) == [], "processes have survived the run"
    assert machine.said("AFTER FORK") == [], "CUDA was used in a process that was forked from one that uses it"
