"""Summarize tensors, in the script's process, as the few numbers that a trace keeps."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from mgpu_check.compare.trace import CHUNKS, HeldSlice, chunk_sizes, positions
from mgpu_check.numerics.placement import Slice
from mgpu_check.processes.rank_lists import grouped
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE, as_real, is_distributed, readable

Numbers = list[float | None]  # the numbers of a summary in the trace; None for elements that a slice does not have

_kept: dict[int, torch.Tensor] = {}
_factors: list[torch.Tensor] = []
_blocks = threading.local()
_BLOCK = 2**18  # elements that fit a cache as float64; smaller blocks take more calls
_BLOCK_OF_DEVICE = 2**24  # bounds the additional memory
_MIX = -7046029254386353131  # an odd number whose bits are mixed, that of splitmix64


class Cut:
    """A slice of a whole tensor, prepared for summaries.
    `slice_`: the slice, in elements of the tensor itself. `pairs`: the tensor is complex, and each of its numbers
    counts as two elements."""

    def __init__(self, slice_: Slice, pairs: bool = False) -> None:
        self.part = slice_
        at = torch.arange(math.prod(slice_.shape), device="cpu") if slice_.at is None else slice_.at
        if pairs:
            at = torch.stack([2 * at, 2 * at + 1], -1).reshape(-1)
        self.shape = [*slice_.shape, 2] if pairs else list(slice_.shape)
        self.pairs = pairs
        count = math.prod(self.shape)
        ends = torch.tensor(chunk_sizes(count), device="cpu").cumsum(0) if count else at
        self._chunks = torch.bucketize(at, ends, right=True)
        places = [(at == position).nonzero() for position in positions(count)]
        self._samples = [int(indices[0]) if len(indices) else -1 for indices in places]
        self._there: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self.is_whole = torch.equal(at, torch.arange(count, device="cpu"))
        self.held = HeldSlice(slice_.whole, len(at), _mark(at), _mark(torch.arange(count, device="cpu")), str(slice_))

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the elements of a local tensor, flattened."""
        flat = as_real(local).reshape(-1)
        if self.part.within is None:
            return flat
        start, end = self.part.within
        return flat[2 * start : 2 * end] if self.pairs else flat[start:end]

    def numbers(self, flat: torch.Tensor) -> torch.Tensor:
        """Return norm, sums and samples of the elements, in float64; samples of missing elements are arbitrary."""
        if flat.device not in self._there:
            picked = torch.tensor([max(0, i) for i in self._samples], device="cpu")
            self._there[flat.device] = self._chunks.to(flat.device), picked.to(flat.device)
        chunks, picked = self._there[flat.device]
        values = flat.double()
        sums = values.new_zeros(min(CHUNKS, math.prod(self.shape))).index_add_(0, chunks, values)
        return torch.cat([torch.linalg.vector_norm(values).reshape(1), sums, values[picked]])

    def told(self, numbers: list[float]) -> Numbers:
        """Return the numbers for the trace, with None for samples of missing elements."""
        start = len(numbers) - len(self._samples)
        return [*numbers[:start], *(None if i < 0 else x for i, x in zip(self._samples, numbers[start:], strict=True))]


def _mark(at: torch.Tensor) -> int:
    """Return a hash of a set of positions: the sum of a hash of each, so that disjoint sets add up."""
    mixed = (at + 1) * _MIX
    mixed = (mixed ^ (mixed >> 31)) * _MIX
    return int((mixed ^ (mixed >> 29)).sum())


def summaries(tensors: Sequence[torch.Tensor | None], cuts: Sequence[Cut | None] | None = None) -> list[Numbers | None]:
    """Return the numbers of a `TensorSummary` for each tensor; None for None, and for an empty or unreadable tensor.

    All numbers are moved to the CPU together, so that a device waits only once per step. A DTensor is gathered first,
    so all ranks that hold it must make this call.

    `cuts`: for each tensor, the slice that it holds; None for a whole tensor.
    """
    cuts = cuts or [None] * len(tensors)
    pairs: list[tuple[int, tuple[torch.Tensor, torch.Tensor]]] = []
    for index, (tensor, cut) in enumerate(zip(tensors, cuts, strict=True)):
        value = None if tensor is None else whole(tensor)
        if value is not None and value.numel():
            pairs.append((index, _parts(value, cut)))
    results: list[Numbers | None] = [None] * len(tensors)
    for (index, _), (bits, kept) in zip(pairs, on_host_together([pair for _, pair in pairs]), strict=True):
        cut, tensor = cuts[index], tensors[index]
        numbers = kept if cut is None else cut.told(kept)
        is_double = tensor is not None and tensor.dtype in (torch.float64, torch.complex128)
        results[index] = [bits, *(numbers if is_double else map(short, numbers))]
    return results


def on_host_together(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, list[float]]]:
    """Return pairs of an integer and numbers from the CPU, moved together, so that each device waits once."""
    on_host: dict[int, tuple[int, list[float]]] = {}
    for _, indices in grouped((bits.device, index) for index, (bits, _) in enumerate(pairs)):
        integers = torch.stack([pairs[index][0] for index in indices]).tolist()
        numbers = iter(torch.cat([pairs[index][1] for index in indices]).tolist())
        for index, own in zip(indices, integers, strict=True):
            on_host[index] = own, list(itertools.islice(numbers, len(pairs[index][1])))
    return [on_host[index] for index in range(len(pairs))]


def whole(tensor: Any) -> torch.Tensor | None:
    """Return the values of a tensor, a DTensor gathered from all of its ranks; None if they cannot be read."""
    return readable(tensor.full_tensor() if is_distributed(tensor) else tensor)


def over(tensor: Any) -> list[str]:
    """Return the mesh axes along which a DTensor is not replicated; empty for any other tensor."""
    axis_names = getattr(getattr(tensor, "device_mesh", None), "mesh_dim_names", None) or ()
    placements = zip(axis_names, getattr(tensor, "placements", ()), strict=False)
    return [name for name, placed in placements if not placed.is_replicate()]


def shape_of(tensor: torch.Tensor) -> list[int]:
    """Return the shape of a tensor in summaries; a complex one has a last dimension of 2."""
    return [*tensor.shape, 2] if tensor.is_complex() else list(tensor.shape)


def _parts(tensor: torch.Tensor, cut: Cut | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the bits, int64, and norm, sums and samples, float64, of a tensor with elements."""
    if cut is not None:
        own = cut.of(tensor)
        return _bits_of(own.double()), cut.numbers(own)
    flat = as_real(tensor).reshape(-1)
    count = flat.numel()
    if count not in _kept:
        _kept[count] = torch.tensor(positions(count), device="cpu")
    bits, numbers = statistics(flat)
    return bits, torch.cat([numbers, flat[_kept[count].to(flat.device)].double()])


def statistics(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the bits of a flat tensor, int64, and its norm and sums, float64. See `TensorSummary`."""
    block = _block_for(flat)
    if flat.numel() <= len(block):
        values = block[: flat.numel()].copy_(flat)
        sums = [chunk.sum() for chunk in values.tensor_split(min(CHUNKS, flat.numel()))]
        return _bits_of(values), torch.stack([torch.dot(values, values).sqrt(), *sums])
    bits, squares, sums = [], [], []
    for chunk in flat.tensor_split(CHUNKS):
        total = []
        for own in chunk.split(len(block)):
            values = block[: own.numel()].copy_(own)
            bits.append(_bits_of(values))
            total.append(values.sum())
            squares.append(torch.dot(values, values))
        sums.append(torch.stack(total).sum())
    return torch.stack(bits).sum(), torch.stack([torch.stack(squares).sum().sqrt(), *sums])


def _block_for(flat: torch.Tensor) -> torch.Tensor:
    """Return memory for elements in float64. On the CPU it is kept, because new pages take longer than the sums."""
    if flat.device.type != "cpu":
        return flat.new_empty(min(flat.numel(), _BLOCK_OF_DEVICE), dtype=torch.float64)
    if not hasattr(_blocks, "block"):
        _blocks.block = torch.empty(_BLOCK, dtype=torch.float64, device="cpu")
    return _blocks.block


def _bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of elements in float64. The conversion of any narrower dtype is exact."""
    return values.view(torch.int64).sum()


def short(number: float | None) -> float | None:
    """Round to twelve digits: more than float32 has, and shorter in the file."""
    return float(f"{number:.12g}") if number is not None and math.isfinite(number) else number


def host_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy a tensor whose samples can be separated to the CPU; None for a DTensor or a tensor that is not strided."""
    value = None if is_distributed(tensor) or tensor.layout is not torch.strided else readable(tensor)
    return None if value is None else value.cpu()


def digests(tensor: torch.Tensor | None, dimension: int = 0) -> list[int]:
    """Return a hash of each slice of a tensor on the CPU along a dimension. Equal slices have equal hashes.
    Returns no hash for None, an empty tensor, or a tensor without the dimension."""
    if tensor is None or tensor.dim() <= dimension or not tensor.numel():
        return []
    batch = tensor.detach().movedim(dimension, 0)
    rows = as_real(batch.contiguous().reshape(len(batch), -1)).reshape(len(batch), -1)
    if rows.dtype is torch.bool:
        rows = rows.to(torch.uint8)
    values = rows.view(INTEGER_OF_SIZE[rows.element_size()]).to(torch.int64)
    # Multiply-shift hashing: products modulo 2^64 by random odd numbers.
    # They are the same in each process. A separate generator leaves that of the script unchanged.
    count = values.shape[1]
    if not _factors or len(_factors[0]) < count:
        generator = torch.Generator("cpu").manual_seed(20260101)
        size = 1 << max(count - 1, 1).bit_length()
        _factors[:] = [torch.randint(-(2**62), 2**62, (size,), generator=generator, device="cpu") * 2 + 1]
    return (values * _factors[0][:count]).sum(1).tolist()


def inputs_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of a model, also in lists, tuples and dicts, in order.
    Entries of dicts are sorted by key, because another process may have built the dict in another order."""
    tensors: list[torch.Tensor] = []
    for value in (*args, *(kwargs[name] for name in sorted(kwargs))):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += inputs_of(value, {})
        elif isinstance(value, dict):
            tensors += inputs_of((), {str(key): item for key, item in value.items()})
    return tensors
