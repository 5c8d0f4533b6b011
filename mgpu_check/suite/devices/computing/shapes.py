"""Prepare products of many shapes: kernels are chosen by each dimension and by the layout of both operands."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_check.suite.devices.computing.cases import ComputeCase
from mgpu_check.suite.devices.computing.prepared import DTYPES, Prepared, exactly, seeded
from mgpu_check.suite.devices.computing.products import LARGEST, factors, multiplied, require, result_dtype

LAYOUTS = ("nn", "nt", "tn", "tt", "strided", "batched")
"""Memory of both operands: row-major ("n"), column-major ("t"), rows with gaps, or batches in the second dimension."""

_MOST = 16384  # terms of a product: the most with exact partial sums
_MOST_OF = {"float8_e4m3fn": 4096, "float8_e5m2": 4096}
_STEP = {"int8": 16, "float8_e4m3fn": 16, "float8_e5m2": 16}
"""dtype -> the number that divides each dimension, as the functions of torch for these dtypes need."""
_LAYOUTS_OF = {"int8": ("nt",), "float8_e4m3fn": ("nt",), "float8_e5m2": ("nt",)}
_SMALL = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33)
_LONG = 8  # products with a long first, and with a long last dimension
_BATCH = 3
_RESULTS = 8  # results of a product in memory at a time
_ELEMENTS = 128
"""Most elements of all products, for each element of a matrix of the case: half of the memory in float64."""


@dataclass(frozen=True)
class ProductShape:
    """The product of an m x k and a k x n matrix, in one of `LAYOUTS`."""

    m: int
    k: int
    n: int
    layout: str

    def __str__(self) -> str:
        return f"m={self.m}, k={self.k}, n={self.n}, {self.layout}"


def _lengths(most: int, step: int) -> list[int]:
    """Return lengths up to `most`: powers of two and 1.5 times them, with their neighbours where torch takes them."""
    found = {1, 2, 3, 5, 7, 13, 251}
    around = (-1, 0, 1) if step == 1 else (0,)
    for power in range(3, most.bit_length()):
        found |= {length + near for length in (1 << power, 3 << power - 1) for near in around}
    return _multiples((length for length in found if length <= most), step)


def _multiples(lengths: Iterable[int], step: int) -> list[int]:
    """Return the lengths, rounded up to multiples of `step`."""
    return sorted({-(-length // step) * step for length in lengths})


def shapes_of(case: ComputeCase) -> list[ProductShape]:
    """Return the products of a case: every length of k, and some of m and n, with small other dimensions.

    The other dimensions are smaller where the memory of the device is: operands and results stay in memory together.
    """
    step = _STEP.get(case.dtype, 1)
    small = [length for length in _multiples(_SMALL, step) if step == 1 or length > step]
    for most in range(len(small), 0, -1):
        shapes = _drawn(case, small[:most], max(small))
        if sum(map(_elements, shapes)) <= _ELEMENTS * case.size**2:
            break
    return shapes


def _drawn(case: ComputeCase, small: Sequence[int], below: int) -> list[ProductShape]:
    """Draw the products of a case, with other dimensions from `small`, and long ones above `below`."""
    drawn = random.Random(seeded(case, 1))
    layouts = _LAYOUTS_OF.get(case.dtype, LAYOUTS)
    lengths = _lengths(min(max(16 * case.size, 1024), _MOST_OF.get(case.dtype, _MOST)), _STEP.get(case.dtype, 1))

    def other() -> int:
        return drawn.choice(small)

    longs = [length for length in lengths if length > below]
    sides = [(other(), k, other()) for k in lengths]
    sides += [(m, other(), other()) for m in drawn.sample(longs, min(_LONG, len(longs)))]
    sides += [(other(), other(), n) for n in drawn.sample(longs, min(_LONG, len(longs)))]
    return [
        ProductShape(m, k, n, layouts[(number + case.seed) % len(layouts)]) for number, (m, k, n) in enumerate(sides)
    ]


def _elements(shape: ProductShape) -> int:
    """Return the elements that a product keeps in memory: its operands, and results to compare with each other."""
    one = shape.k * (shape.m + shape.n) + _RESULTS * shape.m * shape.n
    return one * (_BATCH if shape.layout == "batched" else 1)


def _laid_out(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """Return the same matrix, or batch, in another layout of memory."""
    if how == "t":
        return tensor.t().contiguous().t()
    if how == "strided":
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 8, dtype=tensor.dtype, device=tensor.device)
        return wide[..., : tensor.shape[-1]].copy_(tensor)
    if how == "batched":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor


def _call(shape: ProductShape, dtype: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    if dtype in _STEP:  # `multiplied` gives the second factor the layout that its function needs
        return multiplied(dtype, a, _laid_out(b, shape.layout[1]))
    kind = DTYPES[dtype]
    one, other = tuple(shape.layout) if len(shape.layout) == len("nt") else (shape.layout, shape.layout)
    left, right = _laid_out(a.to(kind), one), _laid_out(b.to(kind), other)
    return lambda: torch.matmul(left, right)


def known_by_algebra(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare the products of `shapes_of`; the result has all of them, one after the other."""
    require(case.dtype, device)
    shapes = shapes_of(case)
    calls, expected, work = [], [], 0.0
    for shape in shapes:
        # An odd k has 5 terms for each element in place of 4.
        largest = math.isqrt(LARGEST[case.dtype] ** 2 * 4 // (4 + shape.k % 2))
        batch = (_BATCH,) if shape.layout == "batched" else ()
        a, b, product = factors(batch, shape.m, shape.k, shape.n, max(1, largest), case, device)
        calls.append(_call(shape, case.dtype, a, b))
        expected.append(product.to(result_dtype(case.dtype)).reshape(-1))
        work += 2.0 * shape.m * shape.k * shape.n * (_BATCH if batch else 1)
    exact = exactly(torch.cat(expected))
    ends = torch.tensor([len(part) for part in expected]).cumsum(0).tolist()

    def judge(got: torch.Tensor) -> dict[str, Any]:
        evidence = exact(got)
        return evidence and evidence | {"products": list(_wrong(got, expected, ends, shapes))}

    return Prepared(lambda: torch.cat([call().reshape(-1) for call in calls]), judge, work)


def _wrong(
    got: torch.Tensor, expected: list[torch.Tensor], ends: list[int], shapes: list[ProductShape]
) -> Iterator[str]:
    """Yield the shapes of the first wrong products."""
    wrong = [
        str(shape)
        for shape, right, end in zip(shapes, expected, ends, strict=True)
        if not torch.equal(got[end - len(right) : end], right)
    ]
    yield from wrong[:8]
    if len(wrong) > 8:
        yield f"and {len(wrong) - 8} more of {len(shapes)}"
