"""The fault happens in a fixture, before the test."""

import time

import aftermath
import faults
import pytest

NAMES = [name for name in faults.FAULTS if name not in faults.VARIATIONS]


@pytest.fixture
def broken(ranks, name, value, warm, record_property):
    record_property("began", time.time())
    ranks.run(faults.happen, name, value, size=faults.SIZE)


def test_fault(name, broken):
    pass


test_next = aftermath.after
