"""Prepare sorting, searching and moving of elements, whose results are known beforehand."""

from __future__ import annotations

import torch

from mgpu_check.suite.common.counters import counted, integers
from mgpu_check.suite.devices.computing.cases import ComputeCase
from mgpu_check.suite.devices.computing.prepared import DTYPES, Prepared, exactly, seeded
from mgpu_check.suite.devices.computing.products import require

_LARGEST = {"float16": 2048, "bfloat16": 256, "int16": 2**15 - 1, "int8": 127, "uint8": 255}
_FACTOR = 0x9E3779B1  # odd, and prime: any length below it is coprime to it


def _numbers(case: ComputeCase, places: torch.Tensor) -> torch.Tensor:
    """Return the numbers at `places` of an ascending sequence of size² numbers.

    They differ if the dtype has as many numbers.
    """
    count = case.size**2
    most = _LARGEST.get(case.dtype, 2**24)
    low = 0 if case.dtype == "uint8" else -min(most, count // 2)
    span = min(most, count + low - 1) - low + 1
    return (places * span // count + low).to(DTYPES[case.dtype])


def _permutation(case: ComputeCase, device: torch.device) -> torch.Tensor:
    """Return a permutation of range(size²), int64, made by arithmetic alone."""
    count = case.size**2
    start = case.seed * 7919 % count
    return (torch.arange(count, device=device) * (_FACTOR % count) + start) % count


def _mixed_up(case: ComputeCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (ascending numbers, permutation, permuted numbers)."""
    require(case.dtype, device)
    ascending = _numbers(case, torch.arange(case.size**2, device=device))
    permutation = _permutation(case, device)
    return ascending, permutation, ascending[permutation]


def sort(case: ComputeCase, device: torch.device) -> Prepared:
    ascending, _, mixed = _mixed_up(case, device)
    return Prepared(lambda: torch.sort(mixed).values, exactly(ascending))


def topk(case: ComputeCase, device: torch.device) -> Prepared:
    ascending, _, mixed = _mixed_up(case, device)
    count = min(case.size, 1024)
    return Prepared(lambda: torch.topk(mixed, count).values, exactly(ascending[-count:].flip(0)))


def search(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare a search for each number among the ascending ones; it must find the first place that holds the number."""
    ascending, _, mixed = _mixed_up(case, device)
    count = case.size**2
    new = torch.ones(count, dtype=torch.int64, device=device)
    new[1:] = ascending[1:] != ascending[:-1]
    first = torch.arange(count, device=device).mul_(new).cummax(dim=0).values
    order = _permutation(case, device)
    return Prepared(lambda: torch.searchsorted(ascending, mixed), exactly(first[order]))


def gather(case: ComputeCase, device: torch.device) -> Prepared:
    ascending, permutation, _ = _mixed_up(case, device)
    # Place p of the result holds number permutation[p]: known by arithmetic, without another index.
    expected = _numbers(case, permutation)
    return Prepared(lambda: torch.gather(ascending, 0, permutation), exactly(expected))


def scatter(case: ComputeCase, device: torch.device) -> Prepared:
    ascending, permutation, mixed = _mixed_up(case, device)
    return Prepared(lambda: torch.zeros_like(mixed).scatter_(0, permutation, mixed), exactly(ascending))


def index(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare an index by drawn rows, an assignment by index, and masks."""
    require(case.dtype, device)
    dtype = DTYPES[case.dtype]
    row_values = (torch.arange(case.size, device=device) % 100).to(dtype)
    matrix = row_values[:, None].expand(case.size, case.size).contiguous()
    rows = integers((case.size,), 0, case.size - 1, seed=seeded(case, 0), device=device)
    keep = torch.arange(case.size, device=device) % 3 == case.seed % 3

    def call() -> torch.Tensor:
        copy = torch.empty_like(matrix)
        copy[torch.arange(case.size, device=device).flip(0)] = matrix
        return torch.cat([matrix[rows], copy, matrix[keep], torch.where(keep[:, None], matrix, copy)])

    kept = torch.arange(case.seed % 3, case.size, 3, device=device)
    place = torch.arange(case.size, device=device)
    chosen = torch.cat([rows, place.flip(0), kept, place + (case.size - 1 - 2 * place) * (~keep)]) % 100
    return Prepared(call, exactly(chosen.to(dtype)[:, None].expand(-1, case.size)))


def transpose(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare copies of a transposed and of a rolled matrix, for strided reads and writes."""
    require(case.dtype, device)
    dtype = DTYPES[case.dtype]
    words = counted((case.size, case.size), seeded(case, 0), device)
    first = torch.arange(case.size, device=device)
    turned = counted((case.size**2,), seeded(case, 0), device)[first[None, :] * case.size + first[:, None]]

    def narrowed(x: torch.Tensor) -> torch.Tensor:
        return (x & 127).to(dtype)

    matrix = narrowed(words)
    expected = torch.cat([narrowed(turned), narrowed(words[(first - 3) % case.size])])
    return Prepared(lambda: torch.cat([matrix.t().contiguous(), torch.roll(matrix, 3, dims=0)]), exactly(expected))
