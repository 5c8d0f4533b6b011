"""Prepare convolutions and attention whose results are known by algebra, and layers on random numbers."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mgpu_check.suite.common.counters import fractions, integers, several
from mgpu_check.suite.devices.computing.cases import ComputeCase
from mgpu_check.suite.devices.computing.prepared import DTYPES, Prepared, exactly, seeded
from mgpu_check.suite.devices.computing.products import LARGEST, require

_TAPS = 9
_HEAD = 64
_SCORES = 8
"""Most scores of attention in memory, as a multiple of the elements of a matrix of the case."""


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
    require(case.dtype, device)
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
    require(case.dtype, device)
    count, channels, side = _image(case)
    dtype = DTYPES[case.dtype]
    image = fractions((count, channels, side, side), seed=seeded(case, 0), device=device, dtype=dtype)
    filters = fractions((channels, channels, 3, 3), seed=seeded(case, 1), device=device, dtype=dtype)
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
    require(case.dtype, device)
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
    q, k = (one.to(dtype).expand(heads, tokens, width).contiguous()[None] for one in (codes[wanted] * scale, keys))
    v = value.to(dtype)[None]
    expected = means[:, wanted].to(dtype)
    return Prepared(lambda: _attention(q, k, v)[0], exactly(expected), 4.0 * heads * tokens**2 * width)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend by the kernel that torch chooses, but by products and softmax in float32 and float64.

    A fused kernel multiplies scores by log2(e), which may cost a rounding of float32. A narrow result hides this
    rounding.
    """
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
    require(case.dtype, device)
    heads, tokens, width = _sequence(case)
    q, k, v = (
        fractions((1, heads, tokens, width), seed=seeded(case, i), device=device, dtype=DTYPES[case.dtype], high=2.0)
        for i in range(3)
    )
    return Prepared(lambda: F.scaled_dot_product_attention(q, k, v), None, 4.0 * heads * tokens**2 * width)


def layer_norm(case: ComputeCase, device: torch.device) -> Prepared:
    require(case.dtype, device)
    x = fractions((case.size, case.size), seed=seeded(case, 0), device=device, dtype=DTYPES[case.dtype], high=3.0)
    weight = fractions((case.size,), seed=seeded(case, 1), device=device, dtype=DTYPES[case.dtype])
    return Prepared(lambda: F.layer_norm(x, (case.size,), weight, weight))


def softmax(case: ComputeCase, device: torch.device) -> Prepared:
    require(case.dtype, device)
    x = fractions((case.size, case.size), seed=seeded(case, 0), device=device, dtype=DTYPES[case.dtype], high=9.0)
    return Prepared(lambda: torch.softmax(x, dim=1))
