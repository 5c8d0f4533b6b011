"""Yield products of matrices and convolutions whose results are known bit for bit in any order of summation.

In one kind of case a factor has one nonzero element per row or column, a power of two. Each result is then an element
of the other factor with all its digits; a unit that computes in a narrower format loses some. In the other kind the
factors are whole numbers, and many products are added up; a sum in a narrow format loses some of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.suite.common.agreement import Case, Window
from mgpu_check.suite.common.operators import Function
from mgpu_check.suite.common.values import COMPLEX, FLOATS, significands, whole
from mgpu_check.suite.devices.computing.products import LARGEST
from mgpu_check.torch_hooks.tensors import name_of

_M, _K, _N = 19, 33, 18


def monomial(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix with one power of two, from 1/2 to 2, in each column, and zeros."""
    matrix = torch.zeros(rows, columns, dtype=torch.float64, device="cpu")
    places = torch.arange(columns, device="cpu")
    matrix[places * 7 % rows, places] = torch.ldexp(torch.ones(columns, dtype=torch.float64), places % 3 - 1)
    return matrix.to(dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Call `nn.Linear` with these parameters, on their device."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)
        return module(x)  # type: ignore[no-any-return]


def _nothing(a: torch.Tensor) -> torch.Tensor:
    """Return NaN, which a product with ``beta=0`` must not read."""
    return a.new_full((1, 1), torch.nan)


_OF_TWO: tuple[tuple[str, Function], ...] = (
    ("matmul", lambda a, b: torch.matmul(a, b)),
    ("@", lambda a, b: a @ b),
    ("mm", lambda a, b: torch.mm(a, b)),
    ("Tensor.mm", lambda a, b: a.mm(b)),
    ("matmul out=", lambda a, b: torch.matmul(a, b, out=a.new_empty(a.shape[0], b.shape[1]))),
    ("matmul of transposed", lambda a, b: torch.matmul(b.t(), a.t()).t()),
    ("matmul of rows apart", lambda a, b: torch.matmul(a[::2], b[:, 1:-1])),
    ("einsum", lambda a, b: torch.einsum("ik,kj->ij", a, b)),
    ("bmm", lambda a, b: torch.bmm(torch.stack([a, -a]), torch.stack([b, b]))),
    ("bmm of transposed", lambda a, b: torch.bmm(torch.stack([b, b]).mT, torch.stack([a, -a]).mT)),
    ("bmm of a transposed factor", lambda a, b: torch.bmm(torch.stack([a, -a]), torch.stack([b.t(), b.t()]).mT)),
    ("batched @", lambda a, b: torch.stack([a, -a]) @ b),
    ("baddbmm", lambda a, b: torch.baddbmm(a.new_zeros(1, 1, 1), a[None], b[None])),
    ("baddbmm of transposed", lambda a, b: torch.baddbmm(a.new_zeros(1, 1, 1), b.t()[None], a.t()[None])),
    ("addmm", lambda a, b: torch.addmm(a.new_zeros(b.shape[1]), a, b)),
    ("addmm of transposed", lambda a, b: torch.addmm(a.new_zeros(a.shape[0]), b.t(), a.t())),
    ("addmm without its input", lambda a, b: torch.addmm(_nothing(a), a, b, beta=0, alpha=0.5)),
    ("baddbmm without its input", lambda a, b: torch.baddbmm(_nothing(a), a[None], b[None], beta=0, alpha=0.5)),
    ("addmm_", lambda a, b: a.new_zeros(a.shape[0], b.shape[1]).addmm_(a, b)),
    ("mv", lambda a, b: torch.mv(a, b[:, 2].contiguous())),
    ("matrix @ vector", lambda a, b: a @ b[:, 3]),
    ("dot", lambda a, b: torch.dot(a[1], b[:, 1].contiguous())),
    ("tensordot", lambda a, b: torch.tensordot(a, b, dims=1)),
    ("F.linear", lambda a, b: F.linear(a, b.t())),
    ("F.linear of a batch", lambda a, b: F.linear(torch.stack([a, a]), b.t().contiguous())),
)
"""Products of two matrices."""

_MODULES: tuple[tuple[str, Function], ...] = (
    ("nn.Linear", lambda a, b: _linear(a, b.t())),
    ("outer", lambda a, b: torch.outer(a[0], b[:, 0])),
)


def _sharp(dtype: torch.dtype, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield two pairs of factors: the first factor, then the second, uses all its digits."""
    full = significands((_M, _K), dtype, seed)
    yield full, monomial(_K, _N, dtype)
    yield monomial(_K, _M, dtype).t().contiguous(), significands((_K, _N), dtype, seed + 1)


def _added(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors [x, y, -x] and [z; w; z]: the product is y·w, and partial sums exceed a narrow dtype's range."""
    most = min(LARGEST[name_of(dtype)], 127)
    half = (_K - 2) // 2
    x, y = whole((_M, half), dtype, seed, most), whole((_M, _K - 2 * half), dtype, seed + 1, min(most, 8))
    z, w = whole((half, _N), dtype, seed + 2, most), whole((_K - 2 * half, _N), dtype, seed + 3, min(most, 8))
    return torch.cat([x, y, -x], dim=1), torch.cat([z, w, z], dim=0)


def product_cases(seed: int = 0) -> Iterator[Case]:
    """Yield each function in each floating dtype on full significands and sums, convolutions, and complex products."""
    for dtype in FLOATS:
        kind = name_of(dtype)
        for name, call in (*_OF_TWO, *_MODULES):
            for place, (a, b) in enumerate(_sharp(dtype, seed)):
                yield Case(
                    f"{name} of {kind} ({'first' if place == 0 else 'second'} factor sharp)", call, (a, b), "numbers"
                )
            if name not in ("dot", "outer", "mv", "matrix @ vector"):
                # The sum is exact in float64; only the conversion to the narrow dtype rounds.
                a, b = _added(dtype, seed)
                right = call(a.double(), b.double()).to(dtype)
                yield Case(f"{name} of {kind} (sums)", call, (a, b), "numbers", right)
        bias = whole((_N,), dtype, seed + 4)
        a, b = _added(dtype, seed)
        for name, call in (("addmm with an input", lambda c, a, b: torch.addmm(c, a, b)),
                           ("nn.Linear with a bias", lambda c, a, b: _linear(a, b.t(), c))):  # fmt: skip
            right = (bias.double() + a.double() @ b.double()).to(dtype)
            yield Case(f"{name} of {kind}", call, (bias, a, b), "numbers", right)
        yield from _convolutions(dtype, seed)
    for dtype in COMPLEX:
        a, b = whole((_M, _K), dtype, seed, 9), whole((_K, _N), dtype, seed + 1, 9)
        for name, call in _OF_TWO:
            yield Case(f"{name} of {name_of(dtype)}", call, (a, b), "numbers")


def _of_one_channel(taps: torch.Tensor) -> torch.Tensor:
    """Return five filters of one channel that keep the taps of all channels, so no filter is zero."""
    return taps[:5].sum(1, keepdim=True)


def _convolutions(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield convolutions whose filters have one tap each.

    The stride of 2 or 3 keeps cuDNN from algorithms that round.
    """
    kind = name_of(dtype)
    image = significands((2, 5, 9, 8), dtype, seed)
    taps = monomial(5 * 3 * 3, 6, dtype).t().reshape(6, 5, 3, 3).contiguous()
    calls: tuple[tuple[str, Function], ...] = (
        ("conv2d", lambda x, w: F.conv2d(x, w, stride=2, padding=1)),
        ("conv2d of one image", lambda x, w: F.conv2d(x[0], w, stride=2)),
        ("conv2d channels_last", lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w, stride=2)),
        ("conv1d", lambda x, w: F.conv1d(x[:, :, 0], w[:, :, 0], stride=2)),
        ("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=3)),
        ("grouped conv2d", lambda x, w: F.conv2d(x, _of_one_channel(w), stride=2, groups=5)),
        (
            "grouped conv2d channels_last",
            lambda x, w: F.conv2d(
                x.contiguous(memory_format=torch.channels_last), _of_one_channel(w), stride=2, groups=5
            ),
        ),
    )
    for name, call in calls:
        yield Case(f"{name} of {kind}", call, (image, taps), "numbers")
    gaps = Window(significands((2, 5, 18, 8), dtype, seed), lambda storage: storage[:, :, ::2])
    yield Case(f"conv2d of rows apart of {kind}", calls[0][1], (gaps, taps), "numbers")
