"""Run mechanisms of model parallelism, and compare what each rank has with one device."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.gradients import assert_gradients_agree
from mgpu_check.asserts.left_out import left_out
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.steps import full_precision
from mgpu_check.suite.parallelism.cases import MECHANISMS, MechanismCase
from mgpu_check.torch_hooks.tensors import copied


class Portion(NamedTuple):
    """A rank's part of a result: the indices `at` of dimension `dim` of the whole."""

    value: torch.Tensor
    dim: int
    at: Sequence[int] | torch.Tensor | slice

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same part of the whole result."""
        at = torch.arange(whole.shape[self.dim], device="cpu")[self.at] if isinstance(self.at, slice) else self.at
        return whole.index_select(self.dim, torch.as_tensor(at, dtype=torch.int64, device="cpu"))


Results = dict[str, torch.Tensor | Portion]
"""Results of a rank by name: whole, or its part."""


class DividedStep(ABC):
    """A case of a mechanism, with data that all ranks and the reference make alike."""

    def __init__(self, case: MechanismCase, ranks: int) -> None:
        self.case, self.ranks = case, ranks
        self.dtype: torch.dtype = getattr(torch, case.dtype)

    def __getitem__(self, size: str) -> int:
        found = self.case.sizes[size]
        assert isinstance(found, int), size
        return found

    def numbers(self, salt: int, *shape: int) -> torch.Tensor:
        """Return eighths from -1 to 1, float64 on the CPU. `salt` separates the tensors of a case."""
        generator = torch.Generator().manual_seed(self.case.seed * 64 + salt)
        return torch.randint(-8, 9, shape, generator=generator, device="cpu").double() / 8

    def tensors(self, dtype: torch.dtype, *shapes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return `numbers` of each shape, in a dtype."""
        return tuple(self.numbers(salt, *shape).to(dtype) for salt, shape in enumerate(shapes))

    def lacks(self, rank: Rank) -> str:
        """Return what these devices lack for the mechanism, or ""; the same on all ranks. A collective."""
        return ""

    @abstractmethod
    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Run the step on the CPU; return the whole results by name: outputs, losses, gradients."""

    @abstractmethod
    def divided(self, rank: Rank) -> Results:
        """Run the step with the recipe, in `dtype`; return what this rank has of each result. A collective."""


def total(own: torch.Tensor) -> torch.Tensor:
    """Return the sum of the ranks' parts of a loss. A collective."""
    found = own.detach().clone()
    dist.all_reduce(found)
    return found


def step_of(case: MechanismCase, ranks: int) -> DividedStep:
    """Return the step of a case, for a world of `ranks` ranks."""
    made: DividedStep = pkgutil.resolve_name(f"{__package__}.{MECHANISMS[case.name].where}")(case, ranks)
    return made


def tolerance_of(expected: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Return the tolerance of each result: 2^8 unit roundoffs of its largest element, or of 1.

    No result depends on more than some 2^6 roundings in sequence, each relative to a number that is at most some times
    as large as the result, or than 1. Exponents are at most some units: logits are shifted by their maximum.
    """
    return {
        name: 2.0**8 * unit_roundoff(dtype) * max(1.0, float(value.abs().max()) if value.numel() else 0.0)
        for name, value in expected.items()
    }


def assert_mechanisms_agree(rank: Rank, cases: Sequence[MechanismCase]) -> None:
    """Assert that each mechanism has the outputs, losses and gradients of one device. A collective."""
    with Findings() as findings:
        for case in cases:
            step = step_of(case, rank.size)
            if lack := step.lacks(rank):
                left_out(case.name, lack)
                continue
            with full_precision():
                got = step.divided(rank)
            whole = step.undivided(torch.float64)
            tolerance = tolerance_of(whole, step.dtype)
            parts = {name: one for name, one in got.items() if isinstance(one, Portion)}
            expected = {name: parts[name].of(value) if name in parts else value for name, value in whole.items()}
            sizes = ", ".join(f"{name} {value}" for name, value in case.sizes.items())
            with findings.collected():
                assert_gradients_agree(
                    {name: copied(one.value if isinstance(one, Portion) else one) for name, one in got.items()},
                    expected,
                    tolerance=tolerance,
                    rank=rank.index,
                    what=f"{case.name} ({sizes}, {case.dtype}) on {rank.size} ranks, {rank.device}",
                )
            if findings.enough(rank):
                break
