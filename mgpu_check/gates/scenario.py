"""One case on which the gate tries a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mgpu_check.gates.meshes import Mesh, described

__all__ = ["CHANGES", "Scenario"]

CHANGES = ("scaled", "ragged", "sorted", "duplicated", "permuted")
"""What can be done to a batch; see `mgpu_check.gates.batches`."""


@dataclass(frozen=True)
class Scenario:
    """One case.

    Attributes:
        world_size: number of ranks.
        samples: in each global batch; in the first, where batches are drawn.
        steps: how often the step is called, each time with another batch.
        change: one of `CHANGES`, or "" for batches as they are made.
        factor: of "scaled" batches.
        seed: of everything random.
        batches: those that were drawn, where the user gives a strategy.
        mesh: axes of the mesh and their sizes, where the user gives meshes.
        apart: the elements of parameters are made distinct, so that slices of them are told by their values.
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

    @property
    def place(self) -> tuple[int, Mesh]:
        """World size, and mesh."""
        return self.world_size, self.mesh

    @property
    def described(self) -> dict[str, object]:
        """Its description in words, for a report."""
        case: dict[str, object] = {"world size": self.world_size}
        if self.mesh:
            case["mesh"] = described(self.mesh)
        if self.samples:
            case["samples"] = self.samples
        case["steps"] = self.steps
        case["batch"] = f"scaled by {self.factor:g}" if self.change == "scaled" else self.change or "as made"
        case["seed"] = self.seed
        return case
