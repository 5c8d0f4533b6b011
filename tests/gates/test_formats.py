"""Steps in float8 and narrower formats: right ones pass, and a factor, a lost scale and a wide message do not."""

import functools

import pytest
import torch
from torch import nn

from mgpu_check import ScalingMismatch, assert_step_scales
from mgpu_check.gates.comparison.wire import Wire, check_wire, undeclared
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.run.draws import Notes
from mgpu_check.gates.run.step_runs import run_traced
from mgpu_check.gates.search.scenarios import Scenario
from tests.gates import formats
from tests.gates.formats import RECIPES, Sharded, Training
from tests.gates.single_cases import failures
from tests.gates.steps import variant

pytestmark = pytest.mark.gpus(4)

SOMETIMES = [
    pytest.param(recipe, marks=[] if recipe in ("mxfp8", "nvfp4") else [pytest.mark.slow]) for recipe in RECIPES
]
CASES = Scenario(2, 8), Scenario(4, 8, seed=1)


def program(step, recipe, activation=nn.Tanh):
    quantizers = (RECIPES[recipe],) if recipe in ("nvfp4", "stochastic") else ()
    return Program(step, functools.partial(formats.model_of, recipe, activation), formats.batch, quantizers=quantizers)


@pytest.mark.parametrize("recipe", SOMETIMES)
def test_right_recipes_pass_and_a_factor_does_not(ranks, recipe):
    assert failures(ranks, program(Training, recipe), *CASES) == []
    assert failures(ranks, program(variant(Training, factor=1.25), recipe), CASES[0])


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("recipe", RECIPES)
def test_right_recipes_raise_no_alarm(ranks, recipe, activation):
    """ReLUs decide otherwise where rounding moves their inputs over 0, on ranks as in some samples of the error."""
    cases = [Scenario(size, 8, steps, seed=seed) for size, steps in ((2, 2), (4, 1)) for seed in range(10)]
    assert failures(ranks, program(Training, recipe, activation), *cases) == []
    assert failures(ranks, program(variant(Training, factor=1.5), recipe, activation), CASES[0])


def test_a_scale_of_earlier_steps_is_one_on_all_ranks(ranks):
    right = Program(Training, formats.delayed, formats.batch)
    assert failures(ranks, right, Scenario(2, 8, steps=2)) == []
    wrong = Program(Training, functools.partial(formats.delayed, shared=False), formats.batch)
    assert failures(ranks, wrong, Scenario(2, 8, steps=2))


def built() -> nn.Module:
    first = nn.Linear(16, 32)
    with torch.no_grad():
        first.weight[:8] *= 4  # with the scale of one rank, the others' weights are a quarter of it
    return nn.Sequential(first, nn.Tanh(), nn.Linear(32, 8))


def scales(ranks, step, **options):
    gate = functools.partial(
        assert_step_scales, build=built, batch=formats.batch, world_sizes=[2], sizes=8, max_examples=1
    )
    gate(ranks, step, **options)


def test_a_weight_that_is_gathered_in_float8_has_one_scale_and_that_dtype(ranks):
    wire: Wire = {"all_gather*": torch.float8_e4m3fn, "all_reduce": [torch.float32, torch.bfloat16]}
    right = Program(Sharded, built, formats.batch)
    assert failures(ranks, right, CASES[0]) == []
    traces = [trace for _, trace in ranks.run(run_traced, right, CASES[0], False, size=2)]
    assert undeclared(check_wire("gate", wire), traces) == []
    assert failures(ranks, Program(variant(Sharded, shared_scale=False), built, formats.batch), CASES[0])
    wide = Program(variant(Sharded, narrow=False), built, formats.batch)
    traces = [trace for _, trace in ranks.run(run_traced, wide, CASES[0], False, size=2)]
    ((line, site),) = undeclared(check_wire("gate", wire), traces)
    assert "sends float32[" in line and line.endswith("on ranks 0-1; declared: float8_e4m3fn")
    assert "formats.py" in site


def test_what_casts_lose_is_counted():
    with Notes(numbers=True) as notes:
        torch.tensor([0.0, 1e-5, 1.0, 500.0, -500.0]).to(torch.float8_e4m3fn)
        torch.tensor([1e-9, 1.0]).to(torch.float8_e5m2)
        torch.tensor([1e-9]).to(torch.bfloat16)
    assert notes.casts == {"float8_e4m3fn": (5, 1, 2), "float8_e5m2": (2, 1, 0)}


def test_what_is_sent_otherwise_than_declared_is_no_pass(ranks):
    with pytest.raises(ScalingMismatch) as caught:
        scales(ranks, Training, wire={"all_reduce": torch.bfloat16, "broadcast": torch.float32})
    headline, case, *_, missing = str(caught.value).splitlines()
    assert headline.startswith("Training does not send what wire= declares: all_reduce (")
    assert case.startswith("  smallest case: world size 2, samples 8")
    assert missing == "  no call matches 'broadcast'; the step's calls from Python: all_reduce"
    assert "formats.py" in caught.value.site


def test_rounding_without_a_dtype_is_to_be_given(ranks):
    unnamed = Program(Training, functools.partial(formats.model_of, "stochastic"), formats.batch)
    (failed,) = failures(ranks, unnamed, CASES[0])
    assert failed.expected.remarks[-1].startswith("the step calls round; if it quantizes there, give the function in")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantizers": ["formats:quantize"]}, r"quantizers=\['formats:quantize'\]; give functions"),
        ({"quantizers": formats.mxfp8}, "give functions"),
        ({"quantizers": [formats.mxfp8]}, "quantizers has mxfp8, which the step did not call through"),
        ({"quantizers": [nn.functional.mse_loss]}, "quantizers has mse_loss, whose result has not the shape of its"),
        ({"quantizers": [formats.mxfp8], "reference": formats.batch}, "quantizers and reference are both given"),
        ({"wire": torch.bfloat16}, r"wire=torch.bfloat16; give a mapping"),
        ({"wire": {"all_reduce": "bfloat16"}}, r"wire\['all_reduce'\]='bfloat16'; give a dtype of torch"),
    ],
)
def test_wrong_arguments(ranks, options, message):
    with pytest.raises(ValueError, match=message):
        scales(ranks, Training, **options)
