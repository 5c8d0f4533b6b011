"""The fault happens in the body of a test marked `ranks`."""

import aftermath
import faults
import pytest

NAMES = list(faults.FAULTS)

test_before = aftermath.before


def marked(name):
    limit = {"timeout": 30} if name in faults.TAKE_LONGER else {}
    return pytest.param(name, marks=pytest.mark.ranks(faults.SIZE, **limit))


@pytest.mark.parametrize("name", map(marked, NAMES))
def test_fault(rank, name, value):
    return faults.happen(rank, name, value)


test_next = aftermath.after
