"""Training steps, on one device and on several: by hand, with DataParallel, with DistributedDataParallel.

In all of them the loss is the mean over the *global* batch: summed over each shard, divided by the size of the whole
batch, so that shards of different sizes (empty ones too) weigh what they should.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.recipes import allreduce as reducing

__all__ = [
    "accumulated_step",
    "clear",
    "gradients",
    "replicate",
    "sgd",
    "shardwise_step",
    "split",
    "summed_loss",
    "train",
    "train_batch",
    "train_step",
    "unsynchronized",
    "weight",
    "weighted",
]

Forward = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
Shard = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def weighted(outputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the sum of `outputs`, each times a factor, which is its gradient: two of one shape -> ().

    The loss of exact training: what it hands back is as exact as the factors.
    """
    return (outputs * factors).sum()


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the cross entropy over the samples: logits (batch, classes), labels (batch,) -> ()."""
    return F.cross_entropy(logits, labels, reduction="sum")


def weight(batch_size: int, replicas: int = 1) -> float:
    """Return the factor of a summed loss that makes gradients averaged over `replicas` those of the batch's mean loss."""
    return replicas / batch_size


def split(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Split `tensor` in `parts` along the first dimension, sizes as equal as can be; some empty if there are few
    samples.
    """
    return list(tensor.tensor_split(parts))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the gradients of a module, by parameter; zeros where there is none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Take one step on one device, or with `nn.DataParallel`, which gathers the outputs of all devices on the first
    one.
    """
    optimizer.zero_grad()
    loss = summed_loss(model(inputs), labels) * weight(len(inputs))
    loss.backward()
    optimizer.step()


def accumulated_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, shards: Sequence[Shard], batch_size: int, ranks: int = 1
) -> None:
    """Take one step whose gradients are accumulated over micro-batches; DDP communicates with the last of them only.

    Args:
        shards: the micro-batches of this rank (one: a step without accumulation).
        batch_size: samples in the whole batch, of all ranks and micro-batches.
        ranks: how many ranks DDP averages over.
    """
    optimizer.zero_grad()
    for index, (inputs, labels) in enumerate(shards):
        with unsynchronized(model) if index + 1 < len(shards) else nullcontext():
            (summed_loss(model(inputs), labels) * weight(batch_size, ranks)).backward()
    optimizer.step()


def unsynchronized(model: nn.Module) -> AbstractContextManager[None]:
    """Keep gradients with the rank under DDP, for the time of the context.

    Any other module has nothing to hold back.
    """
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    context: AbstractContextManager[None] = model.no_sync()
    return context


def shardwise_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, shards: Sequence[Shard]
) -> list[dict[str, torch.Tensor]]:
    """Take one step on one device that goes through the batch shard by shard, as several devices do.

    The right reference where samples of a shard see each other (BatchNorm in training): each shard is normalised by its
    own statistics. Every shard starts from the same buffers; the model keeps those that the first one leaves, as the
    first device of DataParallel and rank 0 of DDP do.

    Returns:
        The buffers that each shard leaves, in order: those of the ranks of DDP.
    """
    optimizer.zero_grad()
    batch_size = sum(len(inputs) for inputs, _ in shards)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    left = []
    for inputs, labels in shards:
        _set_buffers(model, before)
        (summed_loss(model(inputs), labels) * weight(batch_size)).backward()
        left.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    _set_buffers(model, left[0])
    optimizer.step()
    return left


def _set_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    # Through .data, because a backward pass that is still to come may hold a buffer's version.
    for name, buffer in model.named_buffers():
        buffer.data.copy_(values[name])


def replicate(parameters: Mapping[str, torch.Tensor], devices: Sequence[torch.device]) -> list[dict[str, torch.Tensor]]:
    """Copy parameters to each device, each a leaf that requires gradients."""
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
    """Take one step by hand on as many devices as there are replicas of the parameters.

    The batch is split, the loss summed over each shard, gradients are added up by `allreduce`, and every replica takes
    the same step of SGD.
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
    """Train replicas of `parameters` on `devices` by `train_batch`, batch after batch; return the replicas.

    The loop of the chapter on multiple GPUs of *Dive into Deep Learning*. `parameters` stay as they are.
    """
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
    """Step against gradients that are summed over `batch_size` samples, in place; gradients become means, and stay.

    The next step must start without them: see `clear`.
    """
    with torch.no_grad():
        for parameter in parameters.values():
            gradient = _gradient(parameter)
            gradient /= batch_size
            parameter -= rate * gradient


def clear(parameters: Mapping[str, torch.Tensor]) -> None:
    """Drop the gradients of `parameters`."""
    for parameter in parameters.values():
        parameter.grad = None
