"""How to call each operator of `mgpu_check.strategies.operators` with operands on two devices.

Every entry builds its operands and returns the call that is to raise or to work, so that an error while operands are
made is never taken for the one that is looked for. Operands are small whole numbers: results that are compared are
exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.strategies.tensors import TensorSpec

__all__ = ["CALLS", "Operands"]

Call = Callable[[], object]


@dataclass(frozen=True)
class Operands:
    """Makes the operands of a call: the first on one device, the second on the other."""

    first: torch.device
    second: torch.device
    rows: int
    seed: int

    def on(self, place: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
        """Whole numbers in [-15, 15], on the device of operand `place`, 0 or 1."""
        return TensorSpec(shape, dtype, seed=self.seed + place, values="exact").build(self._device(place))

    def index(self, place: int, below: int) -> torch.Tensor:
        """`rows` indices of type int64 in [0, `below`)."""
        steps = torch.arange(self.rows, device="cpu")
        return ((steps * 5 + self.seed) % below).to(self._device(place))

    def mask(self, place: int, *shape: int) -> torch.Tensor:
        """Booleans."""
        return self.on(place, *shape, dtype="bool")

    def module(self, place: int, module: nn.Module) -> nn.Module:
        """`module` on the device of operand `place`."""
        return module.to(self._device(place))

    def _device(self, place: int) -> torch.device:
        return (self.first, self.second)[place]


def _binary(name: str) -> Callable[[Operands], Call]:
    """torch.<name>(first, second) of two matrices."""

    def build(at: Operands) -> Call:
        a, b = at.on(0, at.rows, 3), at.on(1, at.rows, 3)
        return lambda: getattr(torch, name)(a, b)

    return build


def _method(name: str) -> Callable[[Operands], Call]:
    """first.<name>(second) of two matrices, for in-place operators."""

    def build(at: Operands) -> Call:
        a, b = at.on(0, at.rows, 3), at.on(1, at.rows, 3)
        return lambda: getattr(a, name)(b)

    return build


def _elementwise_into(name: str) -> Callable[[Operands], Call]:
    """torch.<name>(first, first, out=second)."""

    def build(at: Operands) -> Call:
        a, b, out = at.on(0, at.rows, 3), at.on(0, at.rows, 3), at.on(1, at.rows, 3)
        return lambda: getattr(torch, name)(a, b, out=out)

    return build


def _loss(name: str) -> Callable[[Operands], Call]:
    def build(at: Operands) -> Call:
        a, b = at.on(0, at.rows, 4), at.on(1, at.rows, 4)
        return lambda: getattr(F, name)(a, b)

    return build


def _classification(name: str) -> Callable[[Operands], Call]:
    def build(at: Operands) -> Call:
        scores, classes = at.on(0, at.rows, 4), at.index(1, 4)
        return lambda: getattr(F, name)(scores, classes)

    return build


def _module(make: Callable[[], nn.Module], *shape: int) -> Callable[[Operands], Call]:
    """A module on the first device, its input of (rows, *shape) on the second."""

    def build(at: Operands) -> Call:
        module, x = at.module(0, make()), at.on(1, at.rows, *shape)
        return lambda: module(x)

    return build


def _where(at: Operands) -> Call:
    condition, a, b = at.mask(0, at.rows, 3), at.on(0, at.rows, 3), at.on(1, at.rows, 3)
    return lambda: torch.where(condition, a, b)


def _addcmul(at: Operands) -> Call:
    a, b, c = at.on(0, at.rows, 3), at.on(1, at.rows, 3), at.on(1, at.rows, 3)
    return lambda: torch.addcmul(a, b, c)


def _matmul(at: Operands) -> Call:
    a, b = at.on(0, at.rows, 3), at.on(1, 3, 2)
    return lambda: torch.matmul(a, b)


def _matmul_vector(at: Operands) -> Call:
    a, b = at.on(0, at.rows, 3), at.on(1, 3)
    return lambda: torch.matmul(a, b)


def _bmm(at: Operands) -> Call:
    a, b = at.on(0, 2, at.rows, 3), at.on(1, 2, 3, 2)
    return lambda: torch.bmm(a, b)


def _einsum(at: Operands) -> Call:
    a, b = at.on(0, at.rows, 3), at.on(1, 3, 2)
    return lambda: torch.einsum("ij,jk->ik", a, b)


def _matmul_into(at: Operands) -> Call:
    a, b, out = at.on(0, at.rows, 3), at.on(0, 3, 2), at.on(1, at.rows, 2)
    return lambda: torch.matmul(a, b, out=out)


def _addmm(at: Operands) -> Call:
    bias, a, b = at.on(0, 2), at.on(0, at.rows, 3), at.on(1, 3, 2)
    return lambda: torch.addmm(bias, a, b)


def _cat(at: Operands) -> Call:
    a, b = at.on(0, at.rows, 3), at.on(1, 2, 3)
    return lambda: torch.cat([a, b])


def _stack(at: Operands) -> Call:
    a, b = at.on(0, at.rows, 3), at.on(1, at.rows, 3)
    return lambda: torch.stack([a, b])


def _cat_into(at: Operands) -> Call:
    a, b, out = at.on(0, at.rows, 3), at.on(0, 2, 3), at.on(1, at.rows + 2, 3)
    return lambda: torch.cat([a, b], out=out)


def _linear(at: Operands) -> Call:
    x, weight = at.on(0, at.rows, 3), at.on(1, 2, 3)
    return lambda: F.linear(x, weight)


def _linear_bias(at: Operands) -> Call:
    x, weight, bias = at.on(0, at.rows, 3), at.on(0, 2, 3), at.on(1, 2)
    return lambda: F.linear(x, weight, bias)


def _conv2d(at: Operands) -> Call:
    x, weight = at.on(0, at.rows, 1, 4, 4), at.on(1, 2, 1, 2, 2)
    return lambda: F.conv2d(x, weight)


def _conv2d_bias(at: Operands) -> Call:
    x, weight, bias = at.on(0, at.rows, 1, 4, 4), at.on(0, 2, 1, 2, 2), at.on(1, 2)
    return lambda: F.conv2d(x, weight, bias)


def _embedding(at: Operands) -> Call:
    weight, index = at.on(0, 5, 3), at.index(1, 5)
    return lambda: F.embedding(index, weight)


def _layer_norm(at: Operands) -> Call:
    x, weight = at.on(0, at.rows, 3), at.on(1, 3)
    return lambda: F.layer_norm(x, (3,), weight)


def _batch_norm(at: Operands) -> Call:
    x, mean, variance = at.on(0, at.rows, 3), at.on(1, 3), at.on(1, 3).abs()
    return lambda: F.batch_norm(x, mean, variance)


def _attention(at: Operands) -> Call:
    query, key, value = at.on(0, 1, at.rows, 4), at.on(1, 1, 3, 4), at.on(1, 1, 3, 4)
    return lambda: F.scaled_dot_product_attention(query, key, value)


def _index_select(at: Operands) -> Call:
    x, index = at.on(0, 5, 3), at.index(1, 5)
    return lambda: torch.index_select(x, 0, index)


def _gather(at: Operands) -> Call:
    x, index = at.on(0, at.rows, 5), at.index(1, 5).reshape(-1, 1)
    return lambda: torch.gather(x, 1, index)


def _masked_fill(at: Operands) -> Call:
    x, mask = at.on(0, at.rows, 3), at.mask(1, at.rows, 3)
    return lambda: torch.masked_fill(x, mask, 1.0)


def _index_put_values(at: Operands) -> Call:
    x, index, values = at.on(0, 8, 3), torch.arange(at.rows, device=at.first), at.on(1, at.rows, 3)

    def call() -> torch.Tensor:
        x[index] = values
        return x

    return call


def _index(at: Operands) -> Call:
    x, index = at.on(0, 5, 3), at.index(1, 5)
    return lambda: x[index]


def _index_by_mask(at: Operands) -> Call:
    x, mask = at.on(0, at.rows, 3), at.mask(1, at.rows)
    return lambda: x[mask]


def _chain(at: Operands) -> Call:
    """Two layers, the second one on another device, without a move between them."""
    net = nn.Sequential(at.module(0, nn.Linear(3, 3)), nn.ReLU(), at.module(1, nn.Linear(3, 2)))
    x = at.on(0, at.rows, 3)
    return lambda: net(x)


def _embedding_module(at: Operands) -> Call:
    module, index = at.module(0, nn.Embedding(5, 3)), at.index(1, 5)
    return lambda: module(index)


def _scalar_second(name: str) -> Callable[[Operands], Call]:
    def build(at: Operands) -> Call:
        a, b = at.on(0, at.rows, 3), at.on(1)
        return lambda: getattr(torch, name)(a, b)

    return build


def _scalar_first(at: Operands) -> Call:
    a, b = at.on(0), at.on(1, at.rows, 3)
    return lambda: torch.mul(a, b)


def _scaled(at: Operands) -> Call:
    a, b = at.on(0, at.rows, 3), at.on(1)
    return lambda: a.mul_(b)


def _two_scalars(at: Operands) -> Call:
    a, b = at.on(0), at.on(1)
    return lambda: torch.add(a, b)


def _two_scalars_in_place(at: Operands) -> Call:
    a, b = at.on(0), at.on(1)
    return lambda: a.add_(b)


def _slice_assignment(at: Operands) -> Call:
    a, b = at.on(0, at.rows + 2, 3), at.on(1, at.rows, 3)

    def call() -> torch.Tensor:
        a[1:-1] = b
        return a

    return call


def _to(at: Operands) -> Call:
    a = at.on(0, at.rows, 3)
    return lambda: a.to(at.second)


def _load_state_dict(at: Operands) -> Call:
    module = at.module(0, nn.Linear(3, 2, bias=False))
    state = {"weight": at.on(1, 2, 3)}

    def call() -> torch.Tensor:
        module.load_state_dict(state)
        return module.weight.detach()  # type: ignore[operator]

    return call


CALLS: dict[str, Callable[[Operands], Call]] = {
    "add": _binary("add"),
    "mul": _binary("mul"),
    "maximum": _binary("maximum"),
    "eq": _binary("eq"),
    "equal": _binary("equal"),
    "where": _where,
    "addcmul": _addcmul,
    "add_": _method("add_"),
    "mul_": _method("mul_"),
    "add out=": _elementwise_into("add"),
    "mul out=": _elementwise_into("mul"),
    "matmul": _matmul,
    "matmul vector": _matmul_vector,
    "bmm": _bmm,
    "einsum": _einsum,
    "matmul out=": _matmul_into,
    "addmm": _addmm,
    "cat": _cat,
    "stack": _stack,
    "cat out=": _cat_into,
    "linear": _linear,
    "linear bias": _linear_bias,
    "conv2d": _conv2d,
    "conv2d bias": _conv2d_bias,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "attention": _attention,
    "mse_loss": _loss("mse_loss"),
    "l1_loss": _loss("l1_loss"),
    "nll_loss": _classification("nll_loss"),
    "cross_entropy": _classification("cross_entropy"),
    "index_select": _index_select,
    "gather": _gather,
    "masked_fill": _masked_fill,
    "index_put values": _index_put_values,
    "index": _index,
    "index by mask": _index_by_mask,
    "Linear": _module(lambda: nn.Linear(3, 2), 3),
    "Conv2d": _module(lambda: nn.Conv2d(1, 2, 2), 1, 4, 4),
    "Embedding": _embedding_module,
    "BatchNorm2d": _module(lambda: nn.BatchNorm2d(2), 2, 3, 3),
    "LayerNorm": _module(lambda: nn.LayerNorm(3), 3),
    "GRU": _module(lambda: nn.GRU(3, 2), 3),
    "Sequential": _chain,
    "add 0-dim": _scalar_second("add"),
    "mul by 0-dim first": _scalar_first,
    "mul_ by 0-dim": _scaled,
    "0-dim add 0-dim": _two_scalars,
    "0-dim add_ 0-dim": _two_scalars_in_place,
    "copy_": _method("copy_"),
    "slice assignment": _slice_assignment,
    "to": _to,
    "load_state_dict": _load_state_dict,
}
