"""The fault happens in a fixture, after the test."""

import time

import aftermath
import faults
import pytest

# Reports are the same as in a setup; other tests show that pytest continues.
NAMES = ["raises", "sys-exit", "unpicklable-result", "exit-0", "sigkill", "sleeps", "other-collective", "sigstop"]


@pytest.fixture
def broken(ranks, name, warm, record_property):
    yield
    record_property("began", time.time())
    ranks.run(faults.happen, name, size=faults.SIZE)


@pytest.fixture
def beneath(name, record_property):
    """A fixture that must be torn down, also if the other fails."""
    yield
    record_property("torn down", True)


def test_fault(name, beneath, broken):
    pass


test_next = aftermath.after
