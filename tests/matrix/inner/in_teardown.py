"""The fault happens in a fixture, after the test."""

import time

import faults
import pytest
from aftermath import check

# What is told is told as in a setup; that pytest goes on is another matter.
NAMES = ["raises", "sys-exit", "unpicklable-result", "exit-0", "sigkill", "sleeps", "other-collective", "sigstop"]


@pytest.fixture
def broken(ranks, name, warm, record_property):
    yield
    record_property("began", time.time())
    ranks.run(faults.happen, name, size=faults.SIZE)


@pytest.fixture
def beneath(name, record_property):
    """Must be torn down, whatever happens to the other."""
    yield
    record_property("torn down", True)


@pytest.mark.parametrize("name", NAMES)
def test_fault(name, beneath, broken):
    pass


@pytest.mark.parametrize("name", NAMES)
def test_next(ranks, clean, name, record_property):
    check(ranks, clean, record_property)
