"""Training steps on one and several devices: by hand, with DataParallel, and with DistributedDataParallel.

The loss is always the mean over the *global* batch: the sum over each shard, divided by the size of the whole batch.
So shards of different sizes, including empty ones, have the correct weight.

The reference is training on one device, as a function of named tensors, in any precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.asserts.models import gradient_or_zeros
from mgpu_check.oracles.training import gradient_exchange as reducing

Forward = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
Shard = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Split = Callable[[torch.Tensor, int], Sequence[torch.Tensor]]


def forward_of(module: nn.Module) -> Forward:
    """Return the forward pass of `module` as a function of inputs and parameters."""
    return lambda inputs, parameters: functional_call(module, dict(parameters), (inputs,))


def weighted(outputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the sum of `outputs` * `factors`, two tensors of one shape, as a scalar: the loss of exact training.
    The gradient of each output is its factor, so it does not round."""
    return (outputs * factors).sum()


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the cross entropy over the samples: logits (batch, classes), labels (batch,) -> ()."""
    return F.cross_entropy(logits, labels, reduction="sum")


def weight(batch_size: int, replicas: int = 1) -> float:
    """Return the factor for a summed loss, such that averaging over `replicas` gives the gradients of the mean loss."""
    return replicas / batch_size


def split(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split `tensor` along the first dimension into `count` shards of almost equal size; some may be empty."""
    return list(tensor.tensor_split(count))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Take one step on one device, or with `nn.DataParallel`, which gathers all outputs on the first device."""
    optimizer.zero_grad()
    (summed_loss(model(inputs), labels) * weight(len(inputs))).backward()
    optimizer.step()


def accumulated_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, shards: Sequence[Shard], batch_size: int, ranks: int = 1
) -> None:
    """Take one step with gradients accumulated over micro-batches; DDP synchronizes only in the last one.

    `shards` are the micro-batches of this rank; a single one means no accumulation. The whole batch has `batch_size`
    samples, over all ranks and micro-batches, and DDP averages over `ranks`.
    """
    optimizer.zero_grad()
    for index, (inputs, labels) in enumerate(shards):
        with unsynchronized(model) if index + 1 < len(shards) else nullcontext():
            (summed_loss(model(inputs), labels) * weight(batch_size, ranks)).backward()
    optimizer.step()


def unsynchronized(model: nn.Module) -> AbstractContextManager[None]:
    """Within the context, do not synchronize the gradients of a DDP module; do nothing for other modules."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    context: AbstractContextManager[None] = model.no_sync()
    return context


def shardwise_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, shards: Sequence[Shard]
) -> list[dict[str, torch.Tensor]]:
    """Take one step on one device that processes the batch shard by shard, as several devices do.

    This is the correct reference if the samples of a shard interact, as in BatchNorm: each shard is normalised by its
    own statistics. Every shard starts from the same buffers. The model keeps the buffers of the first shard, as
    DataParallel keeps those of its first device, and DDP those of rank 0. Return the buffers after each shard, in
    order; they correspond to those of the ranks of DDP.
    """
    optimizer.zero_grad()
    batch_size = sum(len(inputs) for inputs, _ in shards)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers_of_shards = []
    for inputs, labels in shards:
        _set_buffers(model, before)
        (summed_loss(model(inputs), labels) * weight(batch_size)).backward()
        buffers_of_shards.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    # torch 2.13: the first replica of DataParallel shares its buffers with the module (torch/nn/parallel/
    # data_parallel.py), and DDP broadcasts those of rank 0 (torch/nn/parallel/distributed.py, _sync_buffers).
    _set_buffers(model, buffers_of_shards[0])
    optimizer.step()
    return buffers_of_shards


def _set_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    # Through .data: the backward pass of BatchNorm refuses statistics whose version counter has changed (torch 2.13).
    for name, buffer in model.named_buffers():
        buffer.data.copy_(values[name])


def replicate(parameters: Mapping[str, torch.Tensor], devices: Sequence[torch.device]) -> list[dict[str, torch.Tensor]]:
    """Copy the parameters to each device, as leaf tensors that require gradients."""
    return [
        {name: value.detach().clone().to(device).requires_grad_() for name, value in parameters.items()}
        for device in devices
    ]


def train_batch(
    forward: Forward,
    replicas: Sequence[Mapping[str, torch.Tensor]],
    inputs: torch.Tensor,
    labels: torch.Tensor,
    rate: float,
    loss: Loss = summed_loss,
) -> None:
    """Take one step by hand, on one device per replica of the parameters.

    Splits the batch, sums the loss over each shard, sums the gradients with `allreduce`, and takes the same step of SGD
    on every replica.
    """
    devices = [next(iter(replica.values())).device for replica in replicas]
    shards = zip(split(inputs, len(devices)), split(labels, len(devices)), devices, replicas, strict=True)
    losses = [loss(forward(x.to(device), own), y.to(device)) for x, y, device, own in shards]
    for own_loss in losses:
        own_loss.backward()
    with torch.no_grad():
        for name in replicas[0]:
            reducing.allreduce([_gradient(replica[name]) for replica in replicas])
        for replica in replicas:
            sgd(replica, rate, len(inputs))


def train(
    forward: Forward,
    parameters: Mapping[str, torch.Tensor],
    devices: Sequence[torch.device],
    batches: Sequence[Shard],
    *,
    rate: float,
    epochs: int = 1,
    loss: Loss = summed_loss,
) -> list[dict[str, torch.Tensor]]:
    """Train replicas of `parameters` on `devices` with `train_batch`, and return the replicas.
    This is the loop of the chapter on multiple GPUs of *Dive into Deep Learning*. It does not change `parameters`."""
    replicas = replicate(parameters, devices)
    for _ in range(epochs):
        for inputs, labels in batches:
            for replica in replicas:
                clear(replica)
            train_batch(forward, replicas, inputs, labels, rate, loss)
    return replicas


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "the loss does not depend on this parameter"
    return parameter.grad


def sgd(parameters: Mapping[str, torch.Tensor], rate: float, batch_size: int) -> None:
    """Take a step of SGD in place. Gradients are sums over `batch_size` samples, and are divided by it in place.
    Call `clear` before the next backward pass."""
    with torch.no_grad():
        for parameter in parameters.values():
            gradient = _gradient(parameter)
            gradient /= batch_size
            parameter -= rate * gradient


def clear(parameters: Mapping[str, torch.Tensor]) -> None:
    """Drop the gradients of `parameters`."""
    for parameter in parameters.values():
        parameter.grad = None


def as_inputs(model: nn.Module, batches: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """Return all inputs of a training by name: the state of `model`, and each batch."""
    named = {f"state {name}": value.detach().clone() for name, value in model.state_dict().items()}
    for step, (inputs, labels) in enumerate(batches):
        named |= {f"inputs {step}": inputs, f"labels {step}": labels}
    return named


def observed(model: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors to compare after a step: "gradient of <parameter>", and "<parameter>" after the update."""
    parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else model
    gradients = {f"gradient of {name}": gradient_or_zeros(value).clone() for name, value in parameters.items()}
    return gradients | {name: value.detach().clone() for name, value in parameters.items()}


def on_one_device(
    build: Callable[[], nn.Module],
    steps: int,
    *,
    rate: float,
    momentum: float = 0.0,
    shards: int = 1,
    divide: Split = split,
    evaluation: bool = False,
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return a function from the tensors of `as_inputs` to those of `observed`: `steps` steps of SGD on one device.

    Args:
        build: creates the model; state, dtype and device are replaced by those of the inputs.
        steps: number of steps; each has its own batch.
        shards: number of shards per batch, see `shardwise_step`. In training mode, the result also has the
            buffers of each shard after the last step, as "<buffer> of rank <shard>".
        divide: how to divide a batch into shards.
        evaluation: train in evaluation mode: BatchNorm uses its running statistics and does not update them.
    """

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model = _model(build, inputs).train(not evaluation)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        buffers_of_shards: list[dict[str, torch.Tensor]] = []
        for step in range(steps):
            images, labels = inputs[f"inputs {step}"], inputs[f"labels {step}"]
            pairs = list(zip(divide(images, shards), divide(labels, shards), strict=True))
            buffers_of_shards = shardwise_step(model, optimizer, pairs)
        buffers = {
            f"{name} of rank {shard}": value
            for shard, values in enumerate([] if evaluation else buffers_of_shards)
            for name, value in values.items()
            if value.is_floating_point()
        }
        return observed(model) | buffers

    return run


def _model(build: Callable[[], nn.Module], inputs: Mapping[str, torch.Tensor]) -> nn.Module:
    states = {name.removeprefix("state "): value for name, value in inputs.items() if name.startswith("state ")}
    reference = next(iter(states.values()))
    with torch.random.fork_rng(devices=[]):
        model = build().to(device=reference.device, dtype=reference.dtype)
    model.load_state_dict(states)
    return model
