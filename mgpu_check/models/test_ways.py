"""The model trains on several devices as on one device: a test for each way, then one for each way with options."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mgpu_check.models.application import WAYS
from mgpu_check.models.examination import Examination
from mgpu_check.models.verdict import WayResult

Note = Callable[[WayResult], None]


@pytest.mark.parametrize("way", WAYS)
def test_way(examination: Examination, note: Note, way: str) -> None:
    """The model trains in this way as on one device, for one step and for three."""
    result, error = examination.try_way(way)
    note(result)
    if error is not None:
        pytest.fail(str(error), pytrace=False)
    if result.reason:
        pytest.skip(result.reason)


@pytest.mark.parametrize("way", WAYS)
def test_options(examination: Examination, note: Note, way: str) -> None:
    """Options of the training do not change what it computes in this way."""
    if way not in examination.bases:
        pytest.skip("the way without options is not equal to one device")
    result = examination.try_options(way)
    note(result)
    if result.failures:
        lines = [f"{each.status} with {each.options}: {each.reason}" for each in result.failures]
        pytest.fail("\n".join([f"{way} with options:", *lines]), pytrace=False)
