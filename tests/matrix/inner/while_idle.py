"""The fault happens when the ranks have answered and wait for the end of the test."""

import time

import faults
import pytest
from aftermath import check
from trigger import IN_A_CALL, Armed

NAMES = [name for name in faults.FAULTS if name not in IN_A_CALL]


@pytest.fixture
def afterwards(ranks, name, warm, tmp_path, record_property):
    yield
    armed = Armed(ranks, name, str(tmp_path / "pipe"))
    record_property("began", time.time())
    armed.go()


@pytest.mark.parametrize("name", NAMES)
def test_fault(name, afterwards):
    pass


@pytest.mark.parametrize("name", NAMES)
def test_next(ranks, clean, name, record_property):
    check(ranks, clean, record_property)
