"""The measured tolerance: right steps are within it, defects far below the size of a gradient are not."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.asserts.models import assert_gradients_agree
from mgpu_check.errors import GradientMismatch
from mgpu_check.numerics.steps import measure_step, measure_step_provisionally
from mgpu_check.oracles.training import models, training_steps
from mgpu_check.oracles.training.cases import TrainingSpec


def _steps(training: TrainingSpec, shards: int):
    return training_steps.on_one_device(
        training.build, training.steps, rate=training.rate, momentum=training.momentum, shards=shards
    )


def _inputs(training: TrainingSpec) -> dict[str, torch.Tensor]:
    return training_steps.as_inputs(training.initial(), training.batches())


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 25))])
@pytest.mark.parametrize(("batch", "shards", "steps"), [(8, 4, 1), (7, 3, 2), (2, 4, 3)])
def test_right_steps_are_within_the_tolerance(seed, batch, shards, steps) -> None:
    training = TrainingSpec("mlp", batch, steps, momentum=0.9, seed=seed)
    inputs = _inputs(training)
    measured = measure_step(_steps(training, 1), inputs)
    assert_gradients_agree(_steps(training, shards)(inputs), measured)


@pytest.mark.parametrize("training", [TrainingSpec("lenet", 6, seed=1), TrainingSpec("lenet", 5, steps=2, seed=2)])
def test_right_steps_of_lenet_are_within_the_tolerance(training) -> None:
    inputs = _inputs(training)
    singles = [_steps(training, shards)(inputs) for shards in (1, 3)]
    measured = measure_step(_steps(training, 1), inputs, singles=singles)
    backwards = {name: value.flip(0) if name[:6] in ("inputs", "labels") else value for name, value in inputs.items()}
    assert_gradients_agree(_steps(training, 2)(backwards), measured)


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_in_one_of_four_ranks_is_caught(seed) -> None:
    training = TrainingSpec("mlp", 8, seed=seed)
    inputs = _inputs(training)
    measured = measure_step(_steps(training, 1), inputs)
    results = dict(_steps(training, 1)(inputs))
    for name, value in list(results.items()):
        if not name.startswith("gradient"):
            continue
        element = int(value.abs().argmax())
        bits = value.clone().view(-1)
        bits.view(torch.int32)[element] ^= 1 << 12
        # The effect of such a flip in one rank's part on the mean over four ranks.
        off = value + (bits.view_as(value) - value) / 4
        with pytest.raises(GradientMismatch, match=r"looks like a corrupted element|arithmetic in"):
            assert_gradients_agree(results | {name: off}, measured)


@pytest.mark.parametrize("training", [TrainingSpec("mlp", 8, 2, seed=1), TrainingSpec("lenet", 5, seed=2)])
def test_what_is_granted_provisionally_is_granted_in_full(training) -> None:
    inputs = _inputs(training)
    single = _steps(training, 4)(inputs)
    provisional = measure_step_provisionally(_steps(training, 1), inputs, single)
    in_full = measure_step(_steps(training, 1), inputs, singles=[single])
    # Both are estimated by random perturbations. How they compare in one element depends on the processor's kernels.
    for sign in (1, -1):
        off = {name: single[name] + sign * 0.6 * value for name, value in provisional.tolerance.items()}
        assert_gradients_agree(off, provisional)
        assert_gradients_agree(off, in_full)
    far = {name: single[name] + 100 * value for name, value in provisional.tolerance.items()}
    for measured in (provisional, in_full):
        with pytest.raises(GradientMismatch):
            assert_gradients_agree(far, measured)


def test_the_tolerance_is_small() -> None:
    training = TrainingSpec("mlp", 8, seed=3)
    measured = measure_step(_steps(training, 1), _inputs(training))
    for name, value in measured.reference.items():
        assert measured.tolerance[name].max() < 2e-5 * value.abs().max()


def test_a_decision_that_rounding_makes_is_left_open() -> None:
    """At x = 1 + 1e-9, float32 cannot resolve the side of the kink that the sum is on: both gradients must pass."""

    def step(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = inputs["x"].clone().requires_grad_()
        torch.relu(x * 3 - 3).sum().backward()
        assert x.grad is not None
        return {"gradient": x.grad}

    inputs = {"x": torch.tensor([1.0, 2.0, 0.5], dtype=torch.float32)}
    measured = measure_step(step, inputs)
    assert measured.tolerance["gradient"][0] >= 3
    far = measure_step(step, {"x": torch.tensor([1.1, 2.0, 0.5])})
    assert far.tolerance["gradient"].max() < 1e-4


def test_what_cancels_exactly_is_measured_too() -> None:
    """The gradient of a bias before BatchNorm is zero; float32 gives noise there, which is no finding."""
    training = TrainingSpec("convnet", 8, seed=0)
    inputs = _inputs(training)
    measured = measure_step(_steps(training, 1), inputs)
    name = "gradient of 0.bias"
    assert measured.reference[name].abs().max() < 1e-12
    assert_gradients_agree(_steps(training, 1)(inputs), measured)
    with pytest.raises(GradientMismatch, match=name):
        assert_gradients_agree(_steps(training, 1)(inputs) | {name: torch.full((4,), 1e-4)}, measured)


def test_measuring_leaves_inputs_and_random_state_alone() -> None:
    training = TrainingSpec("mlp", 4, seed=0)
    inputs = _inputs(training)
    before = {name: value.clone() for name, value in inputs.items()}
    torch.manual_seed(5)
    first = torch.rand(2)
    torch.manual_seed(5)
    measure_step(_steps(training, 2), inputs)
    assert torch.equal(torch.rand(2), first)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.mark.slow
def test_resnet18_is_within_the_tolerance() -> None:
    training = TrainingSpec("resnet18", 6, width=4, seed=0)
    inputs = _inputs(training)
    assert sum(p.numel() for p in models.resnet18().parameters()) > 11_000_000
    measured = measure_step(_steps(training, 3), inputs, pairs=2)
    assert_gradients_agree(_steps(training, 3)(inputs), measured)
