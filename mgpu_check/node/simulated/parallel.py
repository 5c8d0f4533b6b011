"""Copies between devices for ``nn.parallel``: what its C++ half does, in terms of the simulated devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.parallel._functions
import torch.nn.parallel.comm as comm
from torch._utils import _get_device_index, _handle_complex

from mgpu_check.node.simulated.patches import Patches
from mgpu_check.node.simulated.state import simulated_device
from mgpu_check.node.simulated.tensor import SimulatedTensor
from mgpu_check.node.simulated.transfer import move

__all__ = ["install_parallel"]


def _device(device: object) -> torch.device:
    made = simulated_device(device)
    if made is None:
        raise RuntimeError(f"expected a CUDA device, but got {device}")
    return made


def _on_devices(tensor: torch.Tensor, devices: Sequence[object]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return tuple(move(tensor, _device(d)) for d in devices)


def _broadcast(tensor: torch.Tensor, devices: object = None, *, out: object = None) -> tuple[torch.Tensor, ...]:
    if not ((devices is None) ^ (out is None)):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, but got devices={devices} and out={out}"
        )
    if devices is not None:
        return _on_devices(tensor, list(devices))  # type: ignore[call-overload]
    for target in out:  # type: ignore[attr-defined]
        target.copy_(tensor)
    return tuple(out)  # type: ignore[arg-type]


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[object], buffer_size: int = 0
) -> list[list[torch.Tensor]]:
    targets = [_device(d) for d in devices]
    for tensor in tensors:
        if tensor.device != targets[0]:
            raise RuntimeError(f"all tensors must be on {targets[0]}, but found one of them on {tensor.device}")
    with torch.no_grad():
        return [[move(t, target) for t in tensors] for target in targets]


def _reduce_add(inputs: Sequence[torch.Tensor], destination: object = None) -> torch.Tensor:
    target = _device(_get_device_index(destination, optional=True))
    size = inputs[0].size()
    on_target = None
    for i, tensor in enumerate(inputs):
        if not isinstance(tensor, SimulatedTensor):
            raise AssertionError("reduce_add expects all inputs to be on GPUs")
        if tensor.device == target:
            on_target = i
        if tensor.size() != size:
            got, want = "x".join(map(str, tensor.size())), "x".join(map(str, size))
            raise ValueError(f"input {i} has invalid size: got {got}, but expected {want}")
    if on_target is None:
        raise RuntimeError("reduce_add expects destination to be on the same GPU with one of the tensors")
    if len(inputs) == 1:
        return inputs[0]
    with torch.no_grad():
        others = [t for i, t in enumerate(inputs) if i != on_target]
        result = inputs[on_target] + move(others[0], target)
        for other in others[1:]:
            result.add_(move(other, target))
    return result


def _reduce_add_coalesced(
    inputs: Sequence[Sequence[torch.Tensor]], destination: object = None, buffer_size: int = 0
) -> tuple[torch.Tensor, ...]:
    return tuple(_reduce_add(column, destination) for column in zip(*inputs, strict=True))


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[object] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: object = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    tensor = _handle_complex(tensor)
    if out is not None:
        if devices is not None:
            raise RuntimeError(f"'devices' must not be specified when 'out' is specified, but got devices={devices}")
        if chunk_sizes is not None:
            raise RuntimeError(
                f"'chunk_sizes' must not be specified when 'out' is specified, but got chunk_sizes={chunk_sizes}"
            )
        sizes = [t.size(dim) for t in out]
        for target, shard in zip(out, tensor.split(sizes, dim), strict=True):
            target.copy_(shard)
        return tuple(out)
    targets = [_device(_get_device_index(d)) for d in devices or ()]
    if not targets:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes is not None:
        if len(chunk_sizes) != len(targets):
            raise RuntimeError(
                f"Expected devices and chunk_sizes to be of same length, but got len(devices) = {len(targets)} and "
                f"len(chunk_sizes) = {len(chunk_sizes)}"
            )
        shards = tensor.split(list(chunk_sizes), dim)
    else:
        shards = tensor.chunk(len(targets), dim)
    with torch.no_grad():
        # A copy also where the shard is on its device already: C++ hands the view out, and so do we.
        return tuple(move(shard, target) for shard, target in zip(shards, targets, strict=False))


def _gather(
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    destination: object = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    tensors = [_handle_complex(t) for t in tensors]
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, SimulatedTensor):
            raise RuntimeError(
                f"Expected all input tensors to be CUDA tensors, but tensor at index {i} has device '{tensor.device}'"
            )
        if tensor.dim() != tensors[0].dim():
            raise RuntimeError(
                f"Expected all input tensors to have the same number of dimensions, but tensor at index {i}has "
                f"{tensor.dim()} dimensions, (expected {tensors[0].dim()})"
            )
        for d in range(tensor.dim()):
            if d != dim % tensor.dim() and tensor.size(d) != tensors[0].size(d):
                raise RuntimeError(
                    f"Input tensor at index {i} has invalid shape {list(tensor.shape)}, but expected "
                    f"{[-1 if k == dim else s for k, s in enumerate(tensors[0].shape)]}"
                )
    if out is not None:
        if destination is not None:
            raise RuntimeError(
                f"'destination' must not be specified when 'out' is specified, but got destination={destination}"
            )
        home = out.device
    else:
        index = _get_device_index(destination, allow_cpu=True, optional=True)
        home = torch.device("cpu") if index == -1 else _device(index)
    with torch.no_grad():
        joined = torch.cat([move(t, home) for t in tensors], dim)
        return joined if out is None else out.copy_(joined)


def install_parallel(patches: Patches) -> None:
    """Replace the functions of ``torch.nn.parallel.comm`` (``torch.cuda.comm`` has them too)."""
    for original, function in (
        (comm.broadcast, _broadcast),
        (comm.broadcast_coalesced, _broadcast_coalesced),
        (comm.reduce_add, _reduce_add),
        (comm.reduce_add_coalesced, _reduce_add_coalesced),
        (comm.scatter, _scatter),
        (comm.gather, _gather),
    ):
        function.__name__ = original.__name__
        patches.replace(original, function)
    # The copy streams that Scatter keeps, one per device that there was when it was first called.
    patches.set(torch.nn.parallel._functions, "_streams", None)
