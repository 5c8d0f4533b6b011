"""Reference training on one device, as a function of named tensors, in any precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mgpu_check.suite.recipes import training

Batch = tuple[torch.Tensor, torch.Tensor]
Split = Callable[[torch.Tensor, int], Sequence[torch.Tensor]]


def as_inputs(model: nn.Module, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """Return all inputs of a training by name: the state of `model`, and each batch."""
    named = {f"state {name}": value.detach().clone() for name, value in model.state_dict().items()}
    for step, (inputs, labels) in enumerate(batches):
        named |= {f"inputs {step}": inputs, f"labels {step}": labels}
    return named


def observed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors to compare after a step: "gradient of <parameter>", and "<parameter>" after the update."""
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
    """Return a function from the tensors of `as_inputs` to those of `observed`: `steps` steps of SGD on one device.

    Args:
        build: creates the model; state, dtype and device are replaced by those of the inputs.
        steps: number of steps; each has its own batch.
        rate, momentum: parameters of SGD.
        shards: number of shards per batch, see `training.shardwise_step`. In training mode, the result also has the
            buffers of each shard after the last step, as "<buffer> of rank <shard>".
        divide: how to divide a batch into shards.
        evaluation: train in evaluation mode: BatchNorm uses its running statistics and does not update them.
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
