"""Yield cases of more than 4 MiB of data, or of many rows, where kernels, blocks and copies work differently."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.agreement import Case
from mgpu_check.suite.common.operators import CALLS, Function
from mgpu_check.suite.common.values import anything, significands, small, whole
from mgpu_check.suite.devices.operators.products import monomial
from mgpu_check.torch_hooks.tensors import name_of

LEAST = 4 << 20
"""Bytes that each case of much data reads or writes at least."""
MANY = (1 << 16) + 5
"""Rows: CUDA has at most 65,535 blocks along the second and third dimension of a grid."""


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Return rows whose elements differ by at least 1, so that their variance loses no digits."""
    return x + 5 * torch.arange(4, device=x.device)


_ROWWISE: tuple[tuple[str, Function], ...] = (
    ("softmax", lambda x: F.softmax(x, 1)),
    ("log_softmax", lambda x: F.log_softmax(x, 1)),
    ("layer_norm", lambda x: F.layer_norm(_apart(x), (4,), x[0], x[1])),
    ("rms_norm", lambda x: F.rms_norm(_apart(x), (4,))),
    ("group_norm", lambda x: F.group_norm(_apart(x), 2)),
    ("batch_norm of channels", lambda x: F.batch_norm(_apart(x).t(), None, None, training=True)),
    ("batch_norm of an evaluation", lambda x: F.batch_norm(x, x[0], x[1].abs() + 0.5)),
    ("linear", lambda x: F.linear(x, x[:3])),
    ("bmm", lambda x: torch.bmm(x.view(-1, 2, 2), x.view(-1, 2, 2).transpose(1, 2))),
    ("attention of heads", lambda x: F.scaled_dot_product_attention(*[x.view(1, -1, 2, 2)] * 3)),
    ("conv1d", lambda x: F.conv1d(x[:, None], x[:2, None, :3])),
    ("conv1d of groups", lambda x: F.conv1d(x.view(1, MANY, 4), x[:, None, :3], groups=MANY)),
    ("max_pool1d", lambda x: F.max_pool1d(x[:, None], 2)),
    ("avg_pool2d of channels", lambda x: F.avg_pool2d(x.view(1, -1, 2, 2), 2)),
    ("interpolate", lambda x: F.interpolate(x[:, None], scale_factor=2.0, mode="linear")),
    ("pad", lambda x: F.pad(x[:, None], (1, 2), "reflect")),
    ("cross_entropy", lambda x: F.cross_entropy(x, torch.arange(MANY, device=x.device) % 4, reduction="none")),
    ("sum", lambda x: x.sum(1)),
    ("max", lambda x: x.max(1)),
    ("cumsum", lambda x: x.cumsum(1)),
    ("sort", lambda x: x.sort(1)),
    ("topk", lambda x: x.topk(2, 1)),
    ("embedding", lambda x: F.embedding(torch.arange(MANY, device=x.device).flip(0), x)),
    ("gather", lambda x: x.gather(1, torch.arange(4 * MANY, device=x.device).view(-1, 4) % 4)),
    ("index_add", lambda x: x.index_add(0, torch.arange(MANY, device=x.device).flip(0), x)),
    ("transpose of blocks", lambda x: x.view(-1, 2, 2).transpose(1, 2).contiguous()),
    (
        "solve",
        lambda x: torch.linalg.solve(x.view(-1, 2, 2).tril() + 5 * torch.eye(2, device=x.device).to(x), x[:, :2]),
    ),
)
"""Functions of a matrix with many short rows."""


def large_cases(seed: int = 0, *, more: bool = False) -> Iterator[Case]:
    """Yield one case per path: product, elementwise, conversion, reduction, index, join, and many rows; with `more`
    sorting and convolution too."""
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
    short = small((MANY, 4), torch.float32, seed)
    for name, call in _ROWWISE:
        yield Case(f"{name} of {MANY} rows of float32", call, (short,), "close")
    if not more:
        return
    yield Case("mean of float32", lambda a: a.mean(), (numbers,), "close")
    yield Case("max of float32", lambda a: a.max(), (sharp,), "numbers")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        pair = significands((300, 200), dtype, seed), monomial(200, 300, dtype)
        right = _known(*pair)
        for name, call in (
            ("mm", lambda a, b: torch.mm(a.t().contiguous().t(), b.t().contiguous().t())),
            ("bmm", lambda a, b: torch.bmm(a[None], b[None])[0]),
            ("linear", lambda a, b: F.linear(a.t().contiguous().t(), b.t())),
            ("mm out_dtype=", lambda a, b: _in_another_dtype(torch.mm, a, b)),
            ("bmm out_dtype=", lambda a, b: _in_another_dtype(torch.bmm, a[None], b[None])[0]),
        ):
            yield Case(f"{name} of {name_of(dtype)}, 60,000 elements", call, pair, "numbers", right)
    yield Case("sort of int32", lambda a: a.sort().values, (anything(LEAST // 4 + 1, torch.int32, seed),))
    image, taps = (
        significands((2, 3, 850, 850), torch.float32, seed),
        monomial(27, 3, torch.float32).t().reshape(3, 3, 3, 3),
    )
    yield Case("conv2d of float32", lambda x, w: F.conv2d(x, w, stride=2), (image, taps), "numbers")


def _in_another_dtype(product: Function, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a product that torch accumulates and returns in float32, which CUDA alone has, in the dtype of `a`."""
    return product(a, b, out_dtype=torch.float32).to(a.dtype)  # type: ignore[no-any-return]


def _known(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product with a matrix that has one nonzero element per column."""
    places = b.abs().argmax(dim=0)
    return a[:, places] * b[places, torch.arange(b.shape[1])]
