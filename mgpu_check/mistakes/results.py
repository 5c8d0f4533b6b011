"""The names of what a step leaves: data for those who compare, and the text that users read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["KINDS", "Kind", "Result"]

Kind = Literal["grads", "params", "buffers", "optimizer", "returned", "rng"]

KINDS: tuple[Kind, ...] = ("grads", "params", "buffers", "optimizer", "returned", "rng")
"""What can be observed."""

_TEXTS: dict[Kind, str] = {"grads": "gradient of {}", "buffers": "buffer {}", "returned": "returned {}"}


@dataclass(frozen=True)
class Result:
    """One thing that a step leaves.

    Attributes:
        of: of gradients, parameters and buffers the name in the model; of what was returned its keys, "head.loss", empty
            where it is the whole; of the optimizer the state and its owner, "exp_avg of head.weight".
        step: of what was returned by one of several calls: by which, from 1; None where there was one.
    """

    kind: Kind
    of: str
    step: int | None = None

    @property
    def label(self) -> str:
        """Its name among those of its kind: "loss, step 2"."""
        return self.of if self.step is None else f"{self.of}, step {self.step}"

    @property
    def parameter(self) -> str:
        """Name of the parameter or buffer that it is of; of the optimizer's state the parameter that has the state."""
        if self.kind != "optimizer":
            return self.of
        return self.of.partition(" of ")[2].partition(" of optimizer ")[0]

    @property
    def owner(self) -> str | None:
        """Name of the parameter, or of what one call has returned under a name."""
        return self.of if self.kind in ("params", "returned") and self.step is None else None

    def __str__(self) -> str:
        """Name it: "gradient of head.weight", "head.weight", "buffer bn.running_mean", "learning rate of group 0",
        "returned loss".
        """
        if self.kind == "returned" and not self.of:
            return f"returned{self.label}"
        return _TEXTS.get(self.kind, "{}").format(self.label)
