"""Exact training is exact: float32 gives the bits of float64, for every drawn case. Mechanisms stay within tolerance."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.asserts.models import assert_same
from mgpu_check.errors import GradientMismatch
from mgpu_check.oracles.training import training_steps as recipe
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.oracles.training.reference_training import one_device, seen, sgd
from mgpu_check.suite.parallelism.cases import MECHANISMS, MechanismCase
from mgpu_check.suite.parallelism.torch_parallelism import step_of, tolerance_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("widths", [(6, 7, 5), (6, 13, 5), (6, 24, 5), (4, 3, 2, 3, 2), (6, 13, 4, 5)])
def test_float32_gives_the_bits_of_float64(widths):
    for seed in range(6):
        training = ExactTraining(widths=widths, batch=16 if len(widths) == 3 else 8, seed=seed)
        model = training.model()
        optimizer = sgd(training, model)
        got: dict[str, torch.Tensor] = {}
        for step, (inputs, factors) in enumerate(training.batches(), 1):
            optimizer.zero_grad()
            outputs = model(inputs)
            recipe.weighted(outputs, factors).backward()
            optimizer.step()
            got |= {f"step {step}: outputs": outputs.detach()} | seen(model, step)
        assert_same(got, one_device(training), "float32")


def test_one_wrong_bit_is_found():
    training = ExactTraining()
    expected = one_device(training)
    got = dict(expected)
    wrong = expected["step 2: 0.weight"].float()
    wrong.view(torch.int32)[0, 0] ^= 1
    got["step 2: 0.weight"] = wrong
    with pytest.raises(
        GradientMismatch, match=r"here, rank 1: step 2: 0.weight: element \[0, 0\].*\n  1 of 18 results differ"
    ):
        assert_same(got, expected, "here", 1)


@pytest.mark.parametrize("name", MECHANISMS)
def test_rounding_of_one_device_is_far_within_the_tolerance(name):
    for number in range(5):  # each value of each size at least once
        sizes = {key: values[number % len(values)] for key, values in MECHANISMS[name].sizes.items()}
        case = MechanismCase(name, sizes, "float32", number)
        step = step_of(case, 2 + number % 3)
        exact, rounded = step.undivided(torch.float64), step.undivided(torch.float32)
        tolerance = tolerance_of(exact, torch.float32)
        for key, value in exact.items():
            off = (rounded[key].double() - value).abs()
            assert not value.numel() or float(off.max()) <= tolerance[key] / 4, (case, key)


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_result_depends_on_the_data(name):
    """A result that is 0 for any data would hide a defect."""
    sizes = {key: values[0] for key, values in MECHANISMS[name].sizes.items()}
    for key, value in step_of(MechanismCase(name, sizes, "float64", 1), 4).undivided(torch.float64).items():
        assert bool(value.abs().sum() > 0), key
