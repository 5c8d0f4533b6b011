"""List options of operators that torch's own samples lack, or that few of their samples have."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.agreement import Function

__all__ = ["OPTIONS"]


def _square(x: torch.Tensor) -> torch.Tensor:
    """Return a symmetric, well-conditioned matrix."""
    part = x[:4, :4]
    return part @ part.T + 4 * torch.eye(4, dtype=x.dtype, device=x.device)


OPTIONS: tuple[tuple[str, Function], ...] = (
    ("adaptive_max_pool1d with indices", lambda x: F.adaptive_max_pool1d(x[None], 5, return_indices=True)),
    ("adaptive_max_pool2d with indices", lambda x: F.adaptive_max_pool2d(x[None], 3, return_indices=True)),
    ("adaptive_max_pool3d with indices", lambda x: F.adaptive_max_pool3d(x.view(1, 12, 4, 4), 2, return_indices=True)),
    ("affine_grid", lambda x: F.affine_grid(x.reshape(-1)[:12].view(2, 2, 3), [2, 1, 3, 4], align_corners=True)),
    ("chain_matmul", lambda x: torch.chain_matmul(x, x.T, x)),
    ("conv_tbc", lambda x: torch.conv_tbc(x.view(6, 4, 8), x.reshape(-1)[:48].view(3, 8, 2), x[0, :2], 1)),
    ("diag_embed below the diagonal", lambda x: torch.diag_embed(x, offset=-1)),
    ("elu alpha=", lambda x: F.elu(x, 0.5)),
    ("leaky_relu negative_slope=", lambda x: F.leaky_relu(x, 0.25)),
    ("fill_diagonal_", lambda x: (x * 1).fill_diagonal_(0.5, wrap=True)),
    ("flatten end_dim=", lambda x: x.view(3, 4, 4, 4).flatten(0, 2)),
    ("fold with gaps", lambda x: F.fold(x.view(3, 4, 16)[:, :, :9], (3, 3), 2, dilation=2, padding=1)),
    ("isin inverted", lambda x: torch.isin(x, x[0], invert=True)),
    # The annotations of torch lack the weights of losses.
    ("huber_loss weight=", lambda x: F.huber_loss(x, x.flip(0), weight=x.abs())),  # type: ignore[call-arg]
    ("l1_loss weight=", lambda x: F.l1_loss(x, x.flip(0), weight=x.abs())),  # type: ignore[call-arg]
    ("mse_loss weight=", lambda x: F.mse_loss(x, x.flip(0), weight=x.abs())),  # type: ignore[call-arg]
    ("instance_norm of an evaluation",
     lambda x: F.instance_norm(x.view(3, 4, 16), x[0, :4], x[1, :4].abs() + 1, use_input_stats=False)),
    ("interpolate, antialias",
     lambda x: F.interpolate(x.view(3, 4, 4, 4), size=(2, 3), mode="bilinear", antialias=True)),
    ("cholesky_ex checked", lambda x: torch.linalg.cholesky_ex(_square(x), check_errors=True).L),
    ("inv_ex checked", lambda x: torch.linalg.inv_ex(_square(x), check_errors=True).inverse),
    ("solve_ex checked", lambda x: torch.linalg.solve_ex(_square(x), x[:4], check_errors=True).result),
    ("solve from the right", lambda x: torch.linalg.solve(_square(x), x[:, :4], left=False)),
    ("solve_ex from the right", lambda x: torch.linalg.solve_ex(_square(x), x[:, :4], left=False).result),
    ("lu_factor_ex checked", lambda x: torch.linalg.lu_factor_ex(_square(x), check_errors=True).LU),
    ("lu_solve adjoint", lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(_square(x)), x[:4], adjoint=False)),
    ("matrix_norm dtype=", lambda x: torch.linalg.matrix_norm(x, dtype=torch.float64)),
    ("linalg.norm dtype=", lambda x: torch.linalg.norm(x, dtype=torch.float64)),
    ("norm dtype=", lambda x: torch.norm(x, dtype=torch.float64)),
    ("nanmean dtype=", lambda x: torch.nanmean(x, 1, dtype=torch.float64)),
    ("cond 1", lambda x: torch.linalg.cond(_square(x), 1)),
    ("pinv rcond=", lambda x: torch.linalg.pinv(_square(x), rcond=1e-4)),
    ("pinverse rcond=", lambda x: torch.pinverse(_square(x), rcond=1e-4)),
    ("qr", lambda x: torch.linalg.qr(x[:, :4], mode="complete").R.abs()),
    ("lp_pool1d", lambda x: F.lp_pool1d(x[None], 2, 3)),
    ("lp_pool2d", lambda x: F.lp_pool2d(x[None], 2, 3)),
    ("lp_pool3d", lambda x: F.lp_pool3d(x.view(1, 12, 4, 4), 2, 2)),
    ("max_pool1d with indices", lambda x: F.max_pool1d(x[None], 3, 2, 1, 2, return_indices=True)),
    ("max_pool2d with indices", lambda x: F.max_pool2d(x[None], 3, return_indices=True)),
    ("max_pool3d with indices", lambda x: F.max_pool3d(x.view(1, 12, 4, 4), 2, return_indices=True)),
    ("multilabel_soft_margin_loss, sums", lambda x: F.multilabel_soft_margin_loss(x, (x > 0).to(x), reduction="sum")),
    ("triplet_margin_loss p=", lambda x: F.triplet_margin_loss(x, x.flip(0), x.roll(1, 0), p=1.5, eps=1e-3)),
    ("norm_except_dim", lambda x: torch.norm_except_dim(x, 2, 1)),
    ("frobenius_norm", lambda x: torch.frobenius_norm(x, [0, 1])),
    ("nuclear_norm", lambda x: torch.nuclear_norm(_square(x))),
    ("resize_as_", lambda x: torch.empty(0, dtype=x.dtype, device=x.device).resize_as_(x).copy_(x)),
    ("rnn_tanh_cell", lambda x: torch.rnn_tanh_cell(x, x[:, :4], x[:4], x[:4, :4], x[0, :4], x[1, :4])),
    ("rnn_relu_cell", lambda x: torch.rnn_relu_cell(x, x[:, :4], x[:4], x[:4, :4], x[0, :4], x[1, :4])),
    ("gru_cell", lambda x: torch.gru_cell(x, x[:, :4], x, x[:, :4], x[:, 0], x[:, 1])),
    ("lstm_cell", lambda x: torch.lstm_cell(x, (x[:, :3], x[:, 3:6]), x, x[:, :3], x[:, 0], x[:, 1])),
    ("slogdet", lambda x: torch.slogdet(_square(x)).logabsdet),
    ("unsafe_split_with_sizes", lambda x: torch.unsafe_split_with_sizes(x, [5, 7])),
    ("svd without vectors", lambda x: torch.svd(x, compute_uv=False).S),
    ("triangular_solve", lambda x: torch.triangular_solve(x[:4], _square(x), upper=False, transpose=True,
     unitriangular=False).solution),
)  # fmt: skip
"""Functions of one matrix of 12 rows and 16 columns with elements in (-2, 2)."""
