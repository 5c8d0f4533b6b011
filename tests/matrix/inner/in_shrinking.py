"""The fault happens for some of the examples that Hypothesis draws; it looks for the smallest of them."""

import faults
import pytest
from aftermath import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Without the fork server, each of the examples would import torch again.
NAMES = [name for name in faults.FAULTS if name not in faults.VARIATIONS and name != "kills-the-fork-server"]


@pytest.fixture
def value(name):
    return faults.argument(name)


@pytest.mark.parametrize("name", NAMES)
def test_before(name, warm):
    """The ranks are up: what is timed is not their start."""


@pytest.mark.ranks(faults.SIZE)
@pytest.mark.parametrize("name", NAMES)
@settings(database=None, max_examples=10, suppress_health_check=list(HealthCheck))
@given(n=st.integers(0, 3))
def test_fault(rank, name, value, n):
    result = faults.happen(rank, name, value) if n >= 2 else None
    return result if name == "unpicklable-result" else None  # Hypothesis takes any result for a mistake


@pytest.mark.parametrize("name", NAMES)
def test_next(ranks, clean, name, record_property):
    check(ranks, clean, record_property)
