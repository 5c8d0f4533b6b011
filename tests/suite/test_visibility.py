"""Processes started under `CUDA_VISIBLE_DEVICES` see what it lists, and the check says so where they do not."""

from __future__ import annotations

import pytest

from mgpu_check.errors import DeviceEnumerationError
from mgpu_check.suite.fixtures import visibility
from mgpu_check.suite.fixtures.visibility import assert_visible_devices_honoured, visible_subsets


def test_values_that_are_tried() -> None:
    assert visible_subsets(["0", "1", "2"]) == [("2,1,0", [2, 1, 0]), ("2", [2]), ("", []), ("2,-1,0", [2])]
    assert visible_subsets(["0"]) == [("0", [0]), ("0", [0]), ("", []), ("0,-1,0", [0])]
    assert visible_subsets(["3", "GPU-7"])[0] == ("GPU-7,3", [1, 0])


def test_ignoring_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(visibility, "devices_seen", lambda values: [["a", "b"] for _ in values])
    words = r"under CUDA_VISIBLE_DEVICES='1,0' a process must see device 1, device 0, but sees device 0, device 1"
    with pytest.raises(DeviceEnumerationError, match=words):
        assert_visible_devices_honoured(["a", "b"])


def test_it_is_read_within_what_is_visible_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    seen = {"3,5": ["b", "a"], "3": ["b"], "3,-1,5": ["b"]}
    monkeypatch.setattr(visibility, "devices_seen", lambda values: [seen.get(value, []) for value in values])
    assert_visible_devices_honoured(["a", "b"])
    monkeypatch.setitem(seen, "3", ["c"])
    with pytest.raises(DeviceEnumerationError, match=r"must see device 3, but sees an unknown device \(c\)"):
        assert_visible_devices_honoured(["a", "b"])


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "__name__", "mgpu_check.no_such_module")
    with pytest.raises(DeviceEnumerationError, match="exit code 1:"):
        visibility.devices_seen(["0"])
