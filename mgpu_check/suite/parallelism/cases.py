"""The table of mechanisms of model parallelism: which class divides and judges each, and the sizes to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Size = int | str


class Mechanism(NamedTuple):
    class_name: str  # the name of the class, in `mgpu_check.suite.parallelism.torch_parallelism`
    # values to draw, simplest first. A number is per rank where this keeps a rule of the mechanism.
    sizes: dict[str, tuple[Size, ...]]
    dtypes: tuple[str, ...] = ("float64", "float32")  # dtypes to draw


MECHANISMS = {
    "context_parallel": Mechanism(
        "ContextOfTorch",
        {"rotation": ("allgather", "alltoall"), "causal": ("balanced", "not balanced", "not causal")},
        dtypes=("float32",),
    ),
    "overlapping products": Mechanism("AsynchronousLayers", {"own": (2, 1, 3), "hidden": (3, 1)}),
}


@dataclass(frozen=True)
class MechanismCase:
    """An example of a mechanism: its name in `MECHANISMS`, its sizes, its dtype, and the seed of its data."""

    name: str
    sizes: dict[str, Size]
    dtype: str
    seed: int
