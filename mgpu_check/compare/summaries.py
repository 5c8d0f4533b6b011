"""Summarize tensors in the script's process as the few numbers that a trace keeps of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mgpu_check.compare.trace import CHUNKS, Held, chunk_sizes, positions
from mgpu_check.numerics.placement.slices import Slice
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE, as_real

__all__ = ["Cut", "Numbers", "digests", "inputs_of", "on_host", "over", "shape_of", "summaries", "whole"]

Numbers = list[float | None]
"""Of a summary, as the trace has them; None in place of elements that a slice does not have."""

_kept: dict[int, torch.Tensor] = {}
_factors: list[torch.Tensor] = []
_MIX = -7046029254386353131  # an odd number whose bits are mixed, that of splitmix64


class Cut:
    """A slice of a whole tensor, as summaries need it.

    Args:
        part: the slice; of complex numbers in elements of the tensor itself.
        pairs: the tensor has complex numbers, which count as two elements each.
    """

    def __init__(self, part: Slice, pairs: bool = False) -> None:
        self.part = part
        at = torch.arange(math.prod(part.shape), device="cpu") if part.at is None else part.at
        if pairs:
            at = torch.stack([2 * at, 2 * at + 1], -1).reshape(-1)
        self.shape = [*part.shape, 2] if pairs else list(part.shape)
        self.pairs = pairs
        count = math.prod(self.shape)
        ends = torch.tensor(chunk_sizes(count), device="cpu").cumsum(0) if count else at
        self._chunks = torch.bucketize(at, ends, right=True)
        self._samples = [_index_of(at, position) for position in positions(count)]
        self._there: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self.is_whole = torch.equal(at, torch.arange(count, device="cpu"))
        self.held = Held(part.whole, len(at), _mark(at), _mark(torch.arange(count, device="cpu")), str(part))

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the elements of a local tensor, flattened."""
        flat = as_real(local).reshape(-1)
        if self.part.within is None:
            return flat
        first, last = self.part.within
        return flat[2 * first : 2 * last] if self.pairs else flat[first:last]

    def whole_of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from a local one that has all of it."""
        return self.part.of(local).reshape(self.part.shape)

    def numbers(self, flat: torch.Tensor) -> torch.Tensor:
        """Return norm, sums and samples of these elements, float64; anything in place of samples that are not here."""
        if flat.device not in self._there:
            picked = torch.tensor([max(0, i) for i in self._samples], device="cpu")
            self._there[flat.device] = self._chunks.to(flat.device), picked.to(flat.device)
        chunks, picked = self._there[flat.device]
        values = flat.double()
        sums = values.new_zeros(min(CHUNKS, math.prod(self.shape))).index_add_(0, chunks, values)
        return torch.cat([torch.linalg.vector_norm(values).reshape(1), sums, values[picked]])

    def told(self, numbers: list[float]) -> Numbers:
        """Return numbers as a trace has them: without the samples that are not here."""
        start = len(numbers) - len(self._samples)
        return [*numbers[:start], *(None if i < 0 else x for i, x in zip(self._samples, numbers[start:], strict=True))]


def _index_of(at: torch.Tensor, position: int) -> int:
    found = (at == position).nonzero()
    return int(found[0]) if len(found) else -1


def _mark(at: torch.Tensor) -> int:
    """Return a sum over positions that sets of them have in common only if they are the same."""
    mixed = (at + 1) * _MIX
    mixed = (mixed ^ (mixed >> 31)) * _MIX
    return int((mixed ^ (mixed >> 29)).sum())


def summaries(tensors: Sequence[torch.Tensor | None], cuts: Sequence[Cut | None] | None = None) -> list[Numbers | None]:
    """Return the numbers of `mgpu_check.compare.trace.Summary` for each tensor; None for what is none, or empty.

    All are moved to the CPU at once, so that a device waits once for each step. A DTensor is gathered first: all ranks
    that hold it must be here.

    Args:
        cuts: for each tensor the slice of a whole that it has; None for what is whole.
    """
    cuts = cuts or [None] * len(tensors)
    parts: list[tuple[torch.Tensor, torch.Tensor] | None] = [
        None if t is None else _parts(whole(t), cut) for t, cut in zip(tensors, cuts, strict=True)
    ]
    on: dict[torch.device, list[int]] = {}
    for index, part in enumerate(parts):
        if part is not None:
            on.setdefault(part[0].device, []).append(index)
    found: list[Numbers | None] = [None] * len(parts)
    for indices in on.values():
        here = [part for index in indices if (part := parts[index]) is not None]
        bits = torch.stack([bits for bits, _ in here]).tolist()
        numbers = torch.cat([numbers for _, numbers in here]).tolist()
        start = 0
        for index, bit, (_, own) in zip(indices, bits, here, strict=True):
            kept = numbers[start : start + len(own)]
            cut = cuts[index]
            told = kept if cut is None else cut.told(kept)
            found[index] = [bit, *(told if _is_double(tensors[index]) else map(_short, told))]
            start += len(own)
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a DTensor, of which a rank holds a part; any other tensor itself."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def over(tensor: Any) -> list[str]:
    """Return the axes of the mesh that divide a DTensor; an empty list for any other tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return [
        name
        for name, placed in zip(names, getattr(tensor, "placements", ()), strict=False)
        if not placed.is_replicate()
    ]


def shape_of(tensor: torch.Tensor) -> list[int]:
    """Return the shape of what is summed up: complex numbers are two real ones each, in a last dimension."""
    return [*tensor.shape, 2] if tensor.is_complex() else list(tensor.shape)


def _parts(tensor: torch.Tensor, cut: Cut | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the sum of its bits, int64; and norm, sums and samples, float64."""
    if not tensor.numel():
        return None
    if cut is not None:
        own = cut.of(tensor.detach())
        return own.view(INTEGER_OF_SIZE[own.element_size()]).sum(dtype=torch.int64), cut.numbers(own)
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


def _short(number: float | None) -> float | None:
    """Round to twelve digits: far beyond float32, and shorter in the file."""
    return float(f"{number:.12g}") if number is not None and math.isfinite(number) else number


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
