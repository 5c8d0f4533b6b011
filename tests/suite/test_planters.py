"""The planters of faults call the fault for the calls that it affects, the original for others, and restore
everything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mgpu_check.simulated import simulated_node
from mgpu_check.suite.common.faults import registry
from mgpu_check.suite.common.faults.planting import around, both, first, one_device
from mgpu_check.suite.common.faults.registry import Fault, caught_by, entered


class Shape:
    """Functions of each kind."""

    @staticmethod
    def of(*sizes: int) -> tuple[int, ...]:
        return sizes

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    def plus(self, number: int) -> int:
        return number


class Square(Shape):
    pass


def test_a_function_of_each_kind_is_replaced_and_restored() -> None:
    before = dict(vars(Shape))
    with (
        around(Shape, "of")(lambda real, *sizes: real(*sizes, 1)),
        around(Shape, "name")(lambda real, kind: real(kind).lower()),
        around(Square, "plus")(lambda real, shape, number: real(shape, number) + 1),
    ):
        assert (Shape.of(2), Shape().of(3), Shape.name(), Square.name()) == ((2, 1), (3, 1), "shape", "square")
        assert (Shape().plus(1), Square().plus(1)) == (1, 2)
    assert dict(vars(Shape)) == before
    assert "plus" not in vars(Square)


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


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fault]:
    """The registry, empty during the test."""
    known: dict[str, Fault] = {}
    monkeypatch.setattr(registry, "_faults", known)
    return known


def test_faults_of_one_check(faults: dict[str, Fault]) -> None:
    owner = SimpleNamespace(add=lambda a, b: a + b)
    sums = caught_by("test_sums")

    def too_large(real: Any, a: int, b: int) -> int:
        return int(real(a, b)) + 1

    def lost() -> Any:
        return around(owner, "add")(lambda real, a, b: 0)

    for function in (too_large, lost):
        function.__module__ = "mgpu_check.suite.allreduce.faults"
    sums("sums are off by one", around(owner, "add"), first("above 9", lambda a: a > 9))(too_large)
    sums("sums are lost", entered, "all numbers", least_gpus=3)(lost)
    found = {
        name: (fault.summary, fault.caught_by, fault.condition, fault.least_gpus) for name, fault in faults.items()
    }
    assert found == {
        "too-large": ("sums are off by one", ("test_sums",), "above 9", 1),
        "lost": ("sums are lost", ("test_sums",), "all numbers", 3),
    }
    for name, result in ("too-large", [2, 12]), ("lost", [0, 0]):
        with faults[name].plant():
            assert [owner.add(1, 1), owner.add(10, 1)] == result
    assert owner.add(10, 1) == 11
