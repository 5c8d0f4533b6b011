"""Describe one case that the gate runs a step on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mgpu_check.gates.meshes import Mesh, described

CHANGES = ("scaled", "ragged", "sorted", "duplicated", "permuted")
"""The ways to change a batch; see `mgpu_check.gates.batches`."""


@dataclass(frozen=True)
class Scenario:
    """One case: the ranks, the batches and the seed of a run.

    Attributes:
        samples: samples in each global batch; in the first one if batches are drawn.
        steps: number of calls of the step, each with another batch.
        change: one of `CHANGES`, or "" for unchanged batches.
        factor: factor of "scaled" batches.
        batches: the drawn batches, if the user gives a strategy.
        mesh: axes of the mesh and their sizes, if the user gives meshes.
        apart: whether elements of parameters are made distinct, so that their values identify slices.
        rewritten: whether gradients are read after the optimizer's step, instead of before it.
    """

    world_size: int
    samples: int
    steps: int = 1
    change: str = ""
    factor: float = 1024.0
    seed: int = 0
    batches: tuple[Any, ...] = field(default=(), compare=False)
    mesh: Mesh = ()
    apart: bool = False
    rewritten: bool = False

    @property
    def place(self) -> tuple[int, Mesh]:
        return self.world_size, self.mesh

    @property
    def described(self) -> dict[str, object]:
        case: dict[str, object] = {"world size": self.world_size}
        if self.mesh:
            case["mesh"] = described(self.mesh)
        if self.samples:
            case["samples"] = self.samples
        case["steps"] = self.steps
        case["batch"] = f"scaled by {self.factor:g}" if self.change == "scaled" else self.change or "as made"
        case["seed"] = self.seed
        return case
