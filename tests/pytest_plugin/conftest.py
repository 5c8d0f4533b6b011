"""A pytester that runs pytest as a user does, in a process of its own, and sees that none of its processes survive."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import processes_with as started_with

MARK = "MGPU_TEST_RUN"


def processes_with(value: str) -> list[int]:
    """Processes whose environment has `value` for the variable that marks a run."""
    return list(started_with(MARK, value))


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
