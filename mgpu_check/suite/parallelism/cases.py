"""The table of mechanisms of model parallelism: which class divides and judges each, and the sizes to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Size = int | str


class Mechanism(NamedTuple):
    class_name: str  # the name of the class, in `mgpu_check.suite.parallelism.mechanisms`
    # values to draw, simplest first. A number is per rank where this keeps a rule of the mechanism.
    sizes: dict[str, tuple[Size, ...]]
    dtypes: tuple[str, ...] = ("float64", "float32")  # dtypes to draw


MECHANISMS = {
    "experts": Mechanism(
        "ExpertsByHand",
        # Some ranks have no token, some experts too; experts need not be a multiple of the ranks.
        {"tokens": (13, 24, 3), "experts": (5, 8, 3), "top": (2, 1), "capacity": (1, 0, 2)}
        | {"balance": ("all ranks", "each rank")},
    ),
    "experts under fully_shard": Mechanism(
        "ShardedExperts", {"tokens": (13, 6), "experts": (2, 1), "expert ranks": ("many", "few", "all")}
    ),
    "attention": Mechanism(
        "ContextByHand",
        {"piece": (2, 1, 3), "order": ("zigzag", "chunks"), "way": ("ring", "gathered"), "batch": (2, 1)},
    ),
    "context_parallel": Mechanism(
        "ContextOfTorch",
        {"rotation": ("allgather", "alltoall"), "causal": ("balanced", "not balanced", "not causal")},
        dtypes=("float32",),
    ),
    "norms of sequences": Mechanism("SequenceByHand", {"own": (3, 1), "hidden": (6, 5), "batch": (2, 1)}),
    "vocabulary": Mechanism(
        "Vocabulary",
        {"more": (3, 0, 1), "tokens": (20, 5), "ignored": ("a class", "no class", "nothing"), "scale": (1, 400)},
    ),
    "grouped queries": Mechanism(
        "GroupedQueries",
        {"shared": ("fewer", "as many", "more", "one"), "each": (2, 1, 3), "layout": ("interleaved", "thirds")},
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
