"""Train exactly on one device, as the reference that other ways to train must match bit for bit."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from mgpu_check.asserts.models import gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.exact_training.cases import ExactTraining
from mgpu_check.suite.recipes.gradient_exchange import Update
from mgpu_check.suite.recipes.training_steps import split, weighted
from mgpu_check.torch_hooks.tensors import copied

ADAM_RATE = 0.25
"""The learning rate of Adam: about as large as the parameters, because rounding errors are relative to both."""


def sgd(training: ExactTraining, model: nn.Module) -> torch.optim.SGD:
    """Return the optimizer of a training, for the parameters of `model`."""
    return torch.optim.SGD(model.parameters(), lr=training.rate, momentum=training.momentum)


def own_part(batch: tuple[torch.Tensor, torch.Tensor], rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's samples of inputs and factors, on its device."""
    inputs, factors = (split(part, rank.size)[rank.index].to(rank.device) for part in batch)
    return inputs, factors


def own_results(training: ExactTraining, expected: Mapping[str, torch.Tensor], rank: Rank) -> dict[str, torch.Tensor]:
    """Return the results of one device that this rank must have: outputs of its own samples, and all others."""
    own = split(torch.arange(training.batch), rank.size)[rank.index]
    return {name: value[own] if name.endswith("outputs") else value for name, value in expected.items()}


def update_of(training: ExactTraining) -> Update:
    """Return the step of `sgd`, written by hand, for a store that keeps one tensor per parameter."""
    velocity: dict[int, torch.Tensor] = {}

    def update(value: torch.Tensor, gradient: torch.Tensor) -> None:
        moved = velocity.get(value.data_ptr())
        velocity[value.data_ptr()] = gradient if moved is None else training.momentum * moved + gradient
        value -= training.rate * velocity[value.data_ptr()]

    return update


def seen(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Copy gradients and parameters to the CPU, by names that contain the step, counted from 1."""
    found = {}
    for name, value in model.named_parameters():
        found[f"step {step}: gradient of {name}"] = copied(gradient_or_zeros(value))
        found[f"step {step}: {name}"] = copied(value)
    return found


def gathered(model: nn.Module, step: int, but: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Gather sharded gradients and parameters, by the names that `seen` gives. A collective.

    A gradient that this rank lacks is left out, and so are the parameters `but`.
    """
    from torch.distributed.tensor import DTensor

    found = {}
    for name, value in model.named_parameters():
        if name in but:
            continue
        assert isinstance(value, DTensor), "a parameter that is divided is a DTensor"
        # A rank without a gradient takes part with zeros, because the others would wait for it.
        gradient = torch.zeros_like(value) if value.grad is None else value.grad
        assert isinstance(gradient, DTensor), "the gradient of a DTensor is one"
        whole = copied(gradient.full_tensor())
        if value.grad is not None:
            found[f"step {step}: gradient of {name}"] = whole
        found[f"step {step}: {name}"] = copied(value.full_tensor())
    return found


def one_device(
    training: ExactTraining, model: nn.Module | None = None, *, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Train on the CPU in float64; return outputs, gradients and parameters after each step.

    Args:
        model: the model to train in place of the model of `training`; it is changed.
        scale: a power of two that multiplies the loss.
    """
    model = (training.model() if model is None else model).double()
    optimizer = sgd(training, model)
    found = {}
    for step, (inputs, factors) in enumerate(training.batches(), 1):
        optimizer.zero_grad()
        outputs = model(inputs.double())
        (weighted(outputs, factors.double()) * scale).backward()
        optimizer.step()
        found[f"step {step}: outputs"] = copied(outputs)
        found |= seen(model, step)
    return found


def adam_tolerance(values: Mapping[str, torch.Tensor], rate: float) -> dict[str, torch.Tensor]:
    """Return the tolerance for float32 rounding of parameters and moments in a step or two of Adam with given
    gradients.

    Each element goes through about fifteen operations that round once each: decay, two moments, their corrections,
    root, quotient, product, difference. Only the last one can cancel, and its operands are at most as large as
    parameter and rate together. So the tolerance is 32 unit roundoffs of 2^-24 of this sum.
    """
    return {name: (value.double().abs() + rate) * 2.0**-19 for name, value in values.items()}
