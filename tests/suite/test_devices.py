"""The checks of devices pass on a sound node, and name the device that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mgpu_check.errors import DeviceEnumerationError
from mgpu_check.simulated import simulated_node
from mgpu_check.strategies import TensorSpec
from mgpu_check.suite.fixtures import checks
from mgpu_check.suite.recipes import tutorials as recipes

Devices = list[torch.device]
DATA = TensorSpec((4, 5), values="exact")


@pytest.fixture
def node() -> Iterator[Devices]:
    with simulated_node(3):
        yield [torch.device("cuda", index) for index in range(3)]


def test_a_sound_node_passes(node: Devices) -> None:
    checks.assert_devices_enumerated(node, 3)
    checks.assert_devices_enumerated(node[:2], 2)
    for device in node:
        checks.assert_device_computes(device, DATA.build())
    checks.assert_memory_separate(node, DATA.build())
    checks.assert_memory_counted(node, 1, 4096)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int64", "uint8", "bool"])
def test_computing_with_every_kind_of_data(node: Devices, dtype: str) -> None:
    for shape in ((), (0,), (3,), (2, 0, 3), (2, 3, 4, 5)):
        checks.assert_device_computes(node[1], TensorSpec(shape, dtype, values="exact").build())


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


def test_a_tensor_that_lands_elsewhere(node: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: to(self, node[0] if device != "cpu" else device))
    with pytest.raises(DeviceEnumerationError, match="put on cuda:1 landed on cuda:0") as caught:
        checks.assert_device_computes(node[1], DATA.build())
    assert caught.value.ranks == (1, 0)


@pytest.mark.parametrize(("operator", "step"), [("__add__", r"x \+ x"), ("__matmul__", r"x @ x.T")])
def test_a_device_that_computes_wrongly(
    node: Devices, monkeypatch: pytest.MonkeyPatch, operator: str, step: str
) -> None:
    right = getattr(torch.Tensor, operator)

    def wrong(self: torch.Tensor, other: Any) -> torch.Tensor:
        result: torch.Tensor = right(self, other)
        return result.negative() if self.device.type == "cuda" else result

    monkeypatch.setattr(torch.Tensor, operator, wrong)
    with pytest.raises(DeviceEnumerationError, match=rf"cuda:2: {step}: element \[\d, \d\]: expected") as caught:
        checks.assert_device_computes(node[2], DATA.build())
    assert caught.value.ranks == (2,)


def test_shared_memory_is_named(node: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, first = torch.Tensor.copy_, []

    def copy_(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        first.append(self)
        copy(first[0], source)
        return copy(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    with pytest.raises(DeviceEnumerationError, match=r"cuda:0 .* holds what was written to cuda:2: they share memory"):
        checks.assert_memory_separate(node, torch.zeros(3))


def test_memory_counted_elsewhere(node: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = torch.cuda.memory_allocated
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated(0))
    with pytest.raises(DeviceEnumerationError, match=r"memory_allocated\(cuda:1\) rose by 0 .* expected at least 4096"):
        checks.assert_memory_counted(node, 1, 4096)
    with pytest.raises(DeviceEnumerationError, match=r"memory_allocated\(cuda:1\) rose by \d+"):
        checks.assert_memory_counted(node, 0, 4096)


def test_helpers_of_tutorials(node: Devices) -> None:
    assert [recipes.try_gpu(index) for index in range(4)] == [*node, torch.device("cpu")]
    assert recipes.try_gpu() == node[0]
    assert recipes.try_all_gpus() == node
    with pytest.raises(ValueError, match="i=-1"):
        recipes.try_gpu(-1)


def test_helpers_of_tutorials_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert recipes.try_gpu() == torch.device("cpu")
    assert recipes.try_all_gpus() == [torch.device("cpu")]
