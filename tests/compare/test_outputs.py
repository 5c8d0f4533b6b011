"""Outputs of modules: what ranks have of them is put together, and the first that differs is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.first_difference import compared_output, describe_outputs, first_difference
from mgpu_check.compare.in_script.perturbations import Perturbation
from mgpu_check.compare.in_script.recorder import ScriptRecorder
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import OutputSummary, Writer, joined_outputs, whole_output
from tests.compare.training import Training, gradients

WHOLE = OutputSummary(64, 4.0, 3.0, 64)
PARTIAL = "ranks have partial results, whose sum is that of one device"


def part(share: float, of: OutputSummary = WHOLE) -> OutputSummary:
    return OutputSummary(int(of.bits * share), of.norm * share**0.5, of.sum * share, int(of.count * share))


def trained(outputs: dict[str, Any], rank: int = 0, world: int = 1, seen=None, grow: float = 1.0) -> Training:
    """A run whose modules have these outputs at each step, or a function of the step."""
    made = Training(rank, world)
    made.gradient = lambda number: [g * (grow if number == 1 else 1) for g in gradients(number)]
    if seen is not None:
        made.samples = lambda number: [100 * number + seen]

    def change(trace) -> None:
        trace.modules = dict.fromkeys(outputs, "float32")
        for number, step in enumerate(trace.steps):
            step.outputs = {name: own(number) if callable(own) else own for name, own in outputs.items()}

    made.change = change
    return made


def aligned(one: dict[str, Any], ranks: list[dict[str, Any]], seen=None, grow: float = 1.0) -> tuple[Aligned, Rounding]:
    reference = trained(one).trace()
    world = len(ranks)
    traces = [trained(own, rank, world, seen and seen[rank], grow).trace() for rank, own in enumerate(ranks)]
    return Aligned(reference, traces), Rounding(reference, [reference])


@pytest.mark.parametrize(
    ("parts", "seen", "wrong", "why"),
    [
        ([part(0.5), part(0.5)], None, [], None),  # of the samples, or of the features
        ([part(0.25), part(0.75)], None, [], None),
        ([WHOLE, WHOLE], None, [], None),
        ([part(0.5)] * 4, [1, 1, 2, 2], [], None),  # pairs of ranks have copies
        ([part(0.5), part(0.5), part(0.5), OutputSummary(7, 3.0, 1.5, 32)], [1, 1, 2, 2], [3], None),
        ([part(0.5), OutputSummary(7, 3.0, 1.5, 32)], None, [0, 1], None),
        ([WHOLE, OutputSummary(7, 5.0, 3.0, 64)], None, [1], None),
        ([OutputSummary(1, 2.0, 1.0, 64), OutputSummary(2, 2.5, 2.0, 64)], None, [], PARTIAL),
        ([OutputSummary(1, 2.0, 1.0, 64), OutputSummary(2, 2.5, 5.0, 64)], None, [], PARTIAL.replace("sum", "mean")),
        ([part(0.5), part(0.25)], None, [], "ranks have [16, 32] elements, and one device 64"),
        ([OutputSummary(1, 4.0, float("nan"), 64)], None, [0], None),
    ],
)
def test_what_ranks_have_is_put_together(parts, seen, wrong, why):
    found, _ = aligned({"a": WHOLE}, [{"a": own} for own in parts], seen)
    compared = compared_output(found, 0, "a", 1e-6)
    assert (compared.wrong(1e-6), compared.reason) == (wrong, why)


def test_mean_losses_are_weighted_by_the_samples_of_the_ranks():
    """A model may return the mean loss of its samples; that of one device is the mean over all samples."""
    means = [{"a": OutputSummary(number, mean, mean, 1)} for number, mean in enumerate((1.0, 3.0))]
    found, _ = aligned({"a": OutputSummary(9, 2.5, 2.5, 1)}, means)
    assert compared_output(found, 0, "a", 1e-6).wrong(1e-6) == [0, 1]
    found.ranks[0].steps[0].samples, found.ranks[1].steps[0].samples = [[1]], [[10, 11, 12]]
    assert compared_output(found, 0, "a", 1e-6).reason == PARTIAL.replace("sum", "mean")


def test_a_run_in_place_of_one_device():
    assert whole_output({0: WHOLE, 1: WHOLE}, {0: (1,), 1: (1,)}) == WHOLE
    parts = {rank: part(0.25 if rank < 2 else 0.75) for rank in range(4)}
    assert whole_output(parts, {0: (1,), 1: (1,), 2: (2,), 3: (2,)}).count == 64
    assert joined_outputs([part(0.5), OutputSummary(2**63 - 1, 0.0, 0.0, 1)]).bits == 31 - 2**63


def told(one: dict[str, Any], ranks: list[dict[str, Any]]) -> str | None:
    difference = first_difference(*aligned(one, ranks, grow=1.5))
    assert difference is not None and difference.step == 1
    return describe_outputs(difference)


def test_the_first_output_that_differs_is_named():
    off = {"b": OutputSummary(7, 2.0 * 2**0.5, 3.0, 32), "": OutputSummary(8, 5.0, 5.0, 32)}
    wrong = {name: lambda number, own=own: own if number else part(0.5) for name, own in off.items()}
    one = dict.fromkeys(("a", "b", "c", ""), WHOLE)
    text = told(one, [{"a": part(0.5), "c": WHOLE, **wrong}] * 2)
    assert text.startswith("forward: the first output that differs is that of b, on ranks 0-1 (sum: 6 instead of 3")
    assert text.endswith("; the outputs of 2 modules are right")
    for names, own, outputs in (
        (one, "a", "1 module are right; 3 were not compared"),
        (("a", ""), ("a", ""), "2 modules are right, so the error is in the loss, the backward pass or a reduction"),
        ("a", "a", "1 module are right"),
    ):
        text = told(dict.fromkeys(names, WHOLE), [dict.fromkeys(own, part(0.5))] * 2)
        assert text == f"forward: the outputs of {outputs}"


def test_an_output_that_differed_while_all_was_right_proves_nothing():
    always = OutputSummary(7, 3.0, 3.0, 64)
    text = told({"a": WHOLE, "b": WHOLE}, [{"a": always, "b": WHOLE}] * 2)
    assert "the outputs of 1 module are right" in text and text.endswith("; 1 was not compared")
    text = told({"a": WHOLE}, [{"a": lambda number: always if number else WHOLE}] * 2)
    assert "the first output that differs is that of a, on ranks 0-1" in text
    assert told({}, [{}]) is None


@pytest.fixture
def recorder(tmp_path):
    """A recorder that watches the modules of this process."""
    with open(tmp_path / "trace", "wb", buffering=0) as file:
        recorder = ScriptRecorder(Writer(file.fileno()), 1, None, Perturbation(1))
        hooks = recorder.watch_modules()
        try:
            yield recorder
        finally:
            for hook in hooks:
                hook.remove()


def test_a_module_that_raises_is_left(recorder):
    """As in a checkpointed part, which stops its recomputation by an error."""

    class Raising(nn.Module):
        def forward(self):
            raise ValueError

    with pytest.raises(ValueError):
        Raising()()
    assert recorder._here.depth == 0


def test_transformed_functions_are_not_recorded(recorder):
    class PerSample(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return torch.func.vmap(self.inner)(x) + torch.func.grad(lambda y: self.inner(y).sum())(x)

    model, x = PerSample(), torch.ones(2, 4)
    torch.func.vmap(model.inner)(x)
    model(x)
    assert [module for module, *_ in recorder.outputs._calls] == [model]


def test_which_modules_are_recorded(recorder):
    model = nn.Sequential(*(nn.Identity() for _ in range(999)), nn.Linear(1, 1))
    nn.ReLU()(torch.ones(2, 1))  # such as a transformation of the data
    model(torch.ones(2, 1))
    assert [module for module, *_ in recorder.outputs._calls] == [*list(model)[:255], model]


def test_outputs_that_cannot_be_read_are_left_out(recorder, monkeypatch):
    monkeypatch.setattr("mgpu_check.compare.in_script.recorder.statistics", None)
    nn.Linear(1, 1)(torch.ones(2, 1))
    assert recorder.outputs.taken() == {}
