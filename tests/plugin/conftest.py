"""A pytester that runs pytest as a user does, in a process of its own, and sees that none of its processes survive."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest

from tests.conftest import processes_with as started_with
from tests.warm import Forked, Template

MARK = "MGPU_TEST_RUN"


def processes_with(value: str) -> list[int]:
    """Processes whose environment has `value` for the variable that marks a run."""
    return list(started_with(MARK, value))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait: the fork server needs a moment after the end of pytest."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.fixture
def run(
    pytester: pytest.Pytester, warm: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., pytest.RunResult]]:
    """Run pytest in a subprocess with the given arguments; at the end, no process of it may be left."""
    for name in list(os.environ):
        if name.startswith(("MGPU_CHECK_", "PYTEST_")) and name != "PYTEST_DEBUG_TEMPROOT":
            monkeypatch.delenv(name)
    # Hypothesis draws the same examples each time, and the profile does not depend on where the tests run.
    monkeypatch.delenv("CI", raising=False)
    value = str(pytester.path)
    monkeypatch.setenv(MARK, value)

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "--hypothesis-seed=0", *arguments)

    yield run
    assert processes_with(value) == [], "processes have survived the run"


class Background:
    """A run of pytest beside the test.

    Attributes:
        process: its pid, its exit code, and ways to wait for it.
    """

    def __init__(self, process: subprocess.Popen[bytes] | Forked, file: int) -> None:
        self.process = process
        self._file = file

    @property
    def output(self) -> str:
        """The standard output and error so far."""
        return os.pread(self._file, 1 << 24, 0).decode()


InBackground = Callable[..., Background]


@pytest.fixture
def in_background(request: pytest.FixtureRequest, run: object, template: Template) -> Iterator[InBackground]:
    """Start pytest with the given arguments, with `typed` on its standard input; its process group is its own."""
    cold = request.config.getoption("cold")
    with ExitStack() as opened:

        def start(*arguments: str, variables: Mapping[str, str] | None = None, typed: str = "") -> Background:
            environment = {**os.environ, **(variables or {})}
            given = [*("-p", "no:cacheprovider"), *arguments]
            output, words = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            words.write(typed.encode())
            words.seek(0)
            file = output.fileno()
            process: subprocess.Popen[bytes] | Forked
            if cold:
                process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *given],
                    env=environment,
                    stdin=words,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            else:
                process = template.popen(given, environment, file, file, directory=os.getcwd(), stdin=words.fileno())
            opened.callback(process.kill)
            return Background(process, file)

        yield start
