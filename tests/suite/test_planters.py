"""The planters of faults call the fault for the calls that it affects, the original for others, and restore
everything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mgpu_check.simulated import simulated_node
from mgpu_check.suite.common.faults.planting import around, both, one_device


def test_one_fault_replaces_functions_of_several_owners() -> None:
    one, other = SimpleNamespace(f=lambda: 1, g=lambda: 2), SimpleNamespace(h=lambda: 3)
    with both(around(one, "f", "g"), around(other, "h"))(lambda real: -real()):
        assert (one.f(), one.g(), other.h()) == (-1, -2, -3)
    assert (one.f(), one.g(), other.h()) == (1, 2, 3)


def test_everything_is_restored_where_a_name_is_unknown() -> None:
    owner = SimpleNamespace(known=1)
    with pytest.raises(AttributeError, match="unknown"), around(owner, "known", "unknown")(lambda real: 2):
        pass
    assert owner.known == 1


def test_conditions_on_devices_and_dtypes() -> None:
    with simulated_node(2):
        here, there = torch.zeros(1), torch.zeros(1, dtype=torch.int8, device="cuda:1")
        near = torch.zeros(1, dtype=torch.int8, device="cuda:0")
        ours = one_device(torch.int8, torch.int16)
        assert [ours.holds(None, one) for one in (here.char(), near, there)] == [False, False, True]
        assert not one_device().holds(None)
    assert [str(one) for one in (ours, one_device())] == ["one device, int8 and int16", "one device"]
