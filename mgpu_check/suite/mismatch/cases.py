"""Rules for operators with operands on different devices: which operators refuse them, and which devices the error
names.

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
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUPS", "OPERATORS", "OperatorCase", "OperatorTable", "Rule", "placement"]

CPU_CUDA, CUDA_CPU, CUDA_CUDA = "cpu,cuda", "cuda,cpu", "cuda,cuda"
EVERYWHERE = frozenset({CPU_CUDA, CUDA_CPU, CUDA_CUDA})
NOWHERE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rule:
    """The placements for which an operator raises, and the devices that its error names.

    Attributes:
        raises: the placements of (first operand, second operand) that must raise; all others must work.
        names: the devices in the error: "both", "types" or "indexed".
        result: the operand, 0 or 1, whose device the result has if the placement works; None for the operand on a GPU.
    """

    raises: frozenset[str] = EVERYWHERE
    names: str = "both"
    result: int | None = 0


_ARITHMETIC = {
    **dict.fromkeys(("add", "mul", "maximum", "eq", "where", "addcmul", "addcmul third", "lerp"), Rule()),
    **dict.fromkeys(("add_", "mul_", "add out=", "mul out="), Rule()),
    # As called by optimizers and by gradient clipping, the latter with a first pair on one device.
    **dict.fromkeys(("foreach add", "foreach mul_", "foreach add second"), Rule()),
}
_PRODUCTS = dict.fromkeys(("matmul", "matmul vector", "bmm", "einsum", "matmul out=", "addmm", "einsum third"), Rule())
_JOINS = dict.fromkeys(("cat", "stack", "cat out=", "cat third of four", "stack third", "hstack third"), Rule())
"""With several tensors, the third is on another device.

A check of the first two, or of the first and last, would miss it.
"""
_LAYERS = {
    **dict.fromkeys(("linear", "linear bias", "embedding", "layer_norm", "batch_norm", "attention"), Rule()),
    "conv2d": Rule(names="types"),
    "conv2d bias": Rule(names="types"),
}
_LOSSES = dict.fromkeys(
    ("mse_loss", "l1_loss", "nll_loss", "nll_loss weight", "cross_entropy", "cross_entropy weight"), Rule()
)
_INDEXING = {
    **dict.fromkeys(("index_select", "gather", "masked_fill", "index_put values", "equal"), Rule()),
    "index": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), names="indexed"),
    "index by mask": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), names="indexed"),
}
_MODULES = {
    **dict.fromkeys(("Linear", "Embedding", "BatchNorm2d", "LayerNorm", "GRU", "Sequential"), Rule()),
    "Conv2d": Rule(names="types"),
}
_SCALARS = {
    # A 0-dim tensor on the CPU counts as a number, unless it is written to. On a GPU it is an ordinary tensor.
    "add 0-dim": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), result=0),
    "eq 0-dim": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), result=0),
    "maximum 0-dim": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), result=0),
    "lt by 0-dim first": Rule(raises=frozenset({CUDA_CPU, CUDA_CUDA}), result=1),
    "mul by 0-dim first": Rule(raises=frozenset({CUDA_CPU, CUDA_CUDA}), result=1),
    "mul_ by 0-dim": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), result=0),
    "0-dim add 0-dim": Rule(raises=frozenset({CUDA_CUDA}), result=None),
    "0-dim add_ 0-dim": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), result=0),
    # index_put_ accepts a 0-dim value on any device.
    "index_put 0-dim value": Rule(raises=NOWHERE, result=0),
}
_COPIES = {
    "copy_": Rule(raises=NOWHERE, result=0),
    "slice assignment": Rule(raises=NOWHERE, result=0),
    "to": Rule(raises=NOWHERE, result=1),
    "load_state_dict": Rule(raises=NOWHERE, result=0),
}

OPERATORS: dict[str, Rule] = {
    **_ARITHMETIC, **_PRODUCTS, **_JOINS, **_LAYERS, **_LOSSES, **_INDEXING, **_MODULES, **_SCALARS, **_COPIES
}  # fmt: skip
"""Every operator by name; `mgpu_check.suite.mismatch.operators` has the call of each."""

GROUPS = {"modules": tuple(_MODULES), "scalars": tuple(_SCALARS), "copies": tuple(_COPIES)}


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
        """The rule of the operator."""
        return OPERATORS[self.operator]

    @property
    def must_raise(self) -> bool:
        """True if torch must refuse these operands."""
        return placement(self.first, self.second) in self.rule.raises


@dataclass(frozen=True)
class OperatorTable:
    """Operators, each on many pairs of devices: either all pairs that must raise, or all that must work.

    Each operator combines each device with the CPU, in both orders, and with the device `turn` places later. So every
    table finds a defect of one operator on one device.

    Attributes:
        only: a name in `GROUPS`, to restrict the operators; None for all.
        without: names in `GROUPS` to leave out.
    """

    must_raise: bool
    only: str | None
    without: tuple[str, ...]
    devices: int
    turn: int = 1
    rows: int = 2
    seed: int = 0

    def cases(self) -> list[OperatorCase]:
        """Return the cases, operator by operator."""
        left_out = {name for group in self.without for name in GROUPS[group]}
        names = [f"cuda:{index}" for index in range(self.devices)]
        pairs = [pair for name in names for pair in (("cpu", name), (name, "cpu"))]
        if self.devices > 1:
            pairs += [(names[index], names[(index + self.turn) % self.devices]) for index in range(self.devices)]
        cases = [
            OperatorCase(name, *pair, self.rows, self.seed)
            for name in (GROUPS[self.only] if self.only else OPERATORS)
            if name not in left_out
            for pair in pairs
        ]
        return [case for case in cases if case.must_raise == self.must_raise]
