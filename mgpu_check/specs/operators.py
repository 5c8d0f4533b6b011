"""Rules for operators with operands on different devices, as plain data: which refuse them, and in which words.

Each operator has a first operand and a second one, placed apart in one of three ways. What it must do is torch's
behaviour on CUDA. The message must name both devices; two wordings of torch name them in their own way:

- convolution of a CPU tensor with a CUDA tensor, either way round: "Input type (torch.cuda.FloatTensor) and weight
  type (torch.FloatTensor) should be the same", the kinds of device without an index ("types");
- indexing with an index on a foreign GPU, or of a CPU tensor with an index on a GPU: "indices should be either on cpu
  or on the same device as the indexed tensor (cuda:0)", the indexed tensor's device only ("indexed").

All others name both. Operators built on TensorIterator (arithmetic, comparisons, mse_loss, where, index_put) say "found
at least two devices, cuda:0 and cpu!"; those whose check is generated (mm, addmm, bmm, cat, index_select, nll_loss,
normalisations, cudnn's convolution) say "got mat2 is on cpu, different from other tensors on cuda:0"; some have words
of their own (masked_fill, equal, attention, recurrent layers, DataParallel).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUPS", "OPERATORS", "OperatorCase", "OperatorTable", "Rule", "placement"]

CPU_CUDA, CUDA_CPU, CUDA_CUDA = "cpu,cuda", "cuda,cpu", "cuda,cuda"
EVERYWHERE = frozenset({CPU_CUDA, CUDA_CPU, CUDA_CUDA})
NOWHERE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rule:
    """The conditions under which an operator raises, and how it names the devices.

    Attributes:
        raises: the ways of placing (first operand, second operand) apart that must raise; all others must work.
        names: "both" devices, or what torch is content with: "types" or "indexed".
        result: the operand, 0 or 1, on whose device the result is where operands apart work; None: where a GPU is.
    """

    raises: frozenset[str] = EVERYWHERE
    names: str = "both"
    result: int | None = 0


_ARITHMETIC = {
    **dict.fromkeys(("add", "mul", "maximum", "eq", "where", "addcmul", "addcmul third", "lerp"), Rule()),
    **dict.fromkeys(("add_", "mul_", "add out=", "mul out="), Rule()),
    # As optimizers and clipping call; the latter with a first pair that lies together.
    **dict.fromkeys(("foreach add", "foreach mul_", "foreach add second"), Rule()),
}
_PRODUCTS = dict.fromkeys(("matmul", "matmul vector", "bmm", "einsum", "matmul out=", "addmm", "einsum third"), Rule())
_JOINS = dict.fromkeys(("cat", "stack", "cat out=", "cat third of four", "stack third", "hstack third"), Rule())
"""Of several tensors the third is apart from the others, which a look at the first two, or at the first and the last, does not see."""
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
    # A 0-dim tensor on the CPU counts as a number, unless it is written to; one on a GPU is a tensor as any other.
    "add 0-dim": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), result=0),
    "eq 0-dim": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), result=0),
    "maximum 0-dim": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), result=0),
    "lt by 0-dim first": Rule(raises=frozenset({CUDA_CPU, CUDA_CUDA}), result=1),
    "mul by 0-dim first": Rule(raises=frozenset({CUDA_CPU, CUDA_CUDA}), result=1),
    "mul_ by 0-dim": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), result=0),
    "0-dim add 0-dim": Rule(raises=frozenset({CUDA_CUDA}), result=None),
    "0-dim add_ 0-dim": Rule(raises=frozenset({CPU_CUDA, CUDA_CUDA}), result=0),
    # index_put_ fetches a 0-dim value from wherever it is.
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
"""Every operator by name; `mgpu_check.checks.operators` knows how to call each."""

GROUPS = {"modules": tuple(_MODULES), "scalars": tuple(_SCALARS), "copies": tuple(_COPIES)}


def placement(first: str, second: str) -> str:
    """Return how two different devices, such as "cpu" and "cuda:1", lie apart."""
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
        """The rule for operands that lie apart."""
        return OPERATORS[self.operator]

    @property
    def must_raise(self) -> bool:
        """True if torch must refuse these operands."""
        return placement(self.first, self.second) in self.rule.raises


@dataclass(frozen=True)
class OperatorTable:
    """Operators, each on many pairs of places: all pairs that must raise, or all that must work.

    Each meets each device with the CPU on either side, and with one other device: the one that comes `turn` devices later.
    So a defect of one operator on one device is met by every table.

    Attributes:
        only: the name in `GROUPS` that the operators are of; None: all.
        without: names in `GROUPS` that are left out.
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
