"""The gate for configurations: right ones pass, and each comparison is there for a mistake that needs it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from mgpu_check import Configuration, ScalingMismatch, assert_steps_agree
from mgpu_check.gates.gate_arguments import RanksFixture
from tests.gates.agreed import Experts, Mixture, Mlp, Replicated, Sharded, TensorParallel, batch, stepping
from tests.gates.steps import raised_by, variant

pytestmark = pytest.mark.gpus(4)

FEW: dict[str, Any] = {"build": Mlp, "batch": batch, "sizes": [4], "max_examples": 1}
ALONE: dict[str, Any] = {"one_device": False}
DDP, TP, WRONG_TP = (
    Configuration(step, 2) for step in (Replicated, TensorParallel, variant(TensorParallel, wrong=True))
)


def refuted(ranks: RanksFixture, steps: dict[str, Any], match: str, *mistakes: str, **options: Any) -> ScalingMismatch:
    return raised_by(assert_steps_agree, ranks, steps, *mistakes, match=match, **FEW | options)


@pytest.mark.slow
def test_one_device_shows_the_wrong_one(ranks):
    assert_steps_agree(ranks, {"ddp": DDP, "tp": TP}, **FEW)
    match = "^tp differs from one device; ddp agrees with it: "
    found = refuted(ranks, {"ddp": DDP, "tp": WRONG_TP}, match, "partial-result-added-on-every-rank")
    assert "first gradient of up.weight in optimizer step 1" in str(found) and found.ranks == (0, 1)


@pytest.mark.slow
def test_two_that_differ_are_both_suspects(ranks):
    found = refuted(ranks, {"ddp": DDP, "tp": WRONG_TP}, "^tp and ddp differ: ", **ALONE)
    assert "nothing shows which of them is wrong: expected values are those of ddp" in str(found)
    assert found.ranks == ()


@pytest.mark.slow
def test_two_that_agree_show_the_wrong_one(ranks):
    sharded = {"sharded": Configuration(Sharded, {"dp": 2})}
    for steps in {"tp": WRONG_TP, "ddp": DDP}, {"ddp": DDP, "tp": WRONG_TP}:
        refuted(ranks, steps | sharded, "^tp differs from the others, ddp, sharded, which agree: ", **ALONE)


@pytest.mark.slow
def test_a_gradient_factor_of_experts(ranks):
    steps = {"ddp": DDP, "ep": Configuration(Experts, 4)}
    assert_steps_agree(ranks, steps, **FEW | ALONE | {"build": Mixture, "sizes": [8]})
    steps["ep"] = Configuration(variant(Experts, factor=2.0), 2)
    found = refuted(ranks, steps, "^ep and ddp differ: ", "world-size-factor", **ALONE, build=Mixture, sizes=[8])
    assert "if ddp is right and ep is wrong: gradient of experts.0.weight" in str(found)
    assert "are 2 times what ddp gives" in str(found)


@pytest.mark.slow
def test_steps_that_differ_on_one_device(ranks):
    steps = {"ddp": DDP, "other": Configuration(stepping(torch.optim.AdamW, weight_decay=0.5), 2)}
    found = refuted(ranks, steps, "^other and ddp differ, on one device already: ", "optimizer-differs")
    assert "if ddp is right and other is wrong: " in str(found)
    assert "weight_decay of up.weight is 0.5 on rank 0, and 0.01 on ddp" in str(found)


@pytest.mark.slow
def test_an_error_of_one_configuration(ranks):
    steps = {"ddp": DDP, "sharded": Configuration(Sharded, 2)}  # without its mesh
    refuted(ranks, steps, "^sharded fails on its own: ranks 0-1 of 2 raised AssertionError", **ALONE)
    with pytest.raises(ValueError, match="sharded fails on one device: "):
        assert_steps_agree(ranks, steps, **FEW)


class Idle(Replicated):
    def __call__(self, model, batch, rank):
        net: Any = self.model
        return {"norm": net.module.up.weight.norm()}


@pytest.mark.slow
def test_parameters_that_only_one_configuration_trains(ranks):
    steps = {"idle": Configuration(Idle, 2), "ddp": DDP}
    with pytest.raises(ValueError, match="ddp returns nothing, and idle 'norm'"):
        assert_steps_agree(ranks, steps, **FEW | ALONE)
    refuted(ranks, steps, "^ddp and idle differ: .* first up.weight", **ALONE, observe=["grads", "params"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": Replicated}, "steps=.*; give a mapping from names to configurations"),
        ({"steps": {"ddp": DDP}}, "steps has one configuration, 'ddp'; give another one"),
        ({"steps": {"ddp": 3, "tp": TP}}, "step=3 is not a function"),
        ({"steps": {"ddp": Configuration(Replicated, cast("Any", [2, 4])), "tp": TP}}, "on of 'ddp' has "),
        ({"steps": {"ddp": Configuration(Replicated, {"dp": 0}), "tp": TP}}, "on of 'ddp' has {'dp': 0}"),
        ({"steps": {"ddp": Configuration(Replicated, 2, unjudged={"up.*": ""}), "tp": TP}}, "unjudged={'up.*': ''}"),
        ({"one_device": None}, "one_device=None; give True or False"),
        ({"one_device": False, "reference": Replicated}, "reference and one_device=False are both given"),
        ({"tolerance": 2}, "assert_steps_agree: tolerance=2"),
    ],
)
def test_arguments(ranks, options, match):
    with pytest.raises(ValueError, match=match):
        steps = options.pop("steps", {"ddp": DDP, "tp": TP})
        assert_steps_agree(ranks, steps, **FEW | options)
