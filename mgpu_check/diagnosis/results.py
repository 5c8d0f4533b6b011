"""Name the results of a step, as data for comparisons and as texts that users read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["grads", "params", "buffers", "optimizer", "returned", "rng"]

KINDS: tuple[Kind, ...] = ("grads", "params", "buffers", "optimizer", "returned", "rng")
"""The kinds of results that a gate can compare."""

_TEXTS: dict[Kind, str] = {"grads": "gradient of {}", "buffers": "buffer {}", "returned": "returned {}"}


@dataclass(frozen=True)
class Result:
    """The name of one result of a step.

    Attributes:
        of: for gradients, parameters and buffers the name in the model. For a returned value its keys, "head.loss", or
            "" for the whole. For the optimizer the state and its owner, "exp_avg of head.weight".
        step: for a returned value the number of the call that returned it, from 1; None if there was one call only.
    """

    kind: Kind
    of: str
    step: int | None = None

    @property
    def label(self) -> str:
        return self.of if self.step is None else f"{self.of}, step {self.step}"

    @property
    def parameter(self) -> str:
        """The name of the parameter or buffer; for a state of the optimizer, the parameter that has the state."""
        if self.kind != "optimizer":
            return self.of
        return self.of.partition(" of ")[2].partition(" of optimizer ")[0]

    @property
    def owner(self) -> str | None:
        """The name of a parameter, or of a value that the only call returned; None for other results."""
        return self.of if self.kind in ("params", "returned") and self.step is None else None

    def __str__(self) -> str:
        """Return the text that users read, such as "gradient of head.weight" or "returned loss"."""
        if self.kind == "returned" and not self.of:
            return f"returned{self.label}"
        return _TEXTS.get(self.kind, "{}").format(self.label)
