"""Replace the C++ half of ``nn.parallel``: broadcast, scatter and gather between simulated devices.

These functions replace those in ``torch._C``; ``torch.nn.parallel.comm`` above them stays torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.parallel._functions

from mgpu_check.simulated.lazy import LAZY, uninitialized_on
from mgpu_check.simulated.nccl import check_types
from mgpu_check.simulated.runtime import StreamContext
from mgpu_check.simulated.state import simulated_device
from mgpu_check.simulated.streams import Stream
from mgpu_check.simulated.tensor import SimulatedTensor
from mgpu_check.simulated.transfer import move
from mgpu_check.torch_hooks.patches import Patches


def _device(index: int) -> torch.device:
    if index < 0:
        raise RuntimeError(f"Expected non-negative device index, but got {index}")
    made = simulated_device(index)
    assert made is not None
    return made


def _check_outputs(out: Sequence[torch.Tensor]) -> None:
    for i, tensor in enumerate(out):
        if not isinstance(tensor, SimulatedTensor):
            raise RuntimeError(
                f"Expected all output tensors to be CUDA tensors, but output tensor at index {i} has device "
                f"'{tensor.device}'"
            )


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    targets = [_device(d) for d in devices]
    if tensor.is_cuda and tensor.is_contiguous() and any(target != tensor.device for target in targets):
        check_types(tensor)  # NCCL broadcasts it to the other devices
    with torch.no_grad():
        return [move(tensor, target) for target in targets]


def _broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    _check_outputs(out)
    for i, target in enumerate(out):
        if target.shape != tensor.shape:
            raise RuntimeError(
                f"Expected all output tensors to have same shape as the source tensor {list(tensor.shape)}, but output "
                f"tensor at index {i} has shape {list(target.shape)}"
            )
    if _of_nccl([tensor, *out]):
        check_types(tensor)
    with torch.no_grad():
        return [target.copy_(tensor) for target in out]


def _of_nccl(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether torch calls NCCL: several contiguous tensors, each on its own device."""
    apart = len({tensor.device for tensor in tensors}) == len(tensors) > 1
    return apart and all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    targets = [_device(d) for d in devices]
    if any(tensor.device != targets[0] for tensor in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
    if any(target != targets[0] for target in targets):
        check_types(*(tensor for tensor in tensors if not isinstance(tensor, LAZY)))
    with torch.no_grad():
        return [[_copy(t, target) for t in tensors] for target in targets]


def _copy(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Copy a parameter; accept a lazy one, which ``replicate`` refuses later with torch's own message."""
    if isinstance(tensor, LAZY):
        return uninitialized_on(tensor, target, None)
    return move(tensor, target)


def _copies(
    shards: Sequence[torch.Tensor], devices: Sequence[torch.device], streams: Sequence[Stream | None] | None
) -> list[torch.Tensor]:
    """Copy each shard to its device on its stream; a shard that is on its device already stays a view."""
    made = []
    for i, (shard, device) in enumerate(zip(shards, devices, strict=False)):
        stream = streams[i] if streams else None
        if stream is not None and stream.device != device:
            raise RuntimeError(
                f"Expected the device associated with the stream at index {i} (was {stream.device_index}) to match the "
                f"device supplied at that index (expected {device.index})"
            )
        with torch.no_grad(), StreamContext(stream):
            made.append(move(shard, device, non_blocking=True))
    return made


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[Stream | None] | None,
) -> list[torch.Tensor]:
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    targets = [_device(d) for d in devices]
    if chunk_sizes is None:
        return _copies(tensor.chunk(len(targets), dim), targets, streams)
    if len(chunk_sizes) != len(targets):
        raise RuntimeError(
            f"Expected devices and chunk_sizes to be of same length, but got len(devices) = {len(targets)} and "
            f"len(chunk_sizes) = {len(chunk_sizes)}"
        )
    return _copies(tensor.split(list(chunk_sizes), dim), targets, streams)


def _scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Sequence[Stream | None] | None
) -> list[torch.Tensor]:
    if not out:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    _check_outputs(out)
    dim = dim + tensor.dim() if dim < 0 else dim
    shape = list(tensor.shape)
    for i, target in enumerate(out):
        given = list(target.shape)
        if len(given) != len(shape) or [*given[:dim], shape[dim], *given[dim + 1 :]] != shape:
            raise RuntimeError(
                f"Output tensor at index {i} has incorrect shape: {given}. Expected same shape except for scatter dim "
                f"{dim} as the source tensor: {shape}"
            )
    sizes = [target.size(dim) for target in out]
    if sum(sizes) != shape[dim]:
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match the source tensor size at dim "
            f"{dim}. Expected {shape[dim]}, but got total size {sum(sizes)}"
        )
    shards = _copies(tensor.split(sizes, dim), [target.device for target in out], streams)
    with torch.no_grad():
        return [target.copy_(shard) for target, shard in zip(out, shards, strict=True)]


def _gathered_shape(tensors: Sequence[torch.Tensor], dim: int) -> list[int]:
    """Return the shape of all ``tensors`` joined along ``dim``; raise RuntimeError if their shapes do not match."""
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    shape = list(tensors[0].shape)
    dim = dim + len(shape) if dim < 0 else dim
    total = 0
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, SimulatedTensor):
            raise RuntimeError(
                f"Expected all input tensors to be CUDA tensors, but tensor at index {i} has device '{tensor.device}'"
            )
        if tensor.dim() != len(shape):
            raise RuntimeError(
                f"Expected all input tensors to have the same number of dimensions, but tensor at index {i}has "
                f"{tensor.dim()} dimensions, (expected {len(shape)})"
            )
        shape[dim] = tensor.size(dim)
        if list(tensor.shape) != shape:
            raise RuntimeError(
                f"Input tensor at index {i} has invalid shape {list(tensor.shape)}, but expected {shape}"
            )
        total += tensor.size(dim)
    shape[dim] = total
    return shape


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    _gathered_shape(tensors, dim)
    home = simulated_device("cuda" if destination is None else destination) if destination != -1 else None
    with torch.no_grad():
        return torch.cat([move(t, home or torch.device("cpu")) for t in tensors], dim)


def _gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    shape = _gathered_shape(tensors, dim)
    if list(out.shape) != shape:
        raise RuntimeError(f"Expected out tensor to have shape {shape}, but got {list(out.shape)}")
    with torch.no_grad():
        return out.copy_(torch.cat([move(t, out.device) for t in tensors], dim))


def install_parallel(patches: Patches) -> None:
    for function in (_broadcast, _broadcast_out, _broadcast_coalesced, _scatter, _scatter_out, _gather, _gather_out):
        patches.set(torch._C, function.__name__, function)
    # Scatter caches one copy stream per device at its first call; that may have been outside this node.
    patches.set(torch.nn.parallel._functions, "_streams", None)
