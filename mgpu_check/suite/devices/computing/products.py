"""Prepare products of matrices, which exercise tensor cores and the units for float64, float32 and integers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mgpu_check.suite.common.counters import fractions, several
from mgpu_check.suite.devices.computing.cases import ComputeCase
from mgpu_check.suite.devices.computing.freivalds import freivalds
from mgpu_check.suite.devices.computing.prepared import DTYPES, CaseUnsupported, Prepared, exactly, seeded

_TERMS = 4
LARGEST = {
    "float64": 1 << 16,
    "float32": 31,
    "tf32": 31,
    "float16": 22,
    "bfloat16": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 127,
}
"""Largest whole number in the operands of products that are known by algebra.

With it a result of 4 terms is exact in the dtype of the result: up to 2048 in float16, 256 in bfloat16. Partial sums of
up to 16384 terms are exact in the dtype of the sums: up to 2^24 in float32, 2^53 in float64, 2^31 in int32. TF32 holds
whole numbers up to 2048. For float8, tensor cores of Hopper keep about 14 bits of partial sums (DeepSeek-V3 Technical
Report, arXiv 2412.19437, section 3.3.2), so products in float8 have at most 4096 terms of 1.
"""

_LARGEST_RANDOM = {"float64": 1 << 8, "float16": 1, "bfloat16": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""The same for products that Freivalds' algorithm checks, whose results have all k terms; other dtypes as in
`LARGEST`."""
_MOST_TERMS = {"float16": 2048, "bfloat16": 256, "float8_e4m3fn": 256, "float8_e5m2": 256}
_FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


def factors(
    batch: tuple[int, ...], m: int, k: int, n: int, largest: int, case: ComputeCase, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return matrices A (*batch, m, k) and B (*batch, k, n), and their product, known by algebra; all in float64.

    A = [X Y -X] and B = [Z; W; Z], so A·B = Y·W for all X and Z. Y·W has 4 terms per element, 5 if k is odd, or k if
    that is less, and is computed
    elementwise, without a product of matrices. The numbers are pseudorandom in [-largest, largest]. For floating
    dtypes, rows of A and columns of B are scaled by powers of two from 1/4 to 4, so that exponents differ.
    """
    half = max(0, (k - _TERMS) // 2)
    terms = k - 2 * half

    shapes = [(*batch, *sides) for sides in ((m, half), (m, terms), (half, n), (terms, n))]
    kind, seed = torch.float64, seeded(case, 0)
    x, y, z, w = several(shapes, -largest, largest, seed=seed, device=device, dtype=kind)
    product = torch.zeros(*batch, m, n, dtype=torch.float64, device=device)
    for term in range(terms):
        product.addcmul_(y[..., term : term + 1], w[..., term : term + 1, :])
    a, b = torch.cat([x, y, -x], dim=-1), torch.cat([z, w, z], dim=-2)
    if DTYPES[case.dtype].is_floating_point:
        powers = several([(m, 1), (1, n)], 0, 4, seed=seed + 1, device=device, dtype=torch.int64)
        rows, columns = ((torch.ones_like(power) << power).to(kind) / 4 for power in powers)
        a, b, product = a * rows, b * columns, product * rows * columns
    return a, b, product


def multiplied(dtype: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call that multiplies two matrices in a dtype. int8 gives int32, float8 gives bfloat16.

    Raises:
        Unsupported: the device cannot multiply in this dtype.
    """
    kind = DTYPES[dtype]
    require(dtype, a.device)
    if kind in _FLOAT8:
        other = torch.float8_e4m3fn  # torch cannot multiply two e5m2 matrices
        left, right = a.to(kind), b.t().contiguous().to(other).t()
        one = torch.ones((), device=a.device)
        return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)
    if kind == torch.int8:
        left, right = a.to(kind), b.t().contiguous().to(kind).t()  # cuBLAS takes no other layout on newer GPUs
        return lambda: torch._int_mm(left, right)
    left, right = a.to(kind), b.to(kind)
    return lambda: torch.matmul(left, right)


def require(dtype: str, device: torch.device) -> None:
    """Raise `CaseUnsupported` if the device has no units for a dtype."""
    if device.type != "cuda":
        return
    least = {"tf32": (8, 0), "bfloat16": (8, 0), "int8": (7, 5), "float8_e4m3fn": (8, 9), "float8_e5m2": (8, 9)}
    here = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None:
        if dtype in ("tf32", "float8_e4m3fn", "float8_e5m2"):
            raise CaseUnsupported(f"{dtype} is not checked with ROCm")
    elif here < least.get(dtype, (0, 0)):
        needed = ".".join(map(str, least[dtype]))
        raise CaseUnsupported(f"{dtype} needs compute capability {needed}; this device has {here[0]}.{here[1]}")


def result_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of a product in a dtype."""
    kind = DTYPES[dtype]
    return torch.bfloat16 if kind in _FLOAT8 else torch.int32 if kind == torch.int8 else kind


def _sides(case: ComputeCase, most: int) -> tuple[int, int, int]:
    """Return m, k, n near the size: multiples of 16, as narrow dtypes need, but odd m and n in a third of the cases of
    other dtypes."""
    size = case.size // 16 * 16
    m, k, n = size, min(size, most), size
    if case.seed % 3 == 1:
        m, n = size - 16, size
    if case.seed % 3 == 2 and case.dtype in ("float64", "float32", "tf32", "float16", "bfloat16"):
        m, n = size - 1, size - 3
    return m, k, n


def known_by_algebra(case: ComputeCase, device: torch.device) -> Prepared:
    m = n = case.size // 16 * 16
    k = min(m, 4096 if DTYPES[case.dtype] in _FLOAT8 else 16384)
    a, b, product = factors((), m, k, n, LARGEST[case.dtype], case, device)
    return Prepared(multiplied(case.dtype, a, b), exactly(product.to(result_dtype(case.dtype))), 2.0 * m * k * n)


def checked_by_freivalds(case: ComputeCase, device: torch.device) -> Prepared:
    m, k, n = _sides(case, _MOST_TERMS.get(case.dtype, 16384))
    largest = _LARGEST_RANDOM.get(case.dtype, LARGEST[case.dtype])
    seed = seeded(case, 0)
    a, b = several([(m, k), (k, n)], -largest, largest, seed=seed, device=device, dtype=torch.float64)
    call = multiplied(case.dtype, a, b)
    narrow = torch.int16 if largest > 127 else torch.int8
    left, right = a.to(narrow), b.to(narrow)
    return Prepared(call, lambda c: freivalds(left, right, c, seeded(case, 2)), 2.0 * m * k * n)


def of_random_numbers(case: ComputeCase, device: torch.device) -> Prepared:
    m, k, n = _sides(case, 16384)
    a, b = (
        fractions(shape, seed=seeded(case, number), device=device, dtype=torch.float64)
        for number, shape in enumerate([(m, k), (k, n)])
    )
    return Prepared(multiplied(case.dtype, a, b), None, 2.0 * m * k * n)


def _batch(case: ComputeCase) -> tuple[int, int]:
    """Return the number of matrices and their size, for about as many elements as one matrix of the case has."""
    side = max(32, case.size // 4)
    return max(2, case.size**2 // side**2), side


def batches_known_by_algebra(case: ComputeCase, device: torch.device) -> Prepared:
    count, side = _batch(case)
    a, b, product = factors((count,), side, side, side, LARGEST[case.dtype], case, device)
    return Prepared(multiplied(case.dtype, a, b), exactly(product.to(DTYPES[case.dtype])), 2.0 * count * side**3)


def batches_of_random_numbers(case: ComputeCase, device: torch.device) -> Prepared:
    count, side = _batch(case)
    a, b = (
        fractions((count, side, side), seed=seeded(case, number), device=device, dtype=torch.float64)
        for number in range(2)
    )
    return Prepared(multiplied(case.dtype, a, b), None, 2.0 * count * side**3)
