"""What rounding hides, and whether a run repeats itself."""

from __future__ import annotations

import math

import pytest
import torch

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.rounding import Rounding, repeatability
from mgpu_check.compare.trace import State
from mgpu_check.compare.verdict import ComparisonVerdict, verdict_of
from tests.compare.training import Training, gradients, summary, times, with_a_third


def test_repeatability():
    first, again = Training(), Training()
    assert repeatability(first.trace(), again.trace()) is None
    times(lambda number: 1 + 1e-6 * (number > 0))(again)
    assert repeatability(first.trace(), again.trace()) is None  # kernels that add up in no fixed order
    times(lambda number: 1.01 if number == 1 else 1)(again)
    assert repeatability(first.trace(), again.trace()).step == 1
    again = Training()
    again.samples = lambda number: [7 - i for i in range(8)]
    assert "different samples" in repeatability(first.trace(), again.trace()).description


def test_where_rounding_has_taken_over():
    """The first eight steps are taken together, so that small numbers of a small model cannot be right by chance."""
    moved = Training(steps=6)
    moved.gradient = lambda number: [g + (0.5 * g.flip(0) if number > 3 else 0) for g in gradients(number)]
    reference = Training(steps=6).trace()
    rounding = Rounding(reference, [moved.trace()])
    found = verdict_of(Aligned(reference, [Training(r, 2, 6).trace() for r in range(2)]), rounding, None)
    assert found.kind == "not comparable" and "rounding alone" in found.report.headline


def of_three(drown) -> ComparisonVerdict:
    """Of right ranks, and a moved run whose trace is as `drown` makes it."""
    traces = [Training().trace(), Training().trace(), *(Training(rank, 2).trace() for rank in range(2))]
    for trace in traces:
        with_a_third(trace)
    drown(traces[1])
    return verdict_of(Aligned(traces[0], traces[2:]), Rounding(traces[0], [traces[1]]), None)


@pytest.mark.parametrize("value", [math.nan, 0.3])
def test_a_tensor_that_rounding_alone_hides_does_not_count_as_equal(value):
    def drown(made):
        made.steps[1].parameters["net.bias"] = summary(torch.full((6,), value))

    found = of_three(drown)
    assert found.kind == "equal"
    assert "train the same 2 of 3 parameters" in found.report.headline
    assert any("the updated values of net.bias (from step " in remark for remark in found.report.remarks)
    right = of_three(lambda made: None)
    assert "train the same 3 parameters" in right.report.headline and right.report.remarks == []


def test_a_gradient_that_rounding_alone_hides_is_named():
    """Its parameter is compared all the same."""

    def drown(made):
        made.steps[0].gradients["net.bias"] = summary(torch.ones(6))

    found = of_three(drown)
    assert "train the same 3 parameters" in found.report.headline
    assert any("the gradients of net.bias (from step 1 on)" in remark for remark in found.report.remarks)


def test_parameters_that_rounding_alone_hides_are_not_called_equal():
    def drown(made):
        for step in made.steps:
            step.parameters.update({name: summary(torch.ones(6)) for name in step.parameters})
            for name in ("net.weight", "net.third"):
                step.parameters[name] = summary(torch.ones(6, 5))

    found = of_three(drown)
    assert found.kind == "not comparable" and "rounding alone changes every parameter" in found.report.headline


def test_a_square_of_a_gradient_may_deviate_twice_as_much():
    single, moved = Training(steps=1), Training(steps=1)
    times(1 + 1e-4)(moved)
    traces = single.trace(), moved.trace()
    for trace in traces:
        parameter = trace.parameters["net.weight"]
        state = State(**{**vars(parameter), "name": "square of net.weight"}, of="net.weight", key="square")
        trace.states[state.name] = state
        trace.steps[0].states[state.name] = traces[0].steps[0].parameters["net.weight"]  # the same in both runs
    rounding = Rounding(traces[0], [traces[1]])
    gradient = rounding.tolerance(0, "gradient", "net.weight")
    assert rounding.tolerance(0, "state", "square of net.weight") == 2 * gradient > 2e-4


NARROWER = 'with torch.autocast("cpu", torch.bfloat16): loss = nn.functional.mse_loss(net(x[part]).float(), y[part])'


@pytest.mark.parametrize(
    ("by", "code", "heading"),
    [("world", 0, "equal: 3 steps"), pytest.param("1", 1, "differs: step 1", marks=pytest.mark.slow)],
)
def test_a_script_under_autocast_is_decided_in_its_own_dtype(compare, by_hand, changed, by, code, heading):
    script = changed(
        by_hand,
        ("loss = nn.functional.mse_loss(net(x[part]), y[part])", NARROWER),
        ("p.grad /= world", f"p.grad /= {by}"),
        ("    nn.utils.clip_grad_norm_(net.parameters(), 0.5)\n", ""),
        (".sin() * 3", ".sin() + 9"),  # else gradients of few samples cancel
        ("lr=0.05", "lr=0.001"),
    )
    text = compare(script, code=code).text
    assert heading in text and "scaled differently" not in text
