"""The fault happens in the body of a test marked `ranks`."""

import faults
import pytest
from aftermath import check


@pytest.fixture
def value(name):
    return faults.argument(name)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_before(name, warm):
    """The ranks are up: what is timed is not their start."""


def marked(name):
    limit = {"timeout": 30} if name in faults.TAKE_LONGER else {}
    return pytest.param(name, marks=pytest.mark.ranks(faults.SIZE, **limit))


@pytest.mark.parametrize("name", map(marked, faults.FAULTS))
def test_fault(rank, name, value):
    return faults.happen(rank, name, value)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_next(ranks, clean, name, record_property):
    check(ranks, clean, record_property)
