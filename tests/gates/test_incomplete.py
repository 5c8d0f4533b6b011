"""Incomplete evidence does not end a diagnosis; and no error of a diagnosis ends a gate."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_check import ScalingMismatch, assert_loader_covers, assert_step_scales
from mgpu_check.diagnosis.observations import KINDS, Expected, Hypotheses, ObservedRun, Result
from mgpu_check.diagnosis.report import RAISE, Attempts
from mgpu_check.diagnosis.rules import order
from mgpu_check.diagnosis.tensors import Tensors
from mgpu_check.gates import checkpoint_gate as restored
from mgpu_check.gates.checkpoint_gate import Entries, explained
from mgpu_check.gates.comparison.relations import relations_of
from mgpu_check.gates.explanation import evidence as gate_evidence
from mgpu_check.gates.explanation import investigation
from mgpu_check.gates.explanation.failure_report import FirstWrong
from mgpu_check.gates.explanation.investigation import SecondLook
from mgpu_check.gates.run.states import StateEntry, StateRow
from tests.gates.loaders import numbers


def fails(*arguments, **options):
    raise ZeroDivisionError("division by zero\nand more")


def summed(model, batch, rank):
    """Gradients that are added up over ranks, and not averaged."""
    net = model.to(rank.device)
    net(batch.chunk(rank.size)[rank.index].to(rank.device)).square().mean().backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)


def gate(ranks, step=summed, build=lambda: nn.Linear(4, 2)):
    assert_step_scales(
        ranks, step, build=build, batch=lambda n: torch.randn(n, 4), sizes=4, world_sizes=[2], max_examples=1
    )


def failing(name, module):
    """A rule, or the reader of a piece of evidence, that fails."""

    def read(tensors):
        return fails()

    read.__name__, read.__module__, read.__annotations__ = name, module, {"tensors": "Tensors"}
    return read


def parts_of_a_second_look(monkeypatch):
    monkeypatch.setattr(order, "RULES", (failing("reduces_again", "rules.outcomes"), *order.RULES))
    monkeypatch.setattr(gate_evidence, "_metrics", failing("_metrics", "evidence"))
    monkeypatch.setattr(investigation, "first_parting", fails)


def the_second_look(monkeypatch):
    monkeypatch.setattr(SecondLook, "taken", fails)


@pytest.mark.slow
@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    ("break_them", "parts", "mistakes"),
    [
        (
            parts_of_a_second_look,
            {"the rule outcomes.reduces_again", "the evidence of metrics", "the line where ranks part"},
            ("world-size-factor",),
        ),
        (the_second_look, {"the second look at the case"}, ()),
    ],
)
def test_parts_of_the_diagnosis_that_fail_are_told_below_a_verdict_that_stands(
    ranks, monkeypatch, break_them, parts, mistakes
):
    monkeypatch.delenv(RAISE)
    break_them(monkeypatch)
    with pytest.raises(ScalingMismatch) as caught:
        gate(ranks)
    report = str(caught.value)
    assert report.startswith("summed does not scale: 2 of 4 results on 2 ranks differ from one device")
    assert caught.value.ranks == (0, 1)
    (line,) = re.findall(r"the diagnosis is incomplete: (.*) failed with ZeroDivisionError: division by zero", report)
    assert {*re.split(", | and ", line)} == parts and "zero (test_incomplete.py:" in report and "and more" not in report
    assert caught.value.mistakes[: len(mistakes)] == mistakes


@pytest.mark.gpus(2)
def test_the_gate_for_loaders_says_which_rule_has_failed(ranks, monkeypatch):
    monkeypatch.delenv(RAISE)
    monkeypatch.setattr(order, "RULES_OF_EPOCHS", (fails, *order.RULES_OF_EPOCHS))
    with pytest.raises(ScalingMismatch, match=r"the rule test_incomplete\.fails failed with Zero") as caught:
        assert_loader_covers(ranks, lambda rank: torch.utils.data.DataLoader(numbers(8)), world_sizes=[2])
    assert caught.value.mistakes == ("dataset-not-split", "epochs-not-reshuffled")[: len(caught.value.mistakes)]


def test_without_evidence_of_a_resumed_run_nothing_is_named(monkeypatch):
    monkeypatch.delenv(RAISE)
    row = StateRow(StateEntry("weight"), False, "got 1, expected 2", "a", "b", True, True)
    ends, fresh, attempts = Entries([[row]]), Entries([[replace(row, same=True)]]), Attempts()
    assert [finding.mistake for finding in explained(ends, ends, attempts, fresh=fresh)[1]] == ["state-not-restored"]
    monkeypatch.setattr(restored, "_evidence", fails)
    observables, findings, _ = explained(ends, ends, attempts)
    assert observables and not findings and len(attempts.remarks) == 1


def test_one_error_of_all_parts_is_one_line_and_our_own_tests_see_it(monkeypatch):
    attempts = Attempts()
    with pytest.raises(ZeroDivisionError):
        attempts.of("a", 7, fails)
    monkeypatch.delenv(RAISE)
    for part in "abcde":
        assert attempts.of(part, 7, fails) == 7
    (line,) = attempts.remarks
    assert line.startswith("the diagnosis is incomplete: a, b, c and 2 more failed with ZeroDivisionError: division by")


@pytest.mark.parametrize(("steps", "told"), [(0, FirstWrong(1, 0, None)), (1, None)])
def test_a_step_that_is_not_on_record_was_not_left_out(steps, told):
    name, one = Result("grads", "weight"), torch.ones(2)
    seen = [ObservedRun({name: 2 * one}, {name: str(rank)}, optimizer_steps=steps) for rank in range(2)]
    expected = Expected(ObservedRun({name: one}), None, snapshots=[{name: one.double()}], allowances=[{name: 0 * one}])
    expected.exact, expected.tolerance = {name: one.double()}, {name: 0 * one.double()}
    relations = relations_of(expected, seen, KINDS, None)
    tensors = Tensors(2, 2, 1, expected, relations, seen, (), Hypotheses([], []))
    assert investigation._first_wrong(tensors) == told
