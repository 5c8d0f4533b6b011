"""The fault happens for some of the examples that Hypothesis draws; it looks for the smallest of them."""

import aftermath
import faults
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Without the fork server, each of the examples would import torch again.
NAMES = [name for name in faults.FAULTS if name not in faults.VARIATIONS and name != "kills-the-fork-server"]

test_before = aftermath.before


@pytest.mark.ranks(faults.SIZE)
@settings(database=None, max_examples=10, suppress_health_check=list(HealthCheck))
@given(n=st.integers(0, 3))
def test_fault(rank, name, value, n):
    result = faults.happen(rank, name, value) if n >= 2 else None
    return result if name == "unpicklable-result" else None  # Hypothesis takes any result for a mistake


test_next = aftermath.after
