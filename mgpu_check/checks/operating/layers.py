"""Layers of networks, their losses and their gradients, in each floating dtype, against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from mgpu_check.checks.operating.agreement import Case, Function
from mgpu_check.checks.operating.optimizing import optimizer_cases
from mgpu_check.checks.operating.values import FLOATS, significands, small, whole
from mgpu_check.torch_hooks.tensors import name_of

__all__ = ["layer_cases"]

_ROWS, _COLUMNS = 12, 16


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return indices of rows, each twice and in no order."""
    return torch.arange(2 * _ROWS, device=x.device) * 5 % _ROWS


def _weighed_loss(x: torch.Tensor) -> torch.Tensor:
    """Work out a loss with classes of unequal weight, targets that do not count, and smoothed labels."""
    targets = torch.arange(_ROWS, device=x.device) % 5
    return F.cross_entropy(x, targets, x[0].detach().abs() + 0.5, ignore_index=2, label_smoothing=0.25)


def _attention(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attend from all but the last query to all keys."""
    queries, keys, values = x.unbind()
    count = max(1, queries.shape[-2] - 1)
    return F.scaled_dot_product_attention(queries[..., :count, :], keys, values, **options)


def _masks(x: torch.Tensor) -> torch.Tensor:
    """Return a mask for each of two samples: one key for the first, the other for the second."""
    return torch.eye(2, dtype=torch.bool, device=x.device).view(2, 1, 1, 2)


def _convolved(image: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Convolve with taps and a bias of `x`; with strides of 2 cuDNN has no algorithms that round otherwise."""
    return F.conv2d(image, x.view(-1)[:72].view(2, 4, 3, 3), x[0, :2], stride=2, padding=1)


_OF_ONE: tuple[tuple[str, Function], ...] = (
    ("softmax", lambda x: F.softmax(x, dim=1)),
    ("log_softmax", lambda x: F.log_softmax(x, dim=1)),
    ("sigmoid", lambda x: torch.sigmoid(x)),
    ("tanh", lambda x: torch.tanh(x)),
    ("exp", lambda x: torch.exp(x)),
    ("log", lambda x: torch.log(x.abs() + 1)),
    ("gelu", lambda x: F.gelu(x)),
    ("silu", lambda x: F.silu(x)),
    ("softplus", lambda x: F.softplus(x)),
    ("elu", lambda x: F.elu(x)),
    ("leaky_relu", lambda x: F.leaky_relu(x)),
    ("layer_norm", lambda x: F.layer_norm(x, (_COLUMNS,), x[0], x[1])),
    ("layer_norm of many rows", lambda x: F.layer_norm(x.view(-1, 4), (4,), x[0, :4], x[1, :4])),
    ("group_norm", lambda x: F.group_norm(x.view(3, 4, -1), 2)),
    ("group_norm with a weight and a bias", lambda x: F.group_norm(x.view(3, 4, -1), 2, x[0, :4], x[1, :4])),
    ("batch_norm", lambda x: F.batch_norm(x, None, None, training=True)),
    ("batch_norm of an evaluation", lambda x: F.batch_norm(x, x[0].detach(), x[1].detach().abs() + 0.5)),
    ("rms_norm", lambda x: F.rms_norm(x, (_COLUMNS,))),
    ("var", lambda x: torch.var(x, dim=1)),
    ("std", lambda x: x.std(dim=0)),
    ("var without correction", lambda x: torch.var(x, dim=1, correction=0)),
    ("std with a correction of 2", lambda x: x.std(dim=0, correction=2)),
    ("norm 2", lambda x: torch.linalg.vector_norm(x, dim=1)),
    ("logsumexp", lambda x: torch.logsumexp(x, dim=1)),
    ("normalize", lambda x: F.normalize(x, dim=1)),
    ("attention", lambda x: F.scaled_dot_product_attention(*x.view(3, 1, 4, _COLUMNS).unbind())),
    ("causal attention to more keys", lambda x: _attention(x.view(3, 1, 4, _COLUMNS), is_causal=True)),
    ("attention with a mask for each", lambda x: _attention(x.view(3, 2, 1, 2, _COLUMNS), attn_mask=_masks(x))),
    ("linear of many features", lambda x: F.linear(x.view(-1, 1)[:5], x.view(-1, 1), x.view(-1))),
    ("conv2d", lambda x: _convolved(x.view(3, 4, 4, 4), x)),
    ("conv2d channels_last", lambda x: _convolved(x.view(3, 4, 4, 4).contiguous(memory_format=torch.channels_last), x)),
    ("index with many that are equal", lambda x: x[torch.arange(4 * _ROWS, device=x.device) * 5 % _ROWS]),
    ("max_pool2d", lambda x: F.max_pool2d(x.view(3, 4, 4, 4), 2)),
    ("avg_pool2d", lambda x: F.avg_pool2d(x.view(3, 4, 4, 4), 3, 1)),
    ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x.view(3, 4, 4, 4), 1)),
    ("interpolate", lambda x: F.interpolate(x.view(3, 4, 4, 4), scale_factor=2, mode="nearest")),
    ("mse_loss", lambda x: F.mse_loss(x, x.flip(0))),
    ("l1_loss", lambda x: F.l1_loss(x, x.flip(0))),
    ("smooth_l1_loss", lambda x: F.smooth_l1_loss(x, x.flip(0))),
    ("binary_cross_entropy_with_logits", lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype))),
    ("cross_entropy", lambda x: F.cross_entropy(x, torch.arange(_ROWS, device=x.device))),
    ("cross_entropy with all its options", _weighed_loss),
    ("embedding with padding", lambda x: F.embedding(_words(x), x, padding_idx=5)),
    ("nll_loss", lambda x: F.nll_loss(-x.abs(), torch.arange(_ROWS, device=x.device), reduction="sum")),
    ("dropout of an evaluation", lambda x: F.dropout(x, 0.5, training=False)),
)
"""Functions of a matrix, whose numbers are in (-2, 2)."""


def layer_cases(seed: int = 0) -> Iterator[Case]:
    """Yield each function in each dtype, forward; in float32 and float64 the gradients of each, those of a small network, and steps of optimizers."""
    yield from optimizer_cases(seed)
    for dtype in FLOATS:
        x = small((_ROWS, _COLUMNS), dtype, seed)
        for name, call in _OF_ONE:
            yield Case(f"{name} of {name_of(dtype)}", call, (x,), "close")
            if dtype in FLOATS[:2]:
                yield Case(f"gradient of {name} of {name_of(dtype)}", _gradient(call), (x,), "close")
        weights = small((_COLUMNS, _COLUMNS), dtype, seed + 1), small((_COLUMNS, 3), dtype, seed + 2)
        yield Case(f"gradients of a network of {name_of(dtype)}", _network, (x, *weights), "close")
        yield from _exact_gradients(dtype, seed)


def _gradient(call: Function) -> Function:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        result = call(leaf)
        # Weights that differ, so that no gradient vanishes because those of a row add up to nothing.
        weights = torch.arange(result.numel(), device=x.device).view(result.shape) % 5
        (result * weights.to(x.dtype) + result * result).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    return gradient


def _network(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
    """Train a step: the loss, its gradients, and the parameters after it."""
    leaves = [first.detach().clone().requires_grad_(), second.detach().clone().requires_grad_()]
    loss = F.mse_loss(torch.tanh(x @ leaves[0] / 8) @ leaves[1] / 4, x[:, :3])
    gradients = list(torch.autograd.grad(loss, leaves))
    return [
        loss.detach(),
        *gradients,
        *((leaf - 0.5 * one).detach() for leaf, one in zip(leaves, gradients, strict=True)),
    ]


def _exact_gradients(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield gradients of moves and of products of whole numbers, which are exact."""

    def product(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(F.linear(*leaves), leaves, g)

    def taken(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        index = torch.arange(_ROWS, device=x.device) * 5 % _ROWS
        return torch.autograd.grad(torch.cat([leaf[index], leaf.t().contiguous().t()], dim=1), leaf, g)[0]

    kind = name_of(dtype)
    operands = [whole(shape, dtype, seed + i) for i, shape in enumerate([(_ROWS, 8), (5, 8), (_ROWS, 5)])]
    yield Case(f"gradients of a product of {kind}", product, tuple(operands), "numbers")
    sharp = significands((_ROWS, 8), dtype, seed), significands((_ROWS, 16), dtype, seed + 1)
    yield Case(f"gradient of moves of {kind}", taken, sharp, "numbers")
