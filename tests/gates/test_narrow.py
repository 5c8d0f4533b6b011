"""Steps in bfloat16 and float16: right ones pass, and what is lost or doubled shows through their rounding."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from mgpu_check import NotCompared
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario
from tests.gates.single_cases import failures
from tests.gates.steps import build, chunked, regression, variant

pytestmark = pytest.mark.gpus(4)

RATE = 0.5
PLAIN, SEVERAL_STEPS = Scenario(2, 8), Scenario(2, 8, steps=2)


class Plain:
    """Parameters and gradients in a narrow dtype, which also goes over the wire. The input is cast by name."""

    dtype: torch.dtype = torch.bfloat16
    wrong = ""
    wire: torch.dtype | None = None

    def __init__(self, model, rank):
        model.to(rank.device)

    def forward(self, model, x):
        return model(x.bfloat16() if self.dtype == torch.bfloat16 else x.half())

    def __call__(self, model, batch, rank):
        x, y = chunked(batch, rank)
        model.zero_grad()
        F.mse_loss(self.forward(model, x).float(), y).backward()
        several = rank.size > 1
        for parameter in model.parameters():
            if self.wrong != "not synchronized" or not several:
                gradient = parameter.grad.to(self.wire or parameter.grad.dtype)
                dist.all_reduce(gradient)
                parameter.grad.copy_(gradient / rank.size)
        if self.wrong != "not updated" or not several:
            self.update(model, RATE * (2 if self.wrong == "twice" and several else 1))

    def update(self, model, rate):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(rate * parameter.grad)


class Masters(Plain):
    """Weights in float32 beside those that the model computes with."""

    wire = torch.float32

    def __init__(self, model, rank):
        super().__init__(model, rank)
        self.masters = [parameter.detach().float() for parameter in model.parameters()]

    def update(self, model, rate):
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), self.masters, strict=True):
                master.sub_(rate * parameter.grad.float())
                parameter.copy_(master)


class Autocast(Plain):
    def forward(self, model, x):
        with torch.autocast("cuda", self.dtype):
            return model(x)


def built(step):
    return build if issubclass(step, Autocast) else lambda: build().to(step.dtype)


EACH = ("not updated", "twice", "not synchronized")
STEPS = (Plain, variant(Plain, dtype=torch.float16), Autocast, Masters)


@pytest.mark.parametrize(
    ("step", "mistakes"),
    [(Masters, ["twice"]), *(pytest.param(step, EACH, marks=pytest.mark.slow) for step in STEPS)],
)
def test_right_steps_pass_and_lost_and_doubled_updates_do_not(ranks, step, mistakes):
    scaled = Scenario(2, 4, change="scaled")
    assert failures(ranks, Program(step, built(step), regression), PLAIN, SEVERAL_STEPS, scaled) == []
    for wrong in mistakes:
        program = Program(variant(step, wrong=wrong), built(step), regression)
        assert failures(ranks, program, PLAIN) != [], wrong


class Cancelling(Plain):
    """The gradient is the difference of nearly equal numbers, so its rounding errors are as large as itself."""

    def forward(self, model, x):
        out = model(x.bfloat16())
        return (1000 + out) - 1000


def test_a_tolerance_that_proves_nothing_says_what_to_give(ranks):
    with pytest.raises(NotCompared, match="give a tolerance with tolerance=, or a reference= that computes in float32"):
        failures(ranks, Program(Cancelling, built(Plain), regression), PLAIN, SEVERAL_STEPS)


class Compressed(Plain):
    """Only messages are narrow: each rank rounds its part, which may be larger than the sum."""

    def __call__(self, model, batch, rank):
        x, y = (part.tensor_split(rank.size)[rank.index].to(rank.device) for part in batch)
        model.zero_grad()
        (F.mse_loss(model(x), y, reduction="sum") / len(batch[0])).backward()
        for parameter in model.parameters():
            message = parameter.grad.to(self.dtype)
            dist.all_reduce(message)
            parameter.grad.copy_(message)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rounding_of_each_part_of_a_sum_is_granted(ranks, dtype):
    cases = [Scenario(4, 9, seed=seed) for seed in range(6)]
    assert failures(ranks, Program(variant(Compressed, dtype=dtype), build, regression), *cases) == []
