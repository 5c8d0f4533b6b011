"""Cases of operators with operands on two devices, by the table in `mgpu_check.suite.mismatch.operators`."""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_check.suite.mismatch.operators import OPERATORS, Rule

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
        """The rule of the operator."""
        return OPERATORS[self.operator].rule

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
