"""Operators with operands on two devices, a row for each: its call, and what torch does on CUDA. Without torch.

Each operator has a first and a second operand, placed on different devices in one of three ways. The rules describe
torch's behaviour on CUDA. The error must name both devices, with two exceptions:

- Convolution of a CPU tensor with a CUDA tensor, or vice versa: "Input type (torch.cuda.FloatTensor) and weight type
  (torch.FloatTensor) should be the same". It names the kinds of device without an index ("types").
- Indexing with an index on another GPU, or of a CPU tensor with an index on a GPU: "indices should be either on cpu
  or on the same device as the indexed tensor (cuda:0)". It names only the indexed tensor's device ("indexed").

Operators built on TensorIterator (arithmetic, comparisons, mse_loss, where, index_put) say "found at least two devices,
cuda:0 and cpu!". Operators with a generated check (mm, addmm, bmm, cat, index_select, nll_loss, normalisations, cudnn's
convolution) say "got mat2 is on cpu, different from other tensors on cuda:0". A few others (masked_fill, equal,
attention, recurrent layers, DataParallel) have messages of their own.

Each call builds its operands and returns the call that must raise or work. So an error while operands are built is
never taken for the error of the operator. Operands are small whole numbers, so that compared results are exact.
The simulated node has rules of its own (`mgpu_check/simulated/fidelity.json`), from the source of torch, and this table
tests them. Cases of operators are specs of calls by this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mgpu_check.oracles.tensors import F, TensorSpec, nn, torch

Call = Callable[[], object]
Builder = Callable[["Operands"], Call]

CPU_CUDA, CUDA_CPU, CUDA_CUDA = "cpu,cuda", "cuda,cpu", "cuda,cuda"
EVERYWHERE = frozenset({CPU_CUDA, CUDA_CPU, CUDA_CUDA})
NOWHERE: frozenset[str] = frozenset()
UNLESS_FIRST_ON_CPU = frozenset({CUDA_CPU, CUDA_CUDA})
UNLESS_SECOND_ON_CPU = frozenset({CPU_CUDA, CUDA_CUDA})
ON_TWO_GPUS = frozenset({CUDA_CUDA})


@dataclass(frozen=True)
class Rule:
    """The placements that make an operator raise, and the devices that its error names."""

    # the placements of (first operand, second operand) that must raise; all others must work
    raises: frozenset[str] = EVERYWHERE
    names: str = "both"  # the devices in the error: "both", "types" or "indexed"
    # the operand, 0 or 1, whose device the result has if the placement works; None for the operand on a GPU
    result: int | None = 0


@dataclass(frozen=True)
class OperatorRow:
    build: Builder  # makes the operands and returns the call
    rule: Rule = Rule()
    group: str = ""  # "modules", "scalars" or "copies", if a test of its own has the operator


N = -1  # placeholder in the shape of an operand for the number of rows of the case


@dataclass(frozen=True)
class Operands:
    """Builds the operands of a call: operand 0 on the first device, operand 1 on the second.
    A check makes it for a case, and `OperatorRow.build` takes the operands of one call from it."""

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

    def module(self, operand: int, module: nn.Module) -> nn.Module:
        """Move `module` in place to the device of `operand`, 0 or 1, and return it."""
        return module.to(self._device(operand))

    def _device(self, operand: int) -> torch.device:
        return (self.first, self.second)[operand]


Operand = tuple[int, ...] | Callable[[Operands], Any]
"""An operand of a case: (0 or 1 for its device, *shape), or a function that makes it."""


def _named(name: str, tensor: torch.Tensor, *others: torch.Tensor) -> object:
    return getattr(tensor, name)(*others) if name.endswith("_") else getattr(torch, name)(tensor, *others)


def _mask(operand: int, *shape: int) -> Operand:
    return lambda at: at.on(operand, *shape, dtype="bool")


def _index(at: Operands) -> torch.Tensor:
    return at.index(1, 4)


def _of(function: Callable[..., object] | str, *operands: Operand) -> Builder:
    """Return a case that applies `function` to operands.
    `function` must look up the operator at the time of the call: ``lambda a, b: torch.add(a, b)``. Or it is the name of
    a function of torch, or of a method that ends in "_"."""
    call = partial(_named, function) if isinstance(function, str) else function

    def build(at: Operands) -> Call:
        built = [operand(at) if callable(operand) else at.on(*operand) for operand in operands]
        return lambda: call(*built)

    return build


def _module(make: Callable[[], nn.Module], x: Operand) -> Builder:
    return _of(lambda module, x: module(x), lambda at: at.module(0, make()), x)


def _index_put(*value: int) -> Builder:
    """Return a case of x[index] = value, where the value has the given shape and is on the second device."""

    def put(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x[index] = values
        return x

    return _of(put, (0, 8, 3), lambda at: torch.arange(at.rows, device=at.first), (1, *value))


def _assigned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[1:-1] = b
    return a


def _loaded(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    module.load_state_dict({"weight": weight})
    return module.state_dict()["weight"]


def _foreach_mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([a], [b])
    return a


_MATRICES = (0, N, 3), (1, N, 3)
_FACTORS = (0, N, 3), (1, 3, 2)
_WEIGHED: tuple[Operand, ...] = (0, N, 4), lambda at: at.index(0, 4), (1, 4)
"""Scores and classes, and the weights of the classes on the second device."""

_TYPES, _INDEXED = Rule(names="types"), Rule(UNLESS_SECOND_ON_CPU, names="indexed")


def _rows(group: str, rows: Mapping[str, Builder | tuple[Builder, Rule]]) -> dict[str, OperatorRow]:
    pairs = {name: row if isinstance(row, tuple) else (row, Rule()) for name, row in rows.items()}
    return {name: OperatorRow(build, rule, group) for name, (build, rule) in pairs.items()}


OPERATORS: Mapping[str, OperatorRow] = {
    **_rows(
        "",
        {
            "add": _of("add", *_MATRICES),
            "mul": _of("mul", *_MATRICES),
            "maximum": _of("maximum", *_MATRICES),
            "eq": _of("eq", *_MATRICES),
            "where": _of(lambda c, a, b: torch.where(c, a, b), _mask(0, N, 3), *_MATRICES),
            "addcmul": _of(lambda a, b, c: torch.addcmul(a, b, c), *_MATRICES, (1, N, 3)),
            "addcmul third": _of(lambda a, b, c: torch.addcmul(a, b, c), (0, N, 3), (0, N, 3), (1, N, 3)),
            "lerp": _of(lambda a, b: torch.lerp(a, b, 0.5), *_MATRICES),
            "add_": _of("add_", *_MATRICES),
            "mul_": _of("mul_", *_MATRICES),
            "add out=": _of(lambda a, b, out: torch.add(a, b, out=out), (0, N, 3), *_MATRICES),
            "mul out=": _of(lambda a, b, out: torch.mul(a, b, out=out), (0, N, 3), *_MATRICES),
            # As called by optimizers and by gradient clipping, the latter with a first pair on one device.
            "foreach add": _of(lambda a, b: torch._foreach_add([a], [b])[0], *_MATRICES),
            "foreach mul_": _of(_foreach_mul, *_MATRICES),
            "foreach add second": _of(lambda a, b: torch._foreach_add([a, a], [a, b])[1], *_MATRICES),
            "matmul": _of(lambda a, b: torch.matmul(a, b), *_FACTORS),
            "matmul vector": _of(lambda a, b: torch.matmul(a, b), (0, N, 3), (1, 3)),
            "bmm": _of(lambda a, b: torch.bmm(a, b), (0, 2, N, 3), (1, 2, 3, 2)),
            "einsum": _of(lambda a, b: torch.einsum("ij,jk->ik", a, b), *_FACTORS),
            "matmul out=": _of(lambda a, b, out: torch.matmul(a, b, out=out), (0, N, 3), (0, 3, 2), (1, N, 2)),
            "addmm": _of(lambda c, a, b: torch.addmm(c, a, b), (0, 2), *_FACTORS),
            "einsum third": _of(lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), (0, N, 3), (0, 3, 2), (1, 2, 3)),
            # With several tensors, the third is on another device. A check of the first two would miss it, and so would
            # a check of the first and last.
            "cat": _of(lambda a, b: torch.cat([a, b]), (0, N, 3), (1, 2, 3)),
            "stack": _of(lambda a, b: torch.stack([a, b]), *_MATRICES),
            "cat out=": _of(lambda a, b, out: torch.cat([a, b], 1, out=out), (0, N, 1), (0, N, 2), (1, N, 3)),
            "cat third of four": _of(lambda a, b: torch.cat([a, a, b, a]), (0, N, 3), (1, 2, 3)),
            "stack third": _of(lambda a, b: torch.stack([a, a, b]), *_MATRICES),
            "hstack third": _of(lambda a, b: torch.hstack((a, a, b)), *_MATRICES),
            "linear": _of(lambda x, w: F.linear(x, w), (0, N, 3), (1, 2, 3)),
            "linear bias": _of(lambda x, w, b: F.linear(x, w, b), (0, N, 3), (0, 2, 3), (1, 2)),
            "embedding": _of(lambda weight, index: F.embedding(index, weight), (0, 4, 3), _index),
            "layer_norm": _of(lambda x, w: F.layer_norm(x, (3,), w), (0, N, 3), (1, 3)),
            "batch_norm": _of(lambda x, m, v: F.batch_norm(x, m, v.abs()), (0, N, 3), (1, 3), (1, 3)),
            "attention": _of(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (0, 1, N, 4), (1, 1, 3, 4), (1, 1, 3, 4)
            ),
            "conv2d": (_of(lambda x, w: F.conv2d(x, w), (0, N, 1, 4, 4), (1, 2, 1, 2, 2)), _TYPES),
            "conv2d bias": (_of(lambda x, w, b: F.conv2d(x, w, b), (0, N, 1, 4, 4), (0, 2, 1, 2, 2), (1, 2)), _TYPES),
            "mse_loss": _of(lambda a, b: F.mse_loss(a, b), *_MATRICES),
            "l1_loss": _of(lambda a, b: F.l1_loss(a, b), *_MATRICES),
            "nll_loss": _of(lambda scores, classes: F.nll_loss(scores, classes), (0, N, 4), _index),
            "nll_loss weight": _of(lambda x, classes, w: F.nll_loss(x, classes, w, reduction="sum"), *_WEIGHED),
            "cross_entropy": _of(lambda scores, classes: F.cross_entropy(scores, classes), (0, N, 4), _index),
            "cross_entropy weight": _of(
                lambda x, classes, w: F.cross_entropy(x, classes, w, reduction="sum"), *_WEIGHED
            ),
            "index_select": _of(lambda x, index: torch.index_select(x, 0, index), (0, 4, 3), _index),
            "gather": _of(lambda x, index: torch.gather(x, 1, index.reshape(-1, 1)), (0, N, 4), _index),
            "masked_fill": _of(lambda x, mask: torch.masked_fill(x, mask, 1.0), (0, N, 3), _mask(1, N, 3)),
            "index_put values": _index_put(N, 3),
            "equal": _of(lambda a, b: torch.equal(a, b), *_MATRICES),
            "index": (_of(lambda x, index: x[index], (0, 4, 3), _index), _INDEXED),
            "index by mask": (_of(lambda x, mask: x[mask], (0, N, 3), _mask(1, N)), _INDEXED),
        },
    ),
    **_rows(
        "modules",
        {
            "Linear": _module(lambda: nn.Linear(3, 2), (1, N, 3)),
            "Embedding": _module(lambda: nn.Embedding(4, 3), _index),
            "BatchNorm2d": _module(lambda: nn.BatchNorm2d(2), (1, N, 2, 3, 3)),
            "LayerNorm": _module(lambda: nn.LayerNorm(3), (1, N, 3)),
            "GRU": _module(lambda: nn.GRU(3, 2), (1, N, 3)),
            "Sequential": _of(
                lambda net, x: net(x),
                lambda at: nn.Sequential(at.module(0, nn.Linear(3, 3)), nn.ReLU(), at.module(1, nn.Linear(3, 2))),
                (0, N, 3),
            ),
            "Conv2d": (_module(lambda: nn.Conv2d(1, 2, 2), (1, N, 1, 4, 4)), _TYPES),
        },
    ),
    **_rows(
        "scalars",
        {
            # A 0-dim tensor on the CPU counts as a number, unless it is written to. On a GPU it is an ordinary tensor.
            "add 0-dim": (_of("add", (0, N, 3), (1,)), Rule(UNLESS_SECOND_ON_CPU)),
            "eq 0-dim": (_of("eq", (0, N, 3), (1,)), Rule(UNLESS_SECOND_ON_CPU)),
            "maximum 0-dim": (_of("maximum", (0, N, 3), (1,)), Rule(UNLESS_SECOND_ON_CPU)),
            "lt by 0-dim first": (_of("lt", (0,), (1, N, 3)), Rule(UNLESS_FIRST_ON_CPU, result=1)),
            "mul by 0-dim first": (_of("mul", (0,), (1, N, 3)), Rule(UNLESS_FIRST_ON_CPU, result=1)),
            "mul_ by 0-dim": (_of("mul_", (0, N, 3), (1,)), Rule(UNLESS_SECOND_ON_CPU)),
            "0-dim add 0-dim": (_of("add", (0,), (1,)), Rule(ON_TWO_GPUS, result=None)),
            "0-dim add_ 0-dim": (_of("add_", (0,), (1,)), Rule(UNLESS_SECOND_ON_CPU)),
            # index_put_ accepts a 0-dim value on any device.
            "index_put 0-dim value": (_index_put(), Rule(NOWHERE)),
        },
    ),
    **_rows(
        "copies",
        {
            "copy_": (_of(lambda a, b: a.copy_(b), *_MATRICES), Rule(NOWHERE)),
            "slice assignment": (_of(_assigned, lambda at: at.on(0, at.rows + 2, 3), (1, N, 3)), Rule(NOWHERE)),
            "to": (_of(lambda a, device: a.to(device), (0, N, 3), lambda at: at.second), Rule(NOWHERE, result=1)),
            "load_state_dict": (
                _of(_loaded, lambda at: at.module(0, nn.Linear(3, 2, bias=False)), (1, 2, 3)),
                Rule(NOWHERE),
            ),
        },
    ),
}
"""Name of an operator -> its row."""


GROUPS = {
    group: tuple(name for name, row in OPERATORS.items() if row.group == group)
    for group in ("modules", "scalars", "copies")
}


def placement(first: str, second: str) -> str:
    """Return the placement of two different devices: "cpu,cuda" for "cpu" and "cuda:1"."""
    return f"{first.partition(':')[0]},{second.partition(':')[0]}"


@dataclass(frozen=True)
class OperatorCase:
    """An operator with its first operand on one device and its second on another."""

    operator: str
    first: str
    second: str
    rows: int = 2
    seed: int = 0

    @property
    def rule(self) -> Rule:
        return OPERATORS[self.operator].rule

    @property
    def must_raise(self) -> bool:
        """True if torch must refuse these operands."""
        return placement(self.first, self.second) in self.rule.raises


@dataclass(frozen=True)
class OperatorTable:
    """Operators, each on many pairs of devices: either all pairs that must raise, or all that must work.
    Each operator combines each device with the CPU, in both orders, and with the device `turn` places later. So every
    table finds a defect of one operator on one device."""

    must_raise: bool
    only: str | None  # a name in `GROUPS`, to restrict the operators; None for all
    without: tuple[str, ...]  # names in `GROUPS` to leave out
    devices: int
    turn: int = 1
    rows: int = 2
    seed: int = 0

    def cases(self) -> list[OperatorCase]:
        """Return the cases, operator by operator."""
        left_out = {name for group in self.without for name in GROUPS[group]}
        device_names = [f"cuda:{index}" for index in range(self.devices)]
        pairs = [pair for name in device_names for pair in (("cpu", name), (name, "cpu"))]
        if self.devices > 1:
            pairs += [
                (device_names[index], device_names[(index + self.turn) % self.devices]) for index in range(self.devices)
            ]
        cases = [
            OperatorCase(name, *pair, self.rows, self.seed)
            for name in (GROUPS[self.only] if self.only else OPERATORS)
            if name not in left_out
            for pair in pairs
        ]
        return [case for case in cases if case.must_raise == self.must_raise]
