"""Yield cases with more than 4 MiB of data, where kernels, blocks and copies change how they work."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.agreement import Case
from mgpu_check.suite.common.operators import CALLS
from mgpu_check.suite.common.values import anything, significands, whole
from mgpu_check.suite.devices.operators.products import monomial
from mgpu_check.torch_hooks.tensors import name_of

__all__ = ["LEAST", "large_cases"]

LEAST = 4 << 20
"""Bytes that each case reads or writes at least."""


def large_cases(seed: int = 0, *, more: bool = False) -> Iterator[Case]:
    """Yield one case per path: product, elementwise, conversion, reduction, index, join; with `more` sorting and
    convolution too."""
    for dtype, inner in ((torch.float32, 24), (torch.float16, 4)):
        width = 1024 * 4 // dtype.itemsize
        factors = significands((1030, inner), dtype, seed), monomial(inner, width, dtype)
        name = f"matmul of {name_of(dtype)}"
        yield Case(name, lambda a, b: torch.matmul(a, b), factors, "numbers", _known(*factors))
    count = LEAST // 4 + 5
    sharp, other = significands((count,), torch.float32, seed), significands((count,), torch.float32, seed + 1)
    yield Case("add of float32", CALLS["add"], (sharp, other))
    yield Case("add_ of float32", CALLS["add_"], (sharp, other), changes=True)
    yield Case("where of float32", lambda a, b: torch.where(a > b, a, b), (sharp, other), "bits")
    yield Case("conversion of float32 to bfloat16 and back", lambda a: a.bfloat16().float(), (sharp,))
    yield Case("conversion of float32 to float64", lambda a: a.double(), (sharp,))
    words = anything(LEAST // 8 + 3, torch.int64, seed)
    yield Case("sum of int64", lambda a: a.sum(), (words,))
    yield Case("cumsum of int64", lambda a: a.cumsum(0), (words,))
    yield Case("max of int64", lambda a: a.max(dim=0), (words,))
    yield Case("flip of int64", lambda a: a.flip(0), (words,), "bits")
    yield Case("cat of int64", lambda a: torch.cat([a, a[7:]]), (words,), "bits")
    rows = anything(LEAST, torch.bfloat16, seed).view(-1, 256)[: LEAST // 512 + 1]
    yield Case("index_select of bfloat16", lambda a: a[torch.arange(len(a), device=a.device).flip(0)], (rows,), "bits")
    yield Case("transpose of bfloat16", lambda a: a.t().contiguous(), (rows,), "bits")
    numbers = whole((LEAST // 4 + 9,), torch.float32, seed, 1)
    yield Case("sum of float32", lambda a: a.sum(), (numbers,), "numbers")
    if not more:
        return
    yield Case("sort of int32", lambda a: a.sort().values, (anything(LEAST // 4 + 1, torch.int32, seed),))
    image, taps = (
        significands((2, 3, 850, 850), torch.float32, seed),
        monomial(27, 3, torch.float32).t().reshape(3, 3, 3, 3),
    )
    yield Case("conv2d of float32", lambda x, w: F.conv2d(x, w, stride=2), (image, taps), "numbers")


def _known(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product with a matrix that has one nonzero element per column."""
    places = b.abs().argmax(dim=0)
    return a[:, places] * b[places, torch.arange(b.shape[1])]
