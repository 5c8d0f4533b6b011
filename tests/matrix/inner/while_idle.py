"""The fault happens when the ranks have answered and wait for the end of the test."""

import time

import aftermath
import faults
import pytest
from trigger import IN_A_CALL, Armed

NAMES = [name for name in faults.FAULTS if name not in IN_A_CALL]


@pytest.fixture
def afterwards(ranks, name, warm, tmp_path, record_property):
    yield
    armed = Armed(ranks, name, str(tmp_path / "pipe"))
    record_property("began", time.time())
    armed.go()


def test_fault(name, afterwards):
    pass


test_next = aftermath.after
