"""The check of devices names those that are missing, listed twice or out of order; helpers of tutorials find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from mgpu_check.errors import DeviceEnumerationError
from mgpu_check.simulated import simulated_node
from mgpu_check.suite.fixtures import checks

Devices = list[torch.device]


@pytest.fixture
def node() -> Iterator[Devices]:
    with simulated_node(3):
        yield [torch.device("cuda", index) for index in range(3)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda node: node[:2], r"missing: cuda:2"),
        (lambda node: [node[0], node[0], node[2]], r"listed twice: cuda:0; missing: cuda:1"),
        (lambda node: [*node[:2], torch.device("cpu")], r"missing: cuda:2; not asked for: cpu"),
        (lambda node: node[::-1], r"out of order"),
    ],
)
def test_other_devices_are_named(node: Devices, change: Callable[[Devices], Devices], words: str) -> None:
    with pytest.raises(DeviceEnumerationError, match=words):
        checks.assert_devices_enumerated(change(node), 3)


def test_fewer_visible_devices_than_listed(node: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceEnumerationError, match=r"3 devices were asked for, but torch.cuda sees 2") as caught:
        checks.assert_devices_enumerated(node, 3)
    assert caught.value.ranks == (2,)


def test_two_names_of_one_device(node: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = torch.cuda.get_device_properties
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties(min(index, 1)))
    with pytest.raises(DeviceEnumerationError, match="cuda:1 and cuda:2 are two names of one device") as caught:
        checks.assert_devices_enumerated(node, 3)
    assert caught.value.ranks == (1, 2)
