"""Training on one device as a function of named tensors: what a parallel step is compared with, in any precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mgpu_check.recipes import training

__all__ = ["as_inputs", "observed", "on_one_device"]

Batch = tuple[torch.Tensor, torch.Tensor]
Split = Callable[[torch.Tensor, int], Sequence[torch.Tensor]]


def as_inputs(model: nn.Module, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """Return all that training depends on, by name: the state of `model` and each batch."""
    named = {f"state {name}": value.detach().clone() for name, value in model.state_dict().items()}
    for step, (inputs, labels) in enumerate(batches):
        named |= {f"inputs {step}": inputs, f"labels {step}": labels}
    return named


def observed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what is compared after a step: "gradient of <parameter>", and "<parameter>" as the optimizer has left it."""
    gradients = {f"gradient of {name}": value for name, value in training.gradients(model).items()}
    return gradients | {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def on_one_device(
    build: Callable[[], nn.Module],
    steps: int,
    *,
    rate: float,
    momentum: float = 0.0,
    shards: int = 1,
    divide: Split = training.split,
    evaluation: bool = False,
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return `steps` steps of SGD on one device, as a function of `as_inputs` that gives what `observed` does.

    Args:
        build: makes the model; its state is replaced by that of the inputs, its dtype and device by theirs.
        steps: how many; each on a batch of its own.
        rate, momentum: of SGD.
        shards: go through each batch in so many shards, as `training.shardwise_step` does. The results have the buffers
            too that each shard has left after the last step, in training, as "<buffer> of rank <shard>".
        divide: how a batch is divided.
        evaluation: in evaluation mode: BatchNorm takes its running statistics, and leaves them as they are.
    """

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model = _model(build, inputs).train(not evaluation)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        left: list[dict[str, torch.Tensor]] = []
        for step in range(steps):
            images, labels = inputs[f"inputs {step}"], inputs[f"labels {step}"]
            parts = list(zip(divide(images, shards), divide(labels, shards), strict=True))
            left = training.shardwise_step(model, optimizer, parts)
        buffers = {
            f"{name} of rank {shard}": value
            for shard, values in enumerate([] if evaluation else left)
            for name, value in values.items()
            if value.is_floating_point()
        }
        return observed(model) | buffers

    return run


def _model(build: Callable[[], nn.Module], inputs: Mapping[str, torch.Tensor]) -> nn.Module:
    states = {name.removeprefix("state "): value for name, value in inputs.items() if name.startswith("state ")}
    first = next(iter(states.values()))
    with torch.random.fork_rng(devices=[]):
        model = build().to(device=first.device, dtype=first.dtype)
    model.load_state_dict(states)
    return model
