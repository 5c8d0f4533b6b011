"""Yield cases of layers, losses and gradients in each floating dtype; the reference is float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.agreement import Case
from mgpu_check.suite.common.operators import Function
from mgpu_check.suite.common.values import FLOATS, significands, small, whole
from mgpu_check.suite.devices.operators.optimizing import optimizer_cases
from mgpu_check.suite.devices.operators.options import OPTIONS
from mgpu_check.suite.devices.operators.sequences import RECURRENT, SEQUENCES
from mgpu_check.suite.devices.operators.spatial import SPATIAL
from mgpu_check.torch_hooks.tensors import name_of

_ROWS, _COLUMNS = 12, 16


_LAYERS: tuple[tuple[str, Function], ...] = (
    *SPATIAL,
    *SEQUENCES,
    ("gelu", lambda x: F.gelu(x)),
    ("softmax", lambda x: F.softmax(x, dim=1)),
    ("softmax of a long row", lambda x: F.softmax(x.reshape(1, -1).repeat(1, 3), dim=1)),
    ("softmax of transposed", lambda x: F.softmax(x.t(), dim=1)),
    ("layer_norm", lambda x: F.layer_norm(x, (_COLUMNS,), x[0], x[1])),
    ("layer_norm of many rows", lambda x: F.layer_norm(x.view(-1, 4), (4,), x[0, :4], x[1, :4])),
    ("group_norm", lambda x: F.group_norm(x.view(3, 4, -1), 2)),
    ("group_norm with a weight and a bias", lambda x: F.group_norm(x.view(3, 4, -1), 2, x[0, :4], x[1, :4])),
    ("std", lambda x: x.std(dim=0)),
    ("var without correction", lambda x: torch.var(x, dim=1, correction=0)),
    ("std with a correction of 2", lambda x: x.std(dim=0, correction=2)),
    ("logsumexp of a long row", lambda x: torch.logsumexp(x.reshape(1, -1).repeat(1, 3), dim=1)),
    ("logsumexp of transposed", lambda x: torch.logsumexp(x.t(), dim=1)),
    ("linear of many features", lambda x: F.linear(x.view(-1, 1)[:5], x.view(-1, 1), x.view(-1))),
    ("index with many that are equal", lambda x: x[torch.arange(4 * _ROWS, device=x.device) * 5 % _ROWS]),
)
"""Functions of one matrix with elements in (-2, 2), of sizes or layouts that torch's own samples lack."""


_IN_PLACE: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(["relu", "relu6", "celu", "elu", "hardtanh", "leaky_relu", "mish", "selu", "silu", "rrelu"], ()),
    "threshold": (0.25, -3.0),
}
"""Functions of torch.nn.functional that can replace their operand -> their other arguments."""


def _replaced(name: str) -> Function:
    return lambda x: getattr(F, name)(x * 1, *_IN_PLACE[name], inplace=True)


def layer_cases(seed: int = 0, *, more: bool = True) -> Iterator[Case]:
    """Yield each function in each dtype, gradients of a small network, and steps of optimizers.

    In float32 the gradients of all functions are added, and functions of many steps; with `more` in float64 too.
    """
    yield from optimizer_cases(seed)
    for dtype in FLOATS:
        x = small((_ROWS, _COLUMNS), dtype, seed)
        with_gradients = dtype == torch.float32 or (more and dtype == torch.float64)
        for name, call in (*_LAYERS, *(RECURRENT if with_gradients else ())):
            yield Case(f"{name} of {name_of(dtype)}", call, (x,), "close")
            if with_gradients:
                yield Case(f"gradient of {name} of {name_of(dtype)}", _gradient(call), (x,), "close")
        for name in _IN_PLACE if more else ():
            yield Case(f"{name} in place of {name_of(dtype)}", _replaced(name), (x,), "close")
        for name, call in OPTIONS if more and dtype in (torch.float32, torch.float64) else ():
            yield Case(f"{name} of {name_of(dtype)}", call, (x,), "close")
        weights = small((_COLUMNS, _COLUMNS), dtype, seed + 1), small((_COLUMNS, 3), dtype, seed + 2)
        yield Case(f"gradients of a network of {name_of(dtype)}", _network, (x, *weights), "close")
        yield from _exact_gradients(dtype, seed)


def _gradient(call: Function) -> Function:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        result = call(leaf)
        # Unequal weights: with equal ones the gradients of a row could cancel.
        weights = torch.arange(result.numel(), device=x.device).view(result.shape) % 5
        return torch.autograd.grad(result, leaf, 2 * result.detach() + weights.to(x.dtype))[0]

    return gradient


def _network(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss of one training step, its gradients, and the parameters after it."""
    leaves = [first.detach().clone().requires_grad_(), second.detach().clone().requires_grad_()]
    loss = F.mse_loss(torch.tanh(x @ leaves[0] / 8) @ leaves[1] / 4, x[:, :3])
    gradients = list(torch.autograd.grad(loss, leaves))
    return [
        loss.detach(),
        *gradients,
        *((leaf - 0.5 * one).detach() for leaf, one in zip(leaves, gradients, strict=True)),
    ]


def _exact_gradients(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield gradients that are exact: those of moves, and those of products of whole numbers."""

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
