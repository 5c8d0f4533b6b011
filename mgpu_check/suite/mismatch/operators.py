"""Call each operator of `mgpu_check.suite.mismatch.cases` with operands on two devices.

Each entry builds its operands and returns the call that must raise or work. So an error while operands are built is
never taken for the error of the operator. Operands are small whole numbers, so that compared results are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.suite.common.tensors import TensorSpec

__all__ = ["CALLS", "Operands"]

Call = Callable[[], object]
Builder = Callable[["Operands"], Call]

N = -1
"""Placeholder in the shape of an operand for the number of rows of the case."""


@dataclass(frozen=True)
class Operands:
    """Builds the operands of a call: operand 0 on the first device, operand 1 on the second."""

    first: torch.device
    second: torch.device
    rows: int
    seed: int

    def on(self, operand: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
        """Return whole numbers in [-15, 15], on the device of `operand`, 0 or 1; `N` in the shape is `rows`."""
        sizes = tuple(self.rows if size == N else size for size in shape)
        return TensorSpec(sizes, dtype, seed=self.seed + operand, values="exact").build(self._device(operand))

    def index(self, operand: int, below: int) -> torch.Tensor:
        """Return `rows` indices of type int64 in [0, `below`)."""
        steps = torch.arange(self.rows, device="cpu")
        return ((steps * 5 + self.seed) % below).to(self._device(operand))

    def mask(self, operand: int, *shape: int) -> torch.Tensor:
        return self.on(operand, *shape, dtype="bool")

    def module(self, operand: int, module: nn.Module) -> nn.Module:
        """Move `module` in place to the device of `operand`, 0 or 1, and return it."""
        return module.to(self._device(operand))

    def _device(self, operand: int) -> torch.device:
        return (self.first, self.second)[operand]


def _of(function: Callable[..., object], *operands: tuple[int, ...]) -> Builder:
    """Return a case that applies `function` to tensors, each given as (operand, *shape).

    `function` must look up the operator at the time of the call: ``lambda a, b: torch.add(a, b)``.
    """

    def build(at: Operands) -> Call:
        tensors = [at.on(operand, *shape) for operand, *shape in operands]
        return lambda: function(*tensors)

    return build


def _indexing(function: Callable[..., object], *shape: int) -> Builder:
    """Return a case that applies `function` to a tensor of `shape` on the first device and to indices below 4 on the
    second."""

    def build(at: Operands) -> Call:
        x, index = at.on(0, *shape), at.index(1, 4)
        return lambda: function(x, index)

    return build


def _weighing(loss: Callable[..., object]) -> Builder:
    """Return a case with scores and classes on the first device, and the weights of the classes on the second."""

    def build(at: Operands) -> Call:
        scores, classes, weights = at.on(0, N, 4), at.index(0, 4), at.on(1, 4)
        return lambda: loss(scores, classes, weights)

    return build


def _masking(function: Callable[..., object], *mask: int) -> Builder:
    """Return a case that applies `function` to a matrix on the first device and to a mask of the given shape on the
    second."""

    def build(at: Operands) -> Call:
        x, booleans = at.on(0, N, 3), at.mask(1, *mask)
        return lambda: function(x, booleans)

    return build


def _module(make: Callable[[], nn.Module], *shape: int) -> Builder:
    """Return a case with a module on the first device, and its input of (N, *shape) on the second."""

    def build(at: Operands) -> Call:
        module, x = at.module(0, make()), at.on(1, N, *shape)
        return lambda: module(x)

    return build


def _where(at: Operands) -> Call:
    condition, a, b = at.mask(0, N, 3), at.on(0, N, 3), at.on(1, N, 3)
    return lambda: torch.where(condition, a, b)


def _embedding_module(at: Operands) -> Call:
    module, index = at.module(0, nn.Embedding(4, 3)), at.index(1, 4)
    return lambda: module(index)


def _layers_apart(at: Operands) -> Call:
    """Return a case with two layers on different devices, without a copy between them."""
    net = nn.Sequential(at.module(0, nn.Linear(3, 3)), nn.ReLU(), at.module(1, nn.Linear(3, 2)))
    x = at.on(0, N, 3)
    return lambda: net(x)


def _index_put(*value: int) -> Builder:
    """Return a case of x[index] = value, where the value has the given shape and is on the second device."""

    def build(at: Operands) -> Call:
        x, index, values = at.on(0, 8, 3), torch.arange(at.rows, device=at.first), at.on(1, *value)

        def call() -> torch.Tensor:
            x[index] = values
            return x

        return call

    return build


def _slice_assignment(at: Operands) -> Call:
    a, b = at.on(0, at.rows + 2, 3), at.on(1, N, 3)

    def call() -> torch.Tensor:
        a[1:-1] = b
        return a

    return call


def _to(at: Operands) -> Call:
    a = at.on(0, N, 3)
    return lambda: a.to(at.second)


def _load_state_dict(at: Operands) -> Call:
    module = at.module(0, nn.Linear(3, 2, bias=False))
    state = {"weight": at.on(1, 2, 3)}

    def call() -> torch.Tensor:
        module.load_state_dict(state)
        return module.state_dict()["weight"]  # type: ignore[no-any-return]

    return call


def _foreach_mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([a], [b])
    return a


_MATRICES = (0, N, 3), (1, N, 3)
_FACTORS = (0, N, 3), (1, 3, 2)

CALLS: dict[str, Builder] = {
    "add": _of(lambda a, b: torch.add(a, b), *_MATRICES),
    "mul": _of(lambda a, b: torch.mul(a, b), *_MATRICES),
    "maximum": _of(lambda a, b: torch.maximum(a, b), *_MATRICES),
    "eq": _of(lambda a, b: torch.eq(a, b), *_MATRICES),
    "equal": _of(lambda a, b: torch.equal(a, b), *_MATRICES),
    "where": _where,
    "addcmul": _of(lambda a, b, c: torch.addcmul(a, b, c), *_MATRICES, (1, N, 3)),
    "addcmul third": _of(lambda a, b, c: torch.addcmul(a, b, c), (0, N, 3), (0, N, 3), (1, N, 3)),
    "lerp": _of(lambda a, b: torch.lerp(a, b, 0.5), *_MATRICES),
    "foreach add": _of(lambda a, b: torch._foreach_add([a], [b])[0], *_MATRICES),
    "foreach mul_": _of(_foreach_mul, *_MATRICES),
    "foreach add second": _of(lambda a, b: torch._foreach_add([a, a], [a, b])[1], *_MATRICES),
    "add_": _of(lambda a, b: a.add_(b), *_MATRICES),
    "mul_": _of(lambda a, b: a.mul_(b), *_MATRICES),
    "add out=": _of(lambda a, b, out: torch.add(a, b, out=out), (0, N, 3), *_MATRICES),
    "mul out=": _of(lambda a, b, out: torch.mul(a, b, out=out), (0, N, 3), *_MATRICES),
    "matmul": _of(lambda a, b: torch.matmul(a, b), *_FACTORS),
    "matmul vector": _of(lambda a, b: torch.matmul(a, b), (0, N, 3), (1, 3)),
    "bmm": _of(lambda a, b: torch.bmm(a, b), (0, 2, N, 3), (1, 2, 3, 2)),
    "einsum": _of(lambda a, b: torch.einsum("ij,jk->ik", a, b), *_FACTORS),
    "einsum third": _of(lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), (0, N, 3), (0, 3, 2), (1, 2, 3)),
    "matmul out=": _of(lambda a, b, out: torch.matmul(a, b, out=out), (0, N, 3), (0, 3, 2), (1, N, 2)),
    "addmm": _of(lambda c, a, b: torch.addmm(c, a, b), (0, 2), *_FACTORS),
    "cat": _of(lambda a, b: torch.cat([a, b]), (0, N, 3), (1, 2, 3)),
    "stack": _of(lambda a, b: torch.stack([a, b]), *_MATRICES),
    "cat third of four": _of(lambda a, b: torch.cat([a, a, b, a]), (0, N, 3), (1, 2, 3)),
    "stack third": _of(lambda a, b: torch.stack([a, a, b]), *_MATRICES),
    "hstack third": _of(lambda a, b: torch.hstack((a, a, b)), *_MATRICES),
    "cat out=": _of(lambda a, b, out: torch.cat([a, b], 1, out=out), (0, N, 1), (0, N, 2), (1, N, 3)),
    "linear": _of(lambda x, w: F.linear(x, w), (0, N, 3), (1, 2, 3)),
    "linear bias": _of(lambda x, w, b: F.linear(x, w, b), (0, N, 3), (0, 2, 3), (1, 2)),
    "conv2d": _of(lambda x, w: F.conv2d(x, w), (0, N, 1, 4, 4), (1, 2, 1, 2, 2)),
    "conv2d bias": _of(lambda x, w, b: F.conv2d(x, w, b), (0, N, 1, 4, 4), (0, 2, 1, 2, 2), (1, 2)),
    "embedding": _indexing(lambda weight, index: F.embedding(index, weight), 4, 3),
    "layer_norm": _of(lambda x, w: F.layer_norm(x, (3,), w), (0, N, 3), (1, 3)),
    "batch_norm": _of(lambda x, m, v: F.batch_norm(x, m, v.abs()), (0, N, 3), (1, 3), (1, 3)),
    "attention": _of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (0, 1, N, 4), (1, 1, 3, 4), (1, 1, 3, 4)),
    "mse_loss": _of(lambda a, b: F.mse_loss(a, b), *_MATRICES),
    "l1_loss": _of(lambda a, b: F.l1_loss(a, b), *_MATRICES),
    "nll_loss": _indexing(lambda scores, classes: F.nll_loss(scores, classes), N, 4),
    "nll_loss weight": _weighing(lambda x, classes, w: F.nll_loss(x, classes, w, reduction="sum")),
    "cross_entropy": _indexing(lambda scores, classes: F.cross_entropy(scores, classes), N, 4),
    "cross_entropy weight": _weighing(lambda x, classes, w: F.cross_entropy(x, classes, w, reduction="sum")),
    "index_select": _indexing(lambda x, index: torch.index_select(x, 0, index), 4, 3),
    "gather": _indexing(lambda x, index: torch.gather(x, 1, index.reshape(-1, 1)), N, 4),
    "masked_fill": _masking(lambda x, mask: torch.masked_fill(x, mask, 1.0), N, 3),
    "index_put values": _index_put(N, 3),
    "index": _indexing(lambda x, index: x[index], 4, 3),
    "index by mask": _masking(lambda x, mask: x[mask], N),
    "Linear": _module(lambda: nn.Linear(3, 2), 3),
    "Conv2d": _module(lambda: nn.Conv2d(1, 2, 2), 1, 4, 4),
    "Embedding": _embedding_module,
    "BatchNorm2d": _module(lambda: nn.BatchNorm2d(2), 2, 3, 3),
    "LayerNorm": _module(lambda: nn.LayerNorm(3), 3),
    "GRU": _module(lambda: nn.GRU(3, 2), 3),
    "Sequential": _layers_apart,
    "add 0-dim": _of(lambda a, b: torch.add(a, b), (0, N, 3), (1,)),
    "eq 0-dim": _of(lambda a, b: torch.eq(a, b), (0, N, 3), (1,)),
    "maximum 0-dim": _of(lambda a, b: torch.maximum(a, b), (0, N, 3), (1,)),
    "lt by 0-dim first": _of(lambda a, b: torch.lt(a, b), (0,), (1, N, 3)),
    "mul by 0-dim first": _of(lambda a, b: torch.mul(a, b), (0,), (1, N, 3)),
    "mul_ by 0-dim": _of(lambda a, b: a.mul_(b), (0, N, 3), (1,)),
    "0-dim add 0-dim": _of(lambda a, b: torch.add(a, b), (0,), (1,)),
    "0-dim add_ 0-dim": _of(lambda a, b: a.add_(b), (0,), (1,)),
    "index_put 0-dim value": _index_put(),
    "copy_": _of(lambda a, b: a.copy_(b), *_MATRICES),
    "slice assignment": _slice_assignment,
    "to": _to,
    "load_state_dict": _load_state_dict,
}
"""Name of an operator -> its case."""
