"""Prepare products of matrices, convolutions, attention and layers, which exercise tensor cores and other units.

- Products of float64, float32 and integers too; of many shapes, as kernels are chosen by each dimension and by the
  layout of both operands.
- Freivalds' algorithm checks a product of matrices of whole numbers without computing it again.
- Results of convolutions and attention are known by algebra; layers run on random numbers.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mgpu_check.oracles.devices.cases import ComputeCase
from mgpu_check.oracles.devices.operations import DTYPES, Prepared, evidence_of, exactly, seeded
from mgpu_check.oracles.generated_data import fractions, integers, several

_CHOICES, _FEWEST = 1024, 128
_VECTORS = 2
_ROWS = 1024
_LOOKED_AT = 32
_EXACT = 2**53


def wrong_rows(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a mask of the rows of `c` that differ from the product of `a` and `b`: bool, (m,), in O(n²).

    The check compares c·x with a·(b·x) for two vectors x of numbers drawn from [1, r]. Here r is 1024, or less if sums
    would not be exact in float64. It never calls a right row wrong, and always finds a row with one wrong element. It
    misses a row with several with probability at most r^-2, about 10^-6 for 1024: if all numbers of x but one are
    fixed, at most one value of the last number hides the difference.
    Source: R. Freivalds, *Probabilistic machines can use less running time*, IFIP 1977.

    Args:
        a, b, c: whole numbers, of shapes (m, k), (k, n) and (m, n), of any dtype, on one device; `c` may hold NaN.

    Raises:
        ValueError: sums could be inexact in float64: k·n·max|a|·max|b|·128 must be less than 2^53.
    """
    most = float(a.double().abs().max()) * float(b.double().abs().max())
    exact = int((_EXACT - 1) // max(1.0, most * a.shape[1] * b.shape[1]))
    if exact < _FEWEST:
        raise ValueError(
            f"wrong_rows: k={a.shape[1]}, n={b.shape[1]} and products up to {most:g} are not exact in float64"
        )
    x = integers((b.shape[1], _VECTORS), 1, min(_CHOICES, exact), seed=seed, device=a.device, dtype=torch.float64)
    return (_times(c, x) != _times(a, _times(b, x))).any(dim=1)


def _times(matrix: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Multiply a matrix by a few columns in float64 by sums, because the units for products are under test."""
    blocks = [
        torch.stack([(rows.double() * vector).sum(dim=1) for vector in vectors.unbind(dim=1)], dim=1)
        for rows in matrix.split(_ROWS)
    ]
    return torch.cat(blocks)


def freivalds(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, seed: int) -> dict[str, Any]:
    """Return evidence of the errors in a product, empty if `wrong_rows` finds none.
    The check finds wrong rows and wrong columns. The host computes some of the elements where they cross again."""
    rows = wrong_rows(a, b, c, seed)
    if not bool(rows.any()):
        return {}
    columns = wrong_rows(b.t(), a.t(), c.t(), seed + 1)
    evidence: dict[str, Any] = {"wrong rows": int(rows.sum()), "wrong columns": int(columns.sum())}
    at = rows.nonzero()[:_LOOKED_AT, 0], columns.nonzero()[:_LOOKED_AT, 0]
    exact = a[at[0]].cpu().double() @ b[:, at[1]].cpu().double()
    got = c[at[0]][:, at[1]].cpu()
    expected = exact.to(got.dtype)
    evidence |= evidence_of(got, expected, got != expected)
    positions = [index.tolist() for index in at]
    evidence["indices"] = [[positions[0][row], positions[1][column]] for row, column in evidence.get("indices", [])]
    evidence["box"] = [[min(axis), max(axis)] for axis in positions if axis]
    evidence["errors"] = max(evidence["errors"], evidence["wrong rows"], evidence["wrong columns"])
    return evidence


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
    dtype, seed = torch.float64, seeded(case, 0)
    x, y, z, w = several(shapes, -largest, largest, seed=seed, device=device, dtype=dtype)
    product = torch.zeros(*batch, m, n, dtype=torch.float64, device=device)
    for term in range(terms):
        product.addcmul_(y[..., term : term + 1], w[..., term : term + 1, :])
    a, b = torch.cat([x, y, -x], dim=-1), torch.cat([z, w, z], dim=-2)
    if DTYPES[case.dtype].is_floating_point:
        powers = several([(m, 1), (1, n)], 0, 4, seed=seed + 1, device=device, dtype=torch.int64)
        rows, columns = ((torch.ones_like(power) << power).to(dtype) / 4 for power in powers)
        a, b, product = a * rows, b * columns, product * rows * columns
    return a, b, product


def multiplied(dtype: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call that multiplies two matrices in a dtype. int8 gives int32, float8 gives bfloat16."""
    torch_dtype = DTYPES[dtype]
    if torch_dtype in _FLOAT8:
        second_dtype = torch.float8_e4m3fn  # cuBLASLt cannot multiply two e5m2 matrices: pytorch/pytorch#132005
        operand_a, operand_b = a.to(torch_dtype), b.t().contiguous().to(second_dtype).t()
        scale = torch.ones((), device=a.device)
        return lambda: torch._scaled_mm(operand_a, operand_b, scale, scale, out_dtype=torch.bfloat16)
    if torch_dtype == torch.int8:
        # cuBLAS need not take two row-major matrices: pytorch/pytorch#169956.
        operand_a, operand_b = a.to(torch_dtype), b.t().contiguous().to(torch_dtype).t()
        return lambda: torch._int_mm(operand_a, operand_b)
    operand_a, operand_b = a.to(torch_dtype), b.to(torch_dtype)
    return lambda: torch.matmul(operand_a, operand_b)


def result_dtype(dtype: str) -> torch.dtype:
    torch_dtype = DTYPES[dtype]
    return torch.bfloat16 if torch_dtype in _FLOAT8 else torch.int32 if torch_dtype == torch.int8 else torch_dtype


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
    operand_a, operand_b = a.to(narrow), b.to(narrow)
    return Prepared(call, lambda c: freivalds(operand_a, operand_b, c, seeded(case, 2)), 2.0 * m * k * n)


def of_random_numbers(case: ComputeCase, device: torch.device) -> Prepared:
    m, k, n = _sides(case, 16384)
    a, b = _random(case, device, (m, k), (k, n), dtype=torch.float64)
    return Prepared(multiplied(case.dtype, a, b), None, 2.0 * m * k * n)


def _random(case: ComputeCase, device: torch.device, *shapes: tuple[int, ...], **options: Any) -> list[torch.Tensor]:
    """Return an operand of `fractions` for each of `shapes`, in the dtype of the case unless `options` has another."""
    options = {"dtype": DTYPES[case.dtype], **options}
    return [
        fractions(shape, seed=seeded(case, number), device=device, **options) for number, shape in enumerate(shapes)
    ]


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
    a, b = _random(case, device, *[(count, side, side)] * 2, dtype=torch.float64)
    return Prepared(multiplied(case.dtype, a, b), None, 2.0 * count * side**3)


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
    lengths = {1, 2, 3, 5, 7, 13, 251}
    around = (-1, 0, 1) if step == 1 else (0,)
    for power in range(3, most.bit_length()):
        lengths |= {length + near for length in (1 << power, 3 << power - 1) for near in around}
    return _multiples((length for length in lengths if length <= most), step)


def _multiples(lengths: Iterable[int], step: int) -> list[int]:
    return sorted({-(-length // step) * step for length in lengths})


def shapes_of(case: ComputeCase) -> list[ProductShape]:
    """Return the products of a case: every length of k, and some of m and n, with small other dimensions.
    The other dimensions are smaller where the memory of the device is: operands and results stay in memory together."""
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

    other = functools.partial(drawn.choice, small)
    longs = [length for length in lengths if length > below]
    sides = [(other(), k, other()) for k in lengths]
    sides += [(m, other(), other()) for m in drawn.sample(longs, min(_LONG, len(longs)))]
    sides += [(other(), other(), n) for n in drawn.sample(longs, min(_LONG, len(longs)))]
    return [
        ProductShape(m, k, n, layouts[(number + case.seed) % len(layouts)]) for number, (m, k, n) in enumerate(sides)
    ]


def _elements(shape: ProductShape) -> int:
    """Return the elements that a product keeps in memory: its operands, and results to compare with each other."""
    count = shape.k * (shape.m + shape.n) + _RESULTS * shape.m * shape.n
    return count * (_BATCH if shape.layout == "batched" else 1)


def _laid_out(tensor: torch.Tensor, how: str) -> torch.Tensor:
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
    torch_dtype = DTYPES[dtype]
    layout_a, layout_b = tuple(shape.layout) if len(shape.layout) == len("nt") else (shape.layout, shape.layout)
    operand_a, operand_b = _laid_out(a.to(torch_dtype), layout_a), _laid_out(b.to(torch_dtype), layout_b)
    return lambda: torch.matmul(operand_a, operand_b)


def shapes_known_by_algebra(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare the products of `shapes_of`; the result has all of them, one after the other."""
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
    ends = torch.tensor([len(tensor) for tensor in expected]).cumsum(0).tolist()

    def judge(got: torch.Tensor) -> dict[str, Any]:
        evidence = exact(got)
        return evidence and evidence | {"products": _wrong(got, expected, ends, shapes)}

    return Prepared(lambda: torch.cat([call().reshape(-1) for call in calls]), judge, work)


def _wrong(got: torch.Tensor, expected: list[torch.Tensor], ends: list[int], shapes: list[ProductShape]) -> list[str]:
    mismatches = [
        str(shape)
        for shape, product, end in zip(shapes, expected, ends, strict=True)
        if not torch.equal(got[end - len(product) : end], product)
    ]
    more = [f"and {len(mismatches) - 8} more of {len(shapes)}"] if len(mismatches) > 8 else []
    return mismatches[:8] + more


_TAPS = 9
_HEAD = 64
_SCORES = 8  # most scores of attention in memory, as a multiple of the elements of a matrix of the case


def _image(case: ComputeCase) -> tuple[int, int, int]:
    """Return images, channels and side, for about as many elements as a matrix of the case has."""
    side = max(8, min(64, case.size // 8)) // 2 * 2
    channels = max(16, min(256, case.size // 16))
    return max(1, min(64, case.size**2 // (side**2 * channels))), channels, side


def convolution_known_by_algebra(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare a 3x3 convolution whose channels cancel but for two, as in `products.factors`.

    Channels are [x, y, -x] and filters [z, w, z]. Each filter w has one tap per input channel, so the result is a sum
    of two shifted images. With a stride of 2 cuDNN cannot use Winograd's or Fourier's algorithms, which round.
    """
    count, channels, side = _image(case)
    largest = LARGEST[case.dtype]
    dtype = DTYPES[case.dtype]
    half = (channels - 2) // 2

    shapes = (count, half, side, side), (count, 2, side, side), (channels, half, 3, 3), (channels, 2)
    seed = seeded(case, 0)
    x, y, z, factor = several(shapes, -largest, largest, seed=seed, device=device, dtype=torch.float64)
    w = torch.zeros(channels, 2, _TAPS, dtype=torch.float64, device=device)
    expected = torch.empty(count, channels, side // 2, side // 2, dtype=torch.float64, device=device)
    padded = F.pad(y, (1, 1, 1, 1))
    for tap in range(_TAPS):
        row, column = divmod(tap, 3)
        shifted = padded[:, :, row : row + side : 2, column : column + side : 2]
        w[tap::_TAPS, :, tap] = factor[tap::_TAPS]
        mine = factor[tap::_TAPS, :, None, None]
        expected[:, tap::_TAPS] = shifted[:, :1] * mine[:, 0] + shifted[:, 1:] * mine[:, 1]
    image = torch.cat([x, y, -x], dim=1).to(dtype)
    filters = torch.cat([z, w.view(channels, 2, 3, 3), z], dim=1).to(dtype)
    operations = 2.0 * expected.numel() * image.shape[1] * _TAPS
    return Prepared(lambda: F.conv2d(image, filters, stride=2, padding=1), exactly(expected.to(dtype)), operations)


def convolution_of_random_numbers(case: ComputeCase, device: torch.device) -> Prepared:
    count, channels, side = _image(case)
    image, filters = _random(case, device, (count, channels, side, side), (channels, channels, 3, 3))
    return Prepared(lambda: F.conv2d(image, filters, padding=1), None, 2.0 * image.numel() * channels * _TAPS)


def _sequence(case: ComputeCase) -> tuple[int, int, int]:
    """Return the number of heads over all batches, of tokens, and of elements of a head."""
    tokens = 1 << max(5, min(11, int(math.log2(case.size))))
    heads = case.size**2 // (tokens * _HEAD)
    if case.dtype in ("float32", "float64"):  # the unfused kernel of `_attention` keeps the scores of all heads
        heads = min(heads, _SCORES * case.size**2 // tokens**2)
    return max(1, heads), tokens, _HEAD


def attention_known_by_algebra(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare attention whose queries attend equally to some keys, and to no others.

    Keys are rows of a Hadamard matrix or their negatives, and queries are multiples of such rows. So a query has a
    large score for keys with its row. For others its score is 0 or less, and the exponential underflows to 0 (from
    e^-104 on in float32, from e^-746 on in float64). The result is the mean of the values of the matching keys. Their
    number is a power of two and the values are whole numbers, so the mean is exact in every order, and also block by
    block.
    """
    heads, tokens, width = _sequence(case)
    dtype = DTYPES[case.dtype]
    codes = _hadamard(width, device)
    codes = torch.cat([codes, -codes])
    rows = min(tokens // 4, len(codes))
    scale = 128.0 if dtype == torch.float64 else 16.0  # scores are 8 times that, after the division by √64
    wanted = integers((tokens,), 0, rows - 1, seed=seeded(case, 0), device=device)
    low, high = (-32, 31) if tokens // rows == 4 else (-8, 7)  # their sum has 8 bits at most, which bfloat16 holds
    value = integers((heads, tokens, width), low, high, seed=seeded(case, 1), device=device, dtype=torch.float64)
    keys = codes[torch.arange(tokens, device=device) % rows]
    means = value.view(heads, tokens // rows, rows, width).mean(dim=1)
    q, k = (
        tensor.to(dtype).expand(heads, tokens, width).contiguous()[None] for tensor in (codes[wanted] * scale, keys)
    )
    v = value.to(dtype)[None]
    expected = means[:, wanted].to(dtype)
    return Prepared(lambda: _attention(q, k, v)[0], exactly(expected), 4.0 * heads * tokens**2 * width)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend by the kernel that torch chooses, but by products and softmax in float32 and float64.
    A fused kernel multiplies scores by log2(e), which may cost a rounding of float32. A narrow result hides this
    rounding."""
    if q.dtype in (torch.float32, torch.float64):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Return Sylvester's Hadamard matrix of `size`, a power of two: rows of 1 and -1 that are orthogonal."""
    bits = torch.arange(size, device=device)
    both = bits[:, None] & bits[None, :]
    parity = torch.zeros_like(both)
    for shift in range(size.bit_length()):
        parity ^= both >> shift & 1
    return 1.0 - 2.0 * parity.double()


def attention_of_random_numbers(case: ComputeCase, device: torch.device) -> Prepared:
    heads, tokens, width = _sequence(case)
    q, k, v = _random(case, device, *[(1, heads, tokens, width)] * 3, high=2.0)
    return Prepared(lambda: F.scaled_dot_product_attention(q, k, v), None, 4.0 * heads * tokens**2 * width)


def layer_norm(case: ComputeCase, device: torch.device) -> Prepared:
    (x,) = _random(case, device, (case.size, case.size), high=3.0)
    weight = fractions((case.size,), seed=seeded(case, 1), device=device, dtype=DTYPES[case.dtype])
    return Prepared(lambda: F.layer_norm(x, (case.size,), weight, weight))


def softmax(case: ComputeCase, device: torch.device) -> Prepared:
    (x,) = _random(case, device, (case.size, case.size), high=9.0)
    return Prepared(lambda: torch.softmax(x, dim=1))
