"""The fault happens in a fixture, before the test."""

import time

import faults
import pytest
from aftermath import check

NAMES = [name for name in faults.FAULTS if name not in faults.VARIATIONS]


@pytest.fixture
def broken(ranks, name, warm, record_property):
    value = faults.argument(name)
    record_property("began", time.time())
    ranks.run(faults.happen, name, value, size=faults.SIZE)


@pytest.mark.parametrize("name", NAMES)
def test_fault(name, broken):
    pass


@pytest.mark.parametrize("name", NAMES)
def test_next(ranks, clean, name, record_property):
    check(ranks, clean, record_property)
