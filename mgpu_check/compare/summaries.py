"""Summarize tensors in the script's process as the few numbers that a trace keeps of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mgpu_check.compare.trace import CHUNKS, positions
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE, as_real

__all__ = ["digests", "inputs_of", "on_host", "shape_of", "summaries", "whole"]

_kept: dict[int, torch.Tensor] = {}
_factors: list[torch.Tensor] = []


def summaries(tensors: Sequence[torch.Tensor | None]) -> list[list[float] | None]:
    """Return the numbers of `mgpu_check.compare.trace.Summary` for each tensor; None for what is none, or empty.

    All are moved to the CPU at once, so that a device waits once for each step. A DTensor is gathered first: all ranks
    that hold it must be here.
    """
    parts: list[tuple[torch.Tensor, torch.Tensor] | None] = [None if t is None else _parts(whole(t)) for t in tensors]
    on: dict[torch.device, list[int]] = {}
    for index, part in enumerate(parts):
        if part is not None:
            on.setdefault(part[0].device, []).append(index)
    found: list[list[float] | None] = [None] * len(parts)
    for indices in on.values():
        here = [part for index in indices if (part := parts[index]) is not None]
        bits = torch.stack([bits for bits, _ in here]).tolist()
        numbers = torch.cat([numbers for _, numbers in here]).tolist()
        start = 0
        for index, bit, (_, own) in zip(indices, bits, here, strict=True):
            kept = numbers[start : start + len(own)]
            found[index] = [bit, *(kept if _is_double(tensors[index]) else map(_short, kept))]
            start += len(own)
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a DTensor, of which a rank holds a part; any other tensor itself."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def shape_of(tensor: torch.Tensor) -> list[int]:
    """Return the shape of what is summed up: complex numbers are two real ones each, in a last dimension."""
    return [*tensor.shape, 2] if tensor.is_complex() else list(tensor.shape)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the sum of its bits, int64; and norm, sums and samples, float64."""
    if not tensor.numel():
        return None
    value = tensor.detach()
    if value.layout is not torch.strided:
        value = value.to_dense()
    flat = as_real(value).reshape(-1)
    count = flat.numel()
    if count not in _kept:
        _kept[count] = torch.tensor(positions(count), device="cpu")
    bits = flat.view(INTEGER_OF_SIZE[flat.element_size()]).sum(dtype=torch.int64)
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    sums = [part.sum(dtype=torch.float64) for part in flat.tensor_split(min(CHUNKS, count))]
    samples = flat[_kept[count].to(flat.device)].double()
    return bits, torch.cat([torch.stack([norm, *sums]), samples])


def _is_double(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in (torch.float64, torch.complex128)


def _short(number: float) -> float:
    """Round to twelve digits: far beyond float32, and shorter in the file."""
    return float(f"{number:.12g}") if math.isfinite(number) else number


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy those tensors to the CPU of which samples can be told apart."""
    return [t.detach().cpu() for t in tensors if not hasattr(t, "full_tensor") and t.layout is torch.strided]


def digests(tensors: Sequence[torch.Tensor], dimension: int = 0) -> list[int]:
    """Return one number for each sample of a batch: the same for the same values, whatever else is in the batch.

    Args:
        tensors: the inputs of a model, on the CPU. The samples are the slices of the first of them, and those of all
            others that have as many.
        dimension: in which the samples lie.
    """
    batch = [t.detach().movedim(dimension, 0) for t in tensors if t.dim() > dimension]
    if not batch or not batch[0].numel():
        return []
    count = batch[0].shape[0]
    total = torch.zeros(count, dtype=torch.int64, device="cpu")
    for position, tensor in enumerate(t for t in batch if t.shape[0] == count):
        rows = tensor.contiguous().reshape(count, -1)
        rows = as_real(rows).reshape(count, -1)
        if rows.dtype is torch.bool:
            rows = rows.to(torch.uint8)
        values = rows.view(INTEGER_OF_SIZE[rows.element_size()]).to(torch.int64)
        # Multiply-shift hashing: products modulo 2^64 by random odd numbers.
        total += (values * _multipliers(values.shape[1])).sum(1) * (2 * position + 1)
    found: list[int] = total.tolist()
    return found


def _multipliers(count: int) -> torch.Tensor:
    """Draw odd numbers that are the same in each process, by a generator of their own, for the script's is not ours."""
    if not _factors or len(_factors[0]) < count:
        generator = torch.Generator("cpu").manual_seed(20260101)
        size = 1 << max(count - 1, 1).bit_length()
        _factors[:] = [torch.randint(-(2**62), 2**62, (size,), generator=generator, device="cpu") * 2 + 1]
    return _factors[0][:count]


def inputs_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of a model, also in lists, tuples and dicts, in order.

    Those of dicts are in the order of their keys, not of the dict, which another process may have built in another order.
    """
    found: list[torch.Tensor] = []
    for value in (*args, *(kwargs[name] for name in sorted(kwargs))):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += inputs_of(value, {})
        elif isinstance(value, dict):
            found += inputs_of((), {str(key): item for key, item in value.items()})
    return found
