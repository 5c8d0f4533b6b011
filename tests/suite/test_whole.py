"""Training in whole numbers: nothing rounds where a check says so, bounds are what they must be, and findings name what
is wrong."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.errors import GradientMismatch
from mgpu_check.oracles.training.cases import PLAIN, WholeRun
from mgpu_check.oracles.training.reference_training import (
    OneDevice,
    assert_gradients_are,
    exact_arithmetic,
    slack,
    total,
)
from mgpu_check.oracles.training.training_steps import weighted

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", [*PLAIN, "heads", "reused", "counting", "float64 inside"])
def test_float32_computes_exactly(model: str) -> None:
    """Steps of float32 and float64 agree to the bit: batches of 24 rows, two steps, in several shards and in one."""
    run = WholeRun(model, 24, 2, "momentum")
    one, narrow = OneDevice(run, CPU), run.build()
    with exact_arithmetic():
        for x, targets in run.batches():
            narrow.zero_grad()
            weighted(narrow(x), targets).backward()
            shards = list(zip(x.tensor_split(5), targets.tensor_split(5), strict=True))
            parts = one.parts(shards)
            assert_gradients_are(narrow, parts, label=model)
            assert_gradients_are(narrow, one.parts([(x, targets)]), label=model)
            one.step(total(parts))
            one.settle()
            with torch.no_grad():
                for mine, exact in zip(narrow.parameters(), one.exact.parameters(), strict=True):
                    mine.copy_(exact)


@pytest.mark.parametrize("model", PLAIN)
def test_no_partial_sum_can_leave_the_whole_numbers_of_float32(model: str) -> None:
    """With values of one sign, results of a batch of 24 rows bound every partial sum, in every order: 24 bits hold
    them."""
    run = WholeRun(model, 24, seed=5)
    net = run.build().double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
    x, targets = (value.double().abs() for value in run.batches()[0])
    outputs = net(x)
    weighted(outputs, targets).backward()
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1 << 24
    assert float(outputs.detach().abs().max()) < 1 << 24


def test_the_slack_is_nothing_where_a_sum_is_exact() -> None:
    parts = [torch.tensor([3.0, 2.0**23]), torch.tensor([-5.0, 2.0**23])]
    assert slack(torch.float32, 4, parts).tolist() == [0.0, 0.0]
    eps = torch.finfo(torch.float32).eps
    assert slack(torch.float32, 7, parts).tolist() == pytest.approx([9 * eps * 8, 9 * eps * 2**24])
    # 257 is no number of bfloat16.
    assert slack(torch.bfloat16, 4, [torch.tensor([200.0]), torch.tensor([57.0])]).item() > 1


def test_findings_name_parameter_part_and_element() -> None:
    run = WholeRun("mlp", 8)
    one, net = OneDevice(run, CPU), run.build()
    x, targets = run.batches()[0]
    shards = list(zip(x.chunk(4), targets.chunk(4), strict=True))
    parts = one.parts(shards)
    weighted(net(x[:6]), targets[:6]).backward()
    with pytest.raises(GradientMismatch) as caught:
        assert_gradients_are(net, parts, label="a step", rank=2)
    text = str(caught.value)
    assert "a step, rank 2" in text and "0.weight: element [" in text and "misses rank 3" in text
    assert caught.value.ranks == (2,)
    net.zero_grad()
    with pytest.raises(GradientMismatch, match=r"rank 1: 0\.weight has no gradient, expected one"):
        assert_gradients_are(net, parts, label="a step", rank=1)
