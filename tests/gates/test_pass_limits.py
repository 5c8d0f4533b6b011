"""What a pass does not show is said, and only where it is so."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check import assert_step_scales
from mgpu_check.diagnosis.observations import Expected, ObservedRun
from mgpu_check.gates.comparison.coverage import PassLimits
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import has_equal_lengths
from mgpu_check.gates.step_gate import micro_batches_of
from tests.gates.diagnosed import synchronize
from tests.gates.steps import build, chunked, regression

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
MASK = torch.tensor([[True, True, True], [True, False, False]])


def limits(*cases, reference=None):
    found = PassLimits(Program(lambda *_: None, nn.Module, None, reference))
    for single, runs in cases:
        found.add(Expected(single, None), runs)
    return [line.partition(":")[0] for line in found.lines()]


def test_micro_batches_without_a_reference():
    several = ObservedRun(backwards=4, optimizer_steps=2, calls=2)
    assert limits((several, [])) == ["a wrong weight of micro-batches"]
    assert limits((several, []), reference=lambda model, batch: None) == []
    assert limits((ObservedRun(backwards=2, optimizer_steps=2, calls=1), [])) == []  # two models, as of a GAN
    assert limits((ObservedRun(backwards=3, calls=3), [])) == []  # without an optimizer


def test_equal_lengths_in_all_cases():
    equal, unequal, none = (ObservedRun(equal_lengths=value) for value in (True, False, None))
    assert limits((equal, []), (equal, [])) == ["samples of different lengths"]
    assert limits((equal, []), (unequal, [])) == limits((none, [])) == []


@pytest.mark.parametrize(
    ("batch", "equal"),
    [
        ((TOKENS, TOKENS), True),
        ((TOKENS, MASK), False),
        ({"tokens": TOKENS, "labels": TOKENS.masked_fill(~MASK, -100)}, False),
        ((torch.randn(2, 3), torch.tensor([0, 1])), None),
        ((torch.randn(2, 3), MASK), False),
    ],
)
def test_lengths_of_samples(batch, equal):
    assert has_equal_lengths([batch]) is equal


def accumulating(cut, model, batch, rank):
    x, y = chunked(batch, rank)
    parts = list(zip(cut(x), cut(y), strict=True))
    for a, b in parts:
        (F.mse_loss(model.to(rank.device)(a), b) / len(parts)).backward()
    synchronize(model, rank)


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    ("cut", "count"),
    [
        (lambda x: [x], 1),
        (lambda x: x.chunk(2), 2),
        (lambda x: x.chunk(8), 8),
        (lambda x: x.split(3), 3),
        (lambda x: x.split([1, len(x) - 1]), 2),
        (lambda x: x.chunk(1 + len(x) // 20), 1),  # 1, 2 and 3 passes follow no rule
    ],
)
def test_the_number_of_micro_batches(ranks, cut, count):
    def step(model, batch, rank):
        accumulating(cut, model, batch, rank)

    assert micro_batches_of(ranks, Program(step, build, regression)) == count


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    ("wrong", "match"), [({"micro_batches": 0}, "int of at least 1"), ({"micro_batches": 2, "sizes": [4]}, "give both")]
)
def test_arguments(ranks, wrong, match):
    options = {"build": build, "batch": regression, "sizes": "divisible", **wrong}
    with pytest.raises(ValueError, match=match):
        assert_step_scales(ranks, lambda *_: None, **options)


PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from mgpu_check import assert_step_scales

def batch(n):
    return torch.randn(n, 6), torch.randn(n, 3)

def step(model, batch, rank):
    x, y = (part.chunk(rank.size)[rank.index].to(rank.device) for part in batch)
    assert rank.size == 1 or len(x) % 2 == 0
    for a, b in zip(x.chunk(2), y.chunk(2)):
        (F.mse_loss(model.to(rank.device)(a), b) / 2).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.size

def whole(model, batch):
    F.mse_loss(model(batch[0]), batch[1]).backward()

def test_alone(ranks):
    assert_step_scales(ranks, step, build=lambda: nn.Linear(6, 3), batch=batch, sizes="divisible", max_examples=4)

def test_with_a_reference(ranks):
    assert_step_scales(
        ranks, step, build=lambda: nn.Linear(6, 3), batch=batch, sizes="divisible", max_examples=4, reference=whole
    )

"""


@pytest.mark.slow
def test_the_summary_and_the_report_say_it(run, pytester):
    pytester.makepyfile(PROGRAM)
    result = run("--gpus=2", "--simulate", "--junitxml=out.xml")
    result.assert_outcomes(passed=2)
    lines = [line for line in result.outlines if "not seen " in line]
    assert len(lines) == 1, result.outlines
    assert lines[0].startswith("mgpu-check: not seen by the gate of step: a wrong weight of micro-batches: ")
    told = pytester.path.joinpath("out.xml").read_text()
    assert told.count('name="mgpu_check.not_seen"') == 1
