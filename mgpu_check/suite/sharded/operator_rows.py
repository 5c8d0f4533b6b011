"""The operators on DTensors that the suite tries, as functions of matrices with at least 3 rows and 5 columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from mgpu_check.suite.sharded.redistribution import placed
from mgpu_check.version import torch_version

_Unary = Callable[[torch.Tensor], torch.Tensor]
_Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _beside(x: torch.Tensor, values: object) -> torch.Tensor:
    """Return another operand for `x`, the same on all ranks: a DTensor if `x` is one."""
    made = torch.as_tensor(values, device="cpu")
    return placed(made, [Replicate()] * x.device_mesh.ndim, x.device_mesh) if isinstance(x, DTensor) else made


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Make all elements different, because devices may choose either of two equal ones."""
    return x * x.numel() + _beside(x, torch.arange(float(x.numel())).view(x.shape))


OF_ONE: tuple[tuple[str, _Unary], ...] = (
    # elementwise
    ("neg", lambda x: -x), ("abs", lambda x: x.abs()), ("exp", lambda x: x.exp()), ("clamp", lambda x: x.clamp(-1, 2)),
    ("relu", lambda x: F.relu(x)), ("square", lambda x: x * x), ("times a number", lambda x: x * 3),
    ("plus a number", lambda x: x + 5), ("minus a number", lambda x: x - 5), ("a number minus", lambda x: 3 - x),
    ("divided by a number", lambda x: x / 4), ("divided from a number", lambda x: 1 / (x * x + 1)),
    ("remainder", lambda x: x % 2), ("pow", lambda x: x**3), ("sign", lambda x: x.sign()),
    ("round", lambda x: (x / 2).round()), ("sigmoid", lambda x: x.sigmoid()), ("log", lambda x: (x * x + 1).log()),
    ("rsqrt", lambda x: (x * x + 1).rsqrt()), ("silu", lambda x: F.silu(x)), ("gelu", lambda x: F.gelu(x)),
    ("leaky_relu", lambda x: F.leaky_relu(x, 0.1)), ("glu", lambda x: F.glu(x.repeat(1, 2), 1)),
    ("clamp_min", lambda x: x.clamp_min(0.5)), ("add with alpha", lambda x: torch.add(x, x, alpha=3)),
    ("addcmul", lambda x: torch.addcmul(x, x, x, value=2)), ("in place", lambda x: x.clone().mul_(2).add_(1)),
    ("filled", lambda x: x.clone().fill_(2.0) + x), ("zeroed", lambda x: x.clone().zero_() + x),
    ("masked_fill", lambda x: x.masked_fill(x > 1, 0.0)), ("where with a number", lambda x: torch.where(x > 0, x, 2.0)),
    ("to float64", lambda x: x.double()), ("to bfloat16", lambda x: x.to(torch.bfloat16).float()),
    ("to int64", lambda x: x.to(torch.int64) * 2), ("bits", lambda x: x.to(torch.int64) & 3),
    ("logical_not", lambda x: x.logical_not()), ("detached", lambda x: x * x.detach()),
    ("bucketize", lambda x: torch.bucketize(x, _beside(x, [-1.0, 1.0]))),
    ("zeros_like", lambda x: torch.zeros_like(x) + x), ("full_like", lambda x: torch.full_like(x, 3.0) * x),
    ("new_ones", lambda x: x.new_ones(x.shape) * x), ("new_full", lambda x: x.new_full((2,), 4.0)),
    ("copied", lambda x: torch.empty_like(x).copy_(x)),
    ("foreach mul", lambda x: torch._foreach_mul([x, x + 1], 2.0)[1]),
    ("foreach norm", lambda x: torch._foreach_norm([x, x + 1])[1]),
    # reductions
    ("sum", lambda x: x.sum()), ("sum over 0", lambda x: x.sum(0)), ("sum over 1", lambda x: x.sum(1, keepdim=True)),
    ("sum over both", lambda x: x.sum((0, 1))), ("sum in float64", lambda x: x.sum(1, dtype=torch.float64)),
    ("sum of whole numbers", lambda x: x.to(torch.int64).sum(0)), ("nansum", lambda x: x.nansum(1)),
    ("mean", lambda x: x.mean()), ("mean over 0", lambda x: x.mean(0)), ("mean over 1", lambda x: x.mean(1)),
    ("amax over 0", lambda x: x.amax(0)), ("amin over 1", lambda x: x.amin(1)), ("max", lambda x: x.max()),
    ("aminmax", lambda x: x.aminmax(dim=1)[1]), ("max over 0", lambda x: _apart(x).max(0).values),
    ("min over 1", lambda x: _apart(x).min(1, keepdim=True).values),
    ("place of max", lambda x: _apart(x).max(1).indices),
    ("argmax over 1", lambda x: _apart(x).argmax(1)), ("argmin over 0", lambda x: _apart(x).argmin(0, keepdim=True)),
    ("any", lambda x: (x > 2).any()), ("all over 1", lambda x: (x > -3).all(1)),
    ("count_nonzero", lambda x: x.count_nonzero(0)), ("histc", lambda x: x.detach().histc(4, -3, 3)),
    ("var over 0", lambda x: x.var(0)), ("std over 1", lambda x: x.std(1)),
    ("var_mean", lambda x: torch.var_mean(x, 1)[1]),
    ("norm", lambda x: torch.linalg.vector_norm(x)), ("norm over 1", lambda x: torch.linalg.vector_norm(x, dim=1)),
    ("norm of order 1", lambda x: torch.linalg.vector_norm(x, 1)),
    ("norm of order 0", lambda x: torch.linalg.vector_norm(x, 0, dim=0)),
    ("norm of order 3", lambda x: torch.linalg.vector_norm(x, 3, dim=0)),
    ("logsumexp over 0", lambda x: x.logsumexp(0)), ("logsumexp over 1", lambda x: x.logsumexp(1)),
    ("softmax over 0", lambda x: F.softmax(x, 0)), ("softmax over 1", lambda x: F.softmax(x, 1)),
    ("log_softmax over 0", lambda x: F.log_softmax(x, 0)), ("log_softmax over 1", lambda x: F.log_softmax(x, 1)),
    ("layer_norm", lambda x: F.layer_norm(x, (x.shape[1],))), ("rms_norm", lambda x: F.rms_norm(x, (x.shape[1],))),
    # along a dimension
    ("cumsum over 0", lambda x: x.cumsum(0)), ("cumsum over 1", lambda x: x.cumsum(1)),
    ("logcumsumexp", lambda x: x.logcumsumexp(1)), ("median", lambda x: _apart(x).median()),
    ("median over 1", lambda x: _apart(x).median(1).values), ("kthvalue", lambda x: _apart(x).kthvalue(2, 1).values),
    ("sort over 1", lambda x: _apart(x).sort(1, descending=True).values),
    ("order of columns", lambda x: x.sort(dim=0, stable=True).indices),
    ("topk over 0", lambda x: _apart(x).topk(2, 0).values), ("topk over 1", lambda x: _apart(x).topk(2, 1).values),
    ("cross", lambda x: torch.linalg.cross(x[:, :3], x[:, 1:4], dim=1)),
    ("max_pool2d", lambda x: F.max_pool2d(_apart(x)[None, None], 2)),
    ("interpolate", lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="nearest")),
    # places
    ("gather", lambda x: x.gather(1, _beside(x, torch.arange(2 * x.shape[0]).view(-1, 2) % x.shape[1]))),
    ("scatter", lambda x: x.scatter(1, _beside(x, torch.zeros(x.shape[0], 1, dtype=torch.int64)), 7.0)),
    ("scatter_add", lambda x: x.scatter_add(
        0, _beside(x, torch.zeros(2, x.shape[1], dtype=torch.int64)), _beside(x, torch.ones(2, x.shape[1])))),
    ("index_select of rows", lambda x: x.index_select(0, _beside(x, [2, 0, 0]))),
    ("index_select of columns", lambda x: x.index_select(1, _beside(x, [3, 1, 1]))),
    ("rows by a list", lambda x: x[_beside(x, [2, 0, 1, 1])]),
    ("columns by a list", lambda x: x[:, _beside(x, [4, 0])]),
    ("index_put", lambda x: x.index_put((_beside(x, [1, 2]),), _beside(x, 9.0))),
    ("index_add", lambda x: x.index_add(0, _beside(x, [0, 2]), _beside(x, torch.ones(2, x.shape[1])))),
    ("index_fill", lambda x: x.index_fill(1, _beside(x, [0, 2]), 5.0)),
    ("embedding", lambda x: F.embedding(_beside(x, [0, 2, 1]), x)),
    ("slice of 0", lambda x: x[1:4]), ("slice of 1", lambda x: x[:, 2:]), ("every second row", lambda x: x[::2]),
    ("every second column", lambda x: x[:, ::2]), ("select", lambda x: x[:, 1]), ("last row", lambda x: x[-1]),
    ("tensor_split", lambda x: x.tensor_split(3, 1)[2]), ("pad", lambda x: F.pad(x, (1, 2))),
    ("pad of rows", lambda x: F.pad(x, (0, 0, 1, 1), value=2.0)), ("roll", lambda x: x.roll(1, 1)),
    ("roll of rows", lambda x: x.roll(2, 0)), ("flip", lambda x: x.flip(1)), ("flip of rows", lambda x: x.flip(0)),
    ("tril", lambda x: x.tril()), ("triu", lambda x: x.triu(1)), ("diagonal", lambda x: x.diagonal()),
    ("diag_embed", lambda x: x.diag_embed()),
    # shapes
    ("t", lambda x: x.t()), ("contiguous", lambda x: x.t().contiguous()), ("transpose", lambda x: x.transpose(-1, -2)),
    ("permute", lambda x: x.unsqueeze(1).permute(2, 0, 1)), ("movedim", lambda x: x.unsqueeze(0).movedim(2, 0)),
    ("unsqueeze", lambda x: x.unsqueeze(1)), ("squeeze", lambda x: (2 * x.unsqueeze(1)).squeeze(1)),
    ("view of columns", lambda x: x.view(x.shape[0], -1, 1)), ("view", lambda x: x.view(1, *x.shape)),
    ("unflatten", lambda x: x.repeat(1, 2).unflatten(1, (2, -1))), ("repeat", lambda x: x.repeat(2, 3)),
    ("expand", lambda x: x.unsqueeze(0).expand(2, -1, -1)), ("expand of a row", lambda x: x[:1].expand(3, -1)),
    ("cat over 0", lambda x: torch.cat([x, 2 * x])), ("cat over 1", lambda x: torch.cat([x, 2 * x], 1)),
    ("cat with a row", lambda x: torch.cat([x, x[:1]])), ("stack", lambda x: torch.stack([x, -x])),
    ("stack over 1", lambda x: torch.stack([x, x], 1)), ("einsum", lambda x: torch.einsum("ij->ji", x)),
)  # fmt: skip
OF_ALIKE: tuple[tuple[str, _Binary], ...] = (
    ("add", lambda x, y: x + y), ("sub", lambda x, y: x - 2 * y), ("mul", lambda x, y: x * y),
    ("div", lambda x, y: x / (y * y + 1)), ("add in place", lambda x, y: x.clone().add_(y, alpha=2)),
    ("div in place", lambda x, y: x.clone().div_(y * y + 1)),
    ("maximum", lambda x, y: torch.maximum(x, y)), ("where", lambda x, y: torch.where(x > y, x, 3 * y)),
    ("copy", lambda x, y: x.clone().copy_(y)), ("comparison", lambda x, y: (x >= y).float() * x),
    ("eq", lambda x, y: x == y),
    ("logical_and", lambda x, y: torch.logical_and(x, y)), ("masked_fill", lambda x, y: x.masked_fill(y > 0, 1.0)),
    ("addcdiv", lambda x, y: torch.addcdiv(x, y, y * y + 1, value=2)), ("lerp", lambda x, y: torch.lerp(x, y, 0.25)),
    ("foreach add", lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2)[0]),
    ("add of a row", lambda x, y: x + y[:1]), ("mul of a column", lambda x, y: x * y[:, :1]),
    ("matmul with the transpose", lambda x, y: x @ y.t()), ("matmul of the transpose", lambda x, y: x.t() @ y),
    ("linear", lambda x, y: F.linear(x, y)), ("linear with a bias", lambda x, y: F.linear(x, y, y[:, 0])),
    ("addmm", lambda x, y: torch.addmm(x @ y.t(), x, y.t(), beta=2, alpha=3)),
    ("bmm", lambda x, y: torch.bmm(x[None], y.t()[None])),
    ("baddbmm", lambda x, y: torch.baddbmm(x @ y.t(), x[None], y.t()[None])),
    ("matrix and vector", lambda x, y: x @ y[0]),
    ("dot", lambda x, y: torch.dot(x[:, 0], y[:, 0])), ("outer", lambda x, y: torch.outer(x[:, 0], y[0])),
    ("tensordot", lambda x, y: torch.tensordot(x, y, ([1], [1]))), ("cat", lambda x, y: torch.cat([x, y])),
    ("cat of columns", lambda x, y: torch.cat([x, y], 1)), ("stack", lambda x, y: torch.stack([x, y], 1)),
    ("layer_norm with a weight", lambda x, y: F.layer_norm(x, (x.shape[1],), y[0], y[1])),
    ("gather", lambda x, y: x.gather(1, (y.detach() > 0).to(torch.int64))),
    ("sum of squared errors", lambda x, y: F.mse_loss(x, y, reduction="sum")),
    ("squared errors", lambda x, y: F.mse_loss(x, y, reduction="none")),
)  # fmt: skip
"""Functions of two matrices of the same shape."""

_SINCE = {
    "2.12": (
        "glu", "nansum", "aminmax", "max over 0", "min over 1", "var_mean", "cumsum over 0",
        "cumsum over 1", "logcumsumexp", "median", "median over 1", "kthvalue", "sort over 1", "topk over 0",
        "topk over 1", "cross", "max_pool2d", "index_select of rows", "index_select of columns", "columns by a list",
        "index_add", "index_fill", "pad of rows", "roll", "roll of rows", "flip", "flip of rows", "diagonal",
        "add in place", "copy", "layer_norm with a weight",
    ),
    "2.13": ("interpolate",),
}  # fmt: skip
"""Version of torch -> rows that older versions refuse for some placements, in the forward or the backward pass.

A partial weight of `layer_norm` is not refused: its gradients are wrong.
"""


def lacks(name: str) -> bool:
    """Return whether this version of torch refuses a row for at least one placement, or has wrong gradients."""
    here = TorchVersion(torch_version())
    return any(here < since and name in names for since, names in _SINCE.items())
