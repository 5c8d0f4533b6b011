"""List options of operators that torch's own samples lack, or that few of their samples have."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.suite.common.operators import Function
from mgpu_check.suite.common.values import shaped
from mgpu_check.suite.devices.operators.sequences import attention, with_weights

_LAST = torch.channels_last


def takes(owner: Any, name: str, option: str) -> bool:
    """Return whether the installed torch has a function `name` with this option: older versions lack some."""
    function = getattr(owner, name, None)
    return function is not None and option in inspect.signature(function).parameters


def _square(x: torch.Tensor) -> torch.Tensor:
    """Return a symmetric, well-conditioned matrix."""
    part = x[:4, :4]
    return part @ part.T + 4 * torch.eye(4, dtype=x.dtype, device=x.device)


def _images(x: torch.Tensor) -> torch.Tensor:
    return x.view(3, 4, 4, 4)


def _numbers(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return the whole numbers from 0 on."""
    return torch.arange(torch.Size(shape).numel(), device=x.device).view(shape)


def _laid(made: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Return elements and strides on the device of `x`."""
    return [made.to(x.device), torch.tensor(made.stride(), device=x.device)]


def _spectrum(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.stft(x.reshape(-1), 16, window=_window(x), return_complex=True, **options)


def _window(x: torch.Tensor) -> torch.Tensor:
    return torch.hann_window(16, dtype=x.dtype, device=x.device)


def _heads(x: torch.Tensor, whole: bool = True, **options: Any) -> torch.Tensor:
    """Attend in two heads of two features: three steps of four samples."""
    steps, more = shaped(x, 3, 4, 4), x.flip(0)
    heads: torch.Tensor = F.multi_head_attention_forward(
        *(steps, steps, steps), 4, 2, shaped(more, 12, 4) if whole else None, shaped(more, 12), None, None, False, 0.0,
        shaped(more, 4, 4), shaped(more, 4), need_weights=False, **options
    )[0]  # fmt: skip
    return heads


def _attended(x: torch.Tensor) -> list[torch.Tensor]:
    """Return attention with a mask, with padding and weights apart, and with keys and values that are given."""
    later, padded = _numbers(x, 3, 1) < _numbers(x, 3), _numbers(x, 4, 3) % 5 == 4
    apart = {f"{part}_proj_weight": shaped(x.roll(turn, 0), 4, 4) for turn, part in enumerate("qkv")}
    return [
        _heads(x, attn_mask=later, is_causal=True, training=True),
        _heads(x, whole=False, key_padding_mask=padded, use_separate_proj_weight=True, training=False, **apart),
        _heads(x, static_k=shaped(x, 8, 3, 2), static_v=shaped(x.flip(1), 8, 3, 2), training=False),
    ]


def _ctc_loss(x: torch.Tensor) -> torch.Tensor:
    """Return the loss of two samples of six steps, whose last class is the blank."""
    steps, targets = x.view(6, 2, 16).log_softmax(2), _numbers(x, 2, 3) + 1
    return F.ctc_loss(steps, targets, 6 - _numbers(x, 2), 3 - _numbers(x, 2), blank=15)


def _solved(x: torch.Tensor) -> torch.Tensor:
    factors, pivots, _ = torch.linalg.ldl_factor_ex(_square(x), check_errors=True)
    solution: torch.Tensor = torch.linalg.ldl_solve(factors, pivots, x[:4])
    return solution


def _unpacked(x: torch.Tensor) -> list[torch.Tensor]:
    factors, pivots = torch.linalg.lu_factor(_square(x))
    _, lower, upper = torch.lu_unpack(factors, pivots, unpack_pivots=False)
    return [torch.lu_unpack(factors, pivots, unpack_data=False)[0], lower, upper]


def _multiplied(x: torch.Tensor) -> torch.Tensor:
    """Return the product of the factors of a matrix: the matrix."""
    reflectors, factors = torch.geqrf(_square(x))
    return torch.ormqr(reflectors, factors, reflectors.triu(), left=True)


def _weighted(loss: str) -> Function:
    """Return the call of a loss with weights, which the annotations of torch lack."""
    return lambda x: getattr(F, loss)(x, x.flip(0), weight=x.abs())


_LATER: tuple[tuple[Any, str, str, Function], ...] = (
    *((F, name, "weight", _weighted(name)) for name in ("huber_loss", "l1_loss", "mse_loss")),
    (F, "linear_cross_entropy", "label_smoothing", lambda x: F.linear_cross_entropy(
        x, x[:5], _numbers(x, 12) % 5, linear_bias=x[5, :5], ignore_index=2, label_smoothing=0.25)),
    (F, "lp_pool3d", "stride", lambda x: F.lp_pool3d(x.view(1, 12, 4, 4), 2, 2, 3, True)),
    (torch, "stft", "align_to_window", lambda x: _spectrum(x, center=False, align_to_window=True)),
)  # fmt: skip
"""Functions and options that the oldest version of torch lacks: owner, function, option, call."""

OPTIONS: tuple[tuple[str, Function], ...] = (
    ("adaptive_max_pool1d with indices", lambda x: F.adaptive_max_pool1d(x[None], 5, return_indices=True)),
    ("adaptive_max_pool2d with indices", lambda x: F.adaptive_max_pool2d(x[None], 3, return_indices=True)),
    ("adaptive_max_pool3d with indices", lambda x: F.adaptive_max_pool3d(x.view(1, 12, 4, 4), 2, return_indices=True)),
    ("affine_grid", lambda x: F.affine_grid(x.reshape(-1)[:12].view(2, 2, 3), [2, 1, 3, 4], align_corners=True)),
    ("affine_grid_generator",
     lambda x: torch.affine_grid_generator(x.reshape(-1)[:12].view(2, 2, 3), [2, 1, 3, 4], True)),
    ("allclose with NaN", lambda x: _numbers(x, 2) * torch.allclose(x[x < 0].sqrt(), x[x < 0].log(), equal_nan=True)),
    ("as_strided from an offset", lambda x: x.as_strided((3, 4), (2, 5), 7)),
    ("chain_matmul", lambda x: torch.chain_matmul(x, x.T, x)),
    ("conv_tbc", lambda x: torch.conv_tbc(x.view(6, 4, 8), x.reshape(-1)[:48].view(3, 8, 2), x[0, :2], 1)),
    ("convolution in groups", lambda x: torch.convolution(
        _images(x), shaped(x, 2, 2, 3, 3), x[0, :2], [2, 2], [1, 1], [1, 1], False, [0, 0], 2)),
    ("cpu memory_format=", lambda x: _laid(_images(x).cpu(memory_format=_LAST), x)),
    ("ctc_loss blank=", _ctc_loss),
    ("diag_embed below and above the diagonal", lambda x: [torch.diag_embed(x, offset=-1), torch.diag_embed(x, 2)]),
    ("elu alpha=", lambda x: F.elu(x, 0.5)),
    ("leaky_relu negative_slope=", lambda x: F.leaky_relu(x, 0.25)),
    ("fill_diagonal_", lambda x: (x * 1).fill_diagonal_(0.5, wrap=True)),
    ("flatten end_dim=", lambda x: x.view(3, 4, 4, 4).flatten(0, 2)),
    ("fold with gaps", lambda x: F.fold(x.view(3, 4, 16)[:, :, :9], (3, 3), 2, dilation=2, padding=1)),
    ("grid_sampler", lambda x: torch.grid_sampler(_images(x), shaped(x / 2, 3, 2, 3, 2), 0, 1, True)),
    ("group_norm without cuDNN", lambda x: torch.group_norm(_images(x), 2, x[0, :4], x[1, :4], 1e-3, False)),
    ("layer_norm without cuDNN", lambda x: torch.layer_norm(x, (16,), x[0], x[1], 1e-3, False)),
    ("histc bins=", lambda x: torch.histc(x, 16, -2, 2)),
    ("isin inverted", lambda x: torch.isin(x, x[0], invert=True)),
    ("isin of unequal numbers", lambda x: torch.isin(_numbers(x, 9), 2 * _numbers(x, 9), assume_unique=True)),
    ("instance_norm of an evaluation",
     lambda x: F.instance_norm(x.view(3, 4, 16), x[0, :4], x[1, :4].abs() + 1, use_input_stats=False)),
    ("interpolate, antialias",
     lambda x: F.interpolate(x.view(3, 4, 4, 4), size=(2, 3), mode="bilinear", antialias=True)),
    ("cholesky_ex checked", lambda x: torch.linalg.cholesky_ex(_square(x), check_errors=True).L),
    ("inv_ex checked", lambda x: torch.linalg.inv_ex(_square(x), check_errors=True).inverse),
    ("solve_ex checked", lambda x: torch.linalg.solve_ex(_square(x), x[:4], check_errors=True).result),
    ("solve from the right", lambda x: torch.linalg.solve(_square(x), x[:, :4], left=False)),
    ("solve_ex from the right", lambda x: torch.linalg.solve_ex(_square(x), x[:, :4], left=False).result),
    ("cholesky upper=", lambda x: torch.linalg.cholesky(_square(x), upper=True)),
    ("ldl_factor_ex checked", _solved),
    ("lstsq rcond=", lambda x: [
        torch.linalg.lstsq(_square(x), x[:4], 1e-5).solution, torch.linalg.lstsq(_square(x), x[:4], rcond=1e-5).solution
    ]),
    ("lu_unpack of parts", _unpacked),
    ("matrix_rank tol=", lambda x: torch.linalg.matrix_rank(_square(x), tol=1e-3)),
    ("lu_factor_ex checked", lambda x: torch.linalg.lu_factor_ex(_square(x), check_errors=True).LU),
    ("lu_solve adjoint", lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(_square(x)), x[:4], adjoint=False)),
    ("matrix_norm dtype=", lambda x: torch.linalg.matrix_norm(x, dtype=torch.float64)),
    ("linalg.norm dtype=", lambda x: torch.linalg.norm(x, dtype=torch.float64)),
    ("norm dtype=", lambda x: torch.norm(x, dtype=torch.float64)),
    ("nanmean dtype=", lambda x: torch.nanmean(x, 1, dtype=torch.float64)),
    ("mean and nansum dtype=",
     lambda x: [torch.mean(x, 1, dtype=torch.float64), torch.nansum(x, 1, dtype=torch.float64)]),
    ("cond p=", lambda x: [torch.linalg.cond(_square(x), 1), torch.linalg.cond(_square(x), p="fro")]),
    ("pinv rcond= and atol=",
     lambda x: [torch.linalg.pinv(_square(x), rcond=1e-4), torch.linalg.pinv(_square(x), atol=1e-4)]),
    ("pinverse rcond=", lambda x: torch.pinverse(_square(x), rcond=1e-4)),
    ("qr", lambda x: torch.linalg.qr(x[:, :4], mode="complete").R.abs()),
    ("qr some=", lambda x: torch.qr(x[:, :4], some=False).R.abs()),
    ("lp_pool1d", lambda x: F.lp_pool1d(x[None], 2, 3, 2, True)),
    ("lp_pool2d", lambda x: F.lp_pool2d(x[None], 2, 3, 2, True)),
    ("max and min keepdim=", lambda x: [torch.max(x, dim=1, keepdim=True)[0], torch.min(x, dim=0, keepdim=True)[0]]),
    ("max_pool1d", lambda x: F.max_pool1d(x[None], 3, 2, 1, 2)),
    ("max_pool1d with indices", lambda x: F.max_pool1d(x[None], 3, 2, 1, 2, return_indices=True)),
    ("max_pool2d with indices", lambda x: F.max_pool2d(x[None], 3, return_indices=True)),
    ("max_pool3d with indices", lambda x: F.max_pool3d(x.view(1, 12, 4, 4), 2, return_indices=True)),
    ("multilabel_soft_margin_loss, sums", lambda x: F.multilabel_soft_margin_loss(x, (x > 0).to(x), reduction="sum")),
    ("triplet_margin_loss p=", lambda x: F.triplet_margin_loss(x, x.flip(0), x.roll(1, 0), p=1.5, eps=1e-3)),
    ("nonzero_static fill_value=", lambda x: torch.nonzero_static(x > 0, size=200, fill_value=7)),
    ("norm_except_dim", lambda x: torch.norm_except_dim(x, 1, 1)),
    ("frobenius_norm", lambda x: torch.frobenius_norm(x, [0, 1], keepdim=True)),
    ("nuclear_norm", lambda x: [
        torch.nuclear_norm(_square(x)), torch.nuclear_norm(x, (0, 1)), torch.nuclear_norm(x, dim=(0, 1), keepdim=True)
    ]),
    ("ones_like memory_format=", lambda x: _laid(torch.ones_like(_images(x), memory_format=_LAST), x)),
    ("ormqr left=", _multiplied),
    ("resize_ memory_format=",
     lambda x: _laid(x.new_empty(0).resize_((3, 4, 4, 4), memory_format=_LAST).copy_(_images(x)), x)),
    ("resize_as_ memory_format=",
     lambda x: _laid(x.new_empty(0).resize_as_(_images(x), memory_format=_LAST).copy_(_images(x)), x)),
    ("RNN nonlinearity=", with_weights(nn.RNN, 4, 4, nonlinearity="relu", batch_first=True)),
    ("rnn_tanh_cell", lambda x: torch.rnn_tanh_cell(x, x[:, :4], x[:4], x[:4, :4], x[0, :4], x[1, :4])),
    ("rnn_relu_cell", lambda x: torch.rnn_relu_cell(x, x[:, :4], x[:4], x[:4, :4], x[0, :4], x[1, :4])),
    ("gru_cell", lambda x: torch.gru_cell(x, x[:, :4], x, x[:, :4], x[:, 0], x[:, 1])),
    ("lstm_cell", lambda x: torch.lstm_cell(x, (x[:, :3], x[:, 3:6]), x, x[:, :3], x[:, 0], x[:, 1])),
    ("slogdet", lambda x: torch.slogdet(_square(x)).logabsdet),
    ("attention scale=", lambda x: attention(x.view(3, 1, 4, 16), scale=0.5)),
    ("multi_head_attention_forward", _attended),
    ("embedding_bag include_last_offset=", lambda x: F.embedding_bag(
        _numbers(x, 12), x, torch.tensor([0, 5, 12], device=x.device), include_last_offset=True)),
    ("scatter value=", lambda x: x.scatter(0, _numbers(x, 3, 4), value=0.5)),
    ("segment_reduce axis=",
     lambda x: torch.segment_reduce(x, "sum", lengths=torch.full((12, 2), 8, device=x.device), axis=1)),
    ("istft", lambda x: torch.istft(
        _spectrum(x, normalized=True), 16, window=_window(x), normalized=True, length=x.numel())),
    ("topk sorted=", lambda x: torch.topk(x, 5, sorted=False).values.sort().values),
    ("unsafe_split_with_sizes", lambda x: torch.unsafe_split_with_sizes(x, [7, 9], 1)),
    ("svd without vectors", lambda x: torch.svd(x, compute_uv=False).S),
    ("triangular_solve", lambda x: torch.triangular_solve(x[:4], _square(x) / 8, upper=False, transpose=True,
     unitriangular=True).solution),
    *((f"{name} {option}=", call) for owner, name, option, call in _LATER if takes(owner, name, option)),
)  # fmt: skip
"""Functions of one matrix of 12 rows and 16 columns with elements in (-2, 2)."""
