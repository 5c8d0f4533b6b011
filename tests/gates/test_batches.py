"""The seeds under which batches are made."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from mgpu_check import simulated_node
from mgpu_check.torch_hooks.switches import seed_everything


def drawn(devices: list[str]) -> list[object]:
    return [random.random(), numpy.random.rand(), *(torch.rand(3, device=device).tolist() for device in devices)]


@pytest.mark.parametrize("devices", [["cpu"], ["cuda:0", "cpu", "cuda:1"]])
def test_a_seed_rules_all_generators(devices):
    with simulated_node(2):
        for seed in (3, 4):
            found = []
            for _ in range(2):
                seed_everything(seed)
                found.append(drawn(devices))
            assert found[0] == found[1] != drawn(devices)


def test_a_seed_leaves_nothing_behind_for_devices_that_are_not_there():
    """`torch.manual_seed` keeps a callback with the stack of each call, which takes longer than a small step."""
    kept = [module._queued_calls for module in (torch.cuda, torch.mtia, torch.xpu)]
    before = [len(calls) for calls in kept]
    seed_everything(1)
    assert [len(calls) for calls in kept] == before
