"""List the losses that `layer_cases` calls in each floating dtype."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.agreement import Function

__all__ = ["LOSSES", "WIDE_LOSSES"]


def _classes(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device) * 5 % x.shape[1]


def _signs(x: torch.Tensor) -> torch.Tensor:
    """Return 1 and -1 in turn, one for each row."""
    return (1 - 2 * (torch.arange(len(x), device=x.device) % 2)).to(x.dtype)


def _weighed_loss(x: torch.Tensor) -> torch.Tensor:
    """Compute a loss with class weights, an ignored target, and smoothed labels."""
    targets = torch.arange(len(x), device=x.device) % 5
    return F.cross_entropy(x, targets, x[0].detach().abs() + 0.5, ignore_index=2, label_smoothing=0.25)


LOSSES: tuple[tuple[str, Function], ...] = (
    ("mse_loss", lambda x: F.mse_loss(x, x.flip(0))),
    ("l1_loss", lambda x: F.l1_loss(x, x.flip(0))),
    ("smooth_l1_loss", lambda x: F.smooth_l1_loss(x, x.flip(0))),
    ("binary_cross_entropy_with_logits", lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype))),
    ("cross_entropy", lambda x: F.cross_entropy(x, _classes(x))),
    ("cross_entropy with all its options", _weighed_loss),
    ("nll_loss", lambda x: F.nll_loss(-x.abs(), _classes(x), reduction="sum")),
    (
        "nll_loss in two dimensions",
        lambda x: F.nll_loss(-x.view(3, 4, 4, 4).abs(), _classes(x).view(3, 4)[:, :, None].expand(3, 4, 4) % 4),
    ),
    ("huber_loss", lambda x: F.huber_loss(x, x.flip(0), delta=0.75)),
    ("kl_div", lambda x: F.kl_div(-x.abs(), x.flip(0).abs() + 0.25, reduction="batchmean")),
    ("binary_cross_entropy", lambda x: F.binary_cross_entropy(x.abs() / 4 + 0.25, (x > 0).to(x.dtype))),
    ("soft_margin_loss", lambda x: F.soft_margin_loss(x, _signs(x)[:, None].expand_as(x))),
    ("hinge_embedding_loss", lambda x: F.hinge_embedding_loss(x, _signs(x)[:, None].expand_as(x), margin=0.75)),
    ("multilabel_soft_margin_loss", lambda x: F.multilabel_soft_margin_loss(x, (x > 0).to(x.dtype))),
    ("margin_ranking_loss", lambda x: F.margin_ranking_loss(x[:, 0], x[:, 1], _signs(x), margin=0.5)),
    ("cosine_embedding_loss", lambda x: F.cosine_embedding_loss(x, x.flip(0), _signs(x))),
    ("triplet_margin_loss", lambda x: F.triplet_margin_loss(x, x.flip(0), x.roll(1, 0), margin=2.0)),
    ("gaussian_nll_loss", lambda x: F.gaussian_nll_loss(x, x.flip(0), x.roll(1, 0).abs() + 0.5)),
    ("poisson_nll_loss", lambda x: F.poisson_nll_loss(x, x.flip(0).abs())),
)
"""Functions of one matrix with elements in (-2, 2)."""

WIDE_LOSSES: tuple[tuple[str, Function], ...] = (
    ("multi_margin_loss", lambda x: F.multi_margin_loss(x, _classes(x), margin=0.75)),
)
"""Losses without kernels for float16 and bfloat16 on some devices."""
