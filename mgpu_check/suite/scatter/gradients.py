"""Check autograd through scatter and gather: the gradient must return to the source of the values."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mgpu_check.asserts.bits import first_difference, same_bits
from mgpu_check.asserts.scatter import chunk_sizes
from mgpu_check.errors import ShardError


def assert_scatter_differentiable(
    batch: torch.Tensor,
    weights: torch.Tensor,
    devices: Sequence[torch.device],
    dim: int,
    used: Collection[int] | None = None,
) -> None:
    """Assert that the gradient of sum(batch · weights), computed from shards, is `weights`, on the device of `batch`.

    Args:
        batch, weights: floats of equal shape; `batch` may be on any device, `weights` on the CPU. The gradient is a
            copy of the weights, so it is compared bit for bit.
        used: the shards that the loss uses, modulo their number (None: all); the others get zero gradients.
    """
    leaf = batch.detach().clone().requires_grad_()
    shards = nn.parallel.scatter(leaf, devices, dim)
    sizes = [shard.shape[dim] for shard in shards]
    parts = weights.split(sizes, dim)
    chosen = {i % len(shards) for i in (range(len(shards)) if used is None else used)}
    terms = [(shards[i] * parts[i].to(shards[i].device)).sum().to(devices[0]) for i in sorted(chosen)]
    expected = torch.cat([part if i in chosen else torch.zeros_like(part) for i, part in enumerate(parts)], dim)
    with _torchs_own_warnings():
        torch.stack(terms).sum().backward()
    _require("scatter", leaf, expected, 0)


def assert_gather_differentiable(
    weights: torch.Tensor, devices: Sequence[torch.device], target: torch.device | str, dim: int
) -> None:
    """Assert that each shard gets its part of the gradient of the gathered tensor, on its own device.

    Args:
        weights: floats on the CPU; shards of the same shape are gathered on `target`, multiplied by the weights, and
            summed.
    """
    parts = weights.split(chunk_sizes(weights.shape[dim], len(devices)), dim)
    shards = [
        torch.ones_like(part, device=device).requires_grad_() for part, device in zip(parts, devices, strict=False)
    ]
    whole = nn.parallel.gather(shards, target, dim)  # type: ignore[arg-type]  # it takes and needs the string "cpu"
    with _torchs_own_warnings():
        (whole * weights.to(whole.device)).sum().backward()
    for index, (shard, part) in enumerate(zip(shards, parts, strict=True)):
        _require(f"gather: shard {index}", shard, part, index)


def assert_scalars_stacked(
    values: Sequence[float], devices: Sequence[torch.device], target: torch.device | str
) -> None:
    """Assert that gathering a scalar of each device, such as a loss, gives an ordered vector, and each its gradient."""
    losses = [
        torch.tensor(value, device=device, requires_grad=True) for value, device in zip(values, devices, strict=True)
    ]
    with _torchs_own_warnings():
        got = nn.parallel.gather(losses, target)  # type: ignore[arg-type]  # as above
    expected = torch.tensor(list(values), device="cpu")
    if got.device != torch.device(target) or not same_bits(expected, got):
        raise ShardError(
            f"gathered scalars: expected {expected.tolist()} on {target}, got {got.tolist()} on {got.device}"
        )
    factors = torch.arange(1.0, len(losses) + 1, device="cpu")
    with _torchs_own_warnings():
        (got * factors.to(got.device)).sum().backward()
    for index, (loss, factor) in enumerate(zip(losses, factors, strict=True)):
        _require(f"gathered scalars: number {index}", loss, factor, index)


@contextmanager
def _torchs_own_warnings() -> Iterator[None]:
    """Ignore torch's warnings about its own code: scatter's backward uses -1 for the CPU, and gather stacks scalars."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using -1 to represent CPU tensor", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
        yield


def _require(what: str, leaf: torch.Tensor, expected: torch.Tensor, index: int) -> None:
    gradient = leaf.grad
    if gradient is None:
        raise ShardError(f"{what}, on {leaf.device}: there is no gradient", ranks=(index,))
    if gradient.device != leaf.device:
        raise ShardError(f"{what}, on {leaf.device}: its gradient is on {gradient.device}", ranks=(index,))
    if not same_bits(expected, gradient):
        if gradient.shape != expected.shape or gradient.dtype != expected.dtype:
            raise ShardError(f"{what}: gradient {tuple(gradient.shape)} of {gradient.dtype}", ranks=(index,))
        at = first_difference(expected, gradient)
        raise ShardError(
            f"{what}, on {leaf.device}: gradient of element {list(at)}: expected {expected[at].item()}, "
            f"got {gradient[at].item()}",
            ranks=(index,),
        )
