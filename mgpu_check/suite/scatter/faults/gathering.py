"""Defects of gather for some inputs only: a single shard, a mask, complex numbers, plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import comm, scatter_gather
from torch.nn.parallel._functions import Gather

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.scatter.faults.shards import gather_changed
from mgpu_check.torch_hooks.patches import replaced


@contextmanager
def _gathered(change: Callable[[Callable[..., Any], Sequence[Any], Any, int], Any]) -> Iterator[None]:
    """Replace `nn.parallel.gather` by `change`, called with the original function and its arguments."""
    real = scatter_gather.gather

    def gather(outputs: Any, target_device: Any, dim: int = 0) -> Any:
        return change(real, outputs, target_device, dim)

    with replaced(scatter_gather, "gather", gather), replaced(nn.parallel, "gather", gather):
        yield


@fault(
    "gather returns a single shard unchanged, on its own device",
    "test_gather_restores_the_batch",
    condition="a single shard",
)
def single_shard_handed_back() -> Iterator[None]:
    """As with a shortcut for a single shard that skips the copy."""

    def change(gather: Callable[..., Any], outputs: Sequence[Any], target: Any, dim: int) -> Any:
        first = outputs[0]
        # Even a single number must become a vector, so leave numbers alone.
        alone = len(outputs) == 1 and isinstance(first, torch.Tensor) and first.dim() > 0
        return first if alone else gather(outputs, target, dim)

    with _gathered(change):
        yield


@fault(
    "a mask in a dict within a named tuple is gathered as bytes",
    "test_every_container",
    condition="bool, in a dict within a named tuple",
)
def nested_masks_gathered_as_bytes() -> Iterator[None]:
    """As an index, it then selects the first two rows many times."""

    def change(gather: Callable[..., Any], outputs: Sequence[Any], target: Any, dim: int) -> Any:
        whole = gather(outputs, target, dim)
        return type(whole)(*map(_masks_as_bytes, whole)) if hasattr(whole, "_fields") else whole

    with _gathered(change):
        yield


def _masks_as_bytes(part: Any) -> Any:
    if type(part) is not dict:
        return part
    return {
        key: value.byte() if isinstance(value, torch.Tensor) and value.dtype == torch.bool else value
        for key, value in part.items()
    }


@fault(
    "gather loses the payload of NaN in complex numbers",
    "test_every_dtype_and_order",
    condition="NaN with a payload, complex64 and complex128",
)
def gathered_complex_payloads_lost() -> Iterator[None]:
    """As if complex numbers were computed from real and imaginary parts."""

    def of_one_kind(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_complex():
            return tensor
        parts = torch.view_as_real(tensor)
        return torch.view_as_complex(torch.where(parts.isnan(), torch.full_like(parts, float("nan")), parts))

    with gather_changed(lambda tensors, dim: [of_one_kind(tensor) for tensor in tensors]):
        yield


@fault(
    "gather returns the mean of numbers", "test_losses_gather_to_a_vector", condition="numbers, one from each device"
)
def losses_averaged() -> Iterator[None]:
    """The mean of mean losses ignores that the last shard is smaller."""

    def change(gather: Callable[..., Any], outputs: Sequence[Any], target: Any, dim: int) -> Any:
        numbers = all(isinstance(one, torch.Tensor) and one.dim() == 0 for one in outputs)
        return torch.stack([one.to(target) for one in outputs]).mean() if numbers else gather(outputs, target, dim)

    with _gathered(change):
        yield


@fault(
    "gather combines entries of dicts by position, not by key",
    "test_every_container",
    condition="dicts in different orders",
)
def entries_gathered_by_place() -> Iterator[None]:
    """Outputs are mixed up if replicas fill a dict in different orders."""

    def change(gather: Callable[..., Any], outputs: Sequence[Any], target: Any, dim: int) -> Any:
        if all(type(one) is dict for one in outputs):
            outputs = [dict(zip(outputs[0], one.values(), strict=True)) for one in outputs]
        return gather(outputs, target, dim)

    with _gathered(change):
        yield


@fault(
    "every gathered number gets the mean of the gradients", "test_losses_gather_to_a_vector", condition="0-dim tensors"
)
def gradients_of_numbers_averaged() -> Iterator[None]:
    """A loss with equal weights does not show it."""
    backward = Gather.backward

    def averaged(ctx: Any, gradient: torch.Tensor) -> Any:
        return backward(ctx, gradient.mean().expand_as(gradient) if ctx.unsqueezed_scalar else gradient)

    with replaced(Gather, "backward", staticmethod(averaged)):
        yield


@fault(
    "gather to the CPU loses the part of a shard beyond 1 MiB",
    "test_large_batches",
    condition="to the CPU, shards above 1 MiB but the first",
)
def host_buffer_too_small() -> Iterator[None]:
    """As with a buffer of 1 MiB."""

    def change(gather: Callable[..., Any], outputs: Sequence[Any], target: Any, dim: int) -> Any:
        if str(target) == "cpu" and all(isinstance(one, torch.Tensor) for one in outputs):
            outputs = [*outputs[:1], *map(_first_mebibyte, outputs[1:])]
        return gather(outputs, target, dim)

    with _gathered(change):
        yield


def _first_mebibyte(shard: torch.Tensor) -> torch.Tensor:
    """Return a shard with zeros behind its first MiB."""
    fits = (1 << 20) // shard.itemsize
    if shard.numel() <= fits:
        return shard
    flat = shard.reshape(-1)
    return torch.cat([flat[:fits], torch.zeros_like(flat[fits:])]).view(shard.shape)


@fault(
    "gather ignores the channels_last format of images",
    "test_every_dtype_and_order",
    condition="channels_last, shards of unequal sizes",
    least_gpus=2,
)
def channels_last_taken_for_first() -> Iterator[None]:
    """As with a fast path for dense memory that checks the format only for equal sizes."""

    def gather(real: Callable[..., Any], tensors: Sequence[torch.Tensor], *rest: Any, **named: Any) -> Any:
        uneven = len({part.shape for part in tensors}) > 1
        last = all(part.dim() == 4 and part.permute(0, 2, 3, 1).is_contiguous() for part in tensors)
        if uneven and last:
            tensors = [part.permute(0, 2, 3, 1).reshape(part.shape) for part in tensors]
        return real(tensors, *rest, **named)

    with replaced_method(comm, "gather", gather):
        yield
