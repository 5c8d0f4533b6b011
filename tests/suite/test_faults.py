"""The register of faults, and that planting one leaves nothing behind."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mgpu_check.asserts.findings import enough
from mgpu_check.simulated import simulated_node
from mgpu_check.suite.common.faults import registry
from mgpu_check.suite.common.faults.planting import around, both, counted, given, one_device, returned
from mgpu_check.suite.common.faults.registry import PROPERTIES, FaultRow, When, all_faults, fault, planted, register


def test_every_property_has_at_least_four_faults():
    counts = {name: sum(f.property == name for f in all_faults().values()) for name in PROPERTIES}
    assert min(counts.values()) >= 4, counts


def test_the_checks_that_must_catch_a_fault_are_in_the_suite_and_no_check_is_without_one():
    for name in PROPERTIES:
        module = importlib.import_module(f"mgpu_check.suite.{name}.test_{name}")
        checks = {check for check in vars(module) if check.startswith("test_")}
        named = [set(fault.caught_by) for fault in all_faults().values() if fault.property == name]
        assert all(named)
        assert set().union(*named) == checks


def test_an_unknown_fault_is_named_with_the_valid_ones():
    with (
        pytest.raises(ValueError, match=r"fault 'no-such' is unknown; choose one of .*shards-swapped"),
        planted("no-such"),
    ):
        pass


def test_checks_may_end_at_their_first_finding_while_a_fault_is_planted():
    with planted("class-weights-fetched"):
        assert enough(["a finding"])
        assert not enough([])
    assert not enough(["a finding"])


def test_a_condition_selects_calls_and_names_them():
    def calls(body):
        seen.append([body(number) for number in range(4)])
        return contextlib.nullcontext()

    seen: list[list[Any]] = []
    large, odd = When("above 1", lambda number: number > 1), When("odd", lambda number: number % 2 == 1)
    both = large & odd
    assert str(both) == "above 1, odd"
    calls(both.guards(lambda number: number))
    assert seen == [[NotImplemented, NotImplemented, NotImplemented, 3]]


class Owner:
    def plus(self, number, more=1):
        return number + more

    @staticmethod
    def doubled(numbers):
        numbers[:] = [2 * number for number in numbers]
        return numbers


PLANTED = {
    "the original goes on": (around(Owner, "plus")(lambda real, self, number: NotImplemented), 4),
    "instead": (around(f"{__name__}:Owner", "plus")(lambda real, self, number: real(self, number, more=5)), 8),
    "another argument": (given(Owner, "plus")(lambda self, number: (self, 10)), 11),
    "an argument changed in place": (given(Owner, "plus")(lambda self, number: None), 4),
    "another result": (returned(Owner, "plus")(lambda result, self, number: 100 * result + number), 403),
    "a result changed in place": (returned(Owner, "plus")(lambda result, self, number: None), 4),
    "a result that is not affected": (returned(Owner, "plus")(lambda result, self, number: NotImplemented), 4),
}


@pytest.mark.parametrize(("context", "result"), PLANTED.values(), ids=PLANTED)
def test_planters_change_arguments_and_results_of_a_function(context, result):
    before = dict(vars(Owner))
    with context:
        assert Owner().plus(3) == result
    assert dict(vars(Owner)) == before


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


def test_rows_are_faults_of_the_property_of_their_module(monkeypatch):
    monkeypatch.setattr(registry, "_faults", {})
    module, even = "mgpu_check.suite.scatter.faults", When("even", lambda self, number: number % 2 == 0)
    second = counted("second call", lambda count: count.later(1))
    register(
        module,
        FaultRow("ten", "it is ten", "test_one", given(Owner, "plus"), lambda self, number: (self, 10), even, 2),
        FaultRow(
            "same", "it is as before", ("test_one", "test_other"), returned(Owner, "plus"), lambda *_: None, "in words"
        ),
        FaultRow(
            "later", "it is ten at last", "test_one", given(Owner, "plus"), lambda self, number: (self, 10), second
        ),
    )
    ten, same, later = registry._faults.values()
    assert (ten.name, ten.property, ten.caught_by, ten.condition, ten.least_gpus) == (
        "ten", "scatter", ("test_one",), "even", 2,
    )  # fmt: skip
    assert (same.caught_by, same.condition, same.least_gpus) == (("test_one", "test_other"), "in words", 1)
    with ten.plant():
        assert [Owner().plus(number) for number in (3, 4)] == [4, 11]
    for _ in range(2):
        with later.plant():
            assert [Owner().plus(number) for number in (3, 4)] == [4, 11]


def test_two_faults_of_one_name_are_refused():
    def shards_swapped():
        yield

    with pytest.raises(ValueError, match="'shards-swapped' is registered already"):
        all_faults()
        shards_swapped.__module__ = "mgpu_check.suite.allreduce.faults"
        fault("another")(shards_swapped)


def test_a_fault_of_adam_does_not_stay_behind_in_adamw(monkeypatch):
    """torch wraps `step` in the class of an optimizer that is built, and keeps that."""
    if "step" in vars(torch.optim.AdamW):
        monkeypatch.delattr(torch.optim.AdamW, "step")  # another test has built one
    parameters = [torch.zeros(1, requires_grad=True)]
    torch.optim.Adam(parameters)
    before = torch.optim.AdamW.step
    with planted("adam-in-bfloat16"):
        step: Any = torch.optim.AdamW(parameters).step
        assert step.__func__ is not before
    assert torch.optim.AdamW.step is before
