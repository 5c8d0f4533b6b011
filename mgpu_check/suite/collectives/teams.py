"""Let the ranks of a group call collectives, on small whole numbers whose sums are exact, and compare the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional  # they have no public name yet

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.bounds import significand_bits
from mgpu_check.suite.collectives.exact import groups_of
from mgpu_check.suite.collectives.findings import WrongResult, raise_findings
from mgpu_check.torch_hooks.tensors import name_of

ROWS, _COLUMNS = 3, 4


def numbers_of(place: int, size: int, seed: int, dtype: torch.dtype, rows: int = ROWS) -> torch.Tensor:
    """Return a member's input, (rows * size, columns * size): whole numbers so small that `dtype` sums them exactly."""
    count = rows * size * _COLUMNS * size
    span = max(2, min(97, (2 ** min(significand_bits(dtype), 31) - 1) // size))
    values = (torch.arange(count) * 7 + place * 3 + seed) % span
    given: torch.Tensor = values.view(rows * size, -1).to(dtype)
    return given


@dataclass(frozen=True)
class Team:
    """The ranks that call collectives together, in ascending order: all ranks, or a group that contains this rank."""

    rank: Rank
    members: tuple[int, ...]
    group: Any

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def place(self) -> int:
        return self.members.index(self.rank.index)

    def roots(self, seed: int) -> list[int]:
        """Return up to two members whose place in the group equals their rank.

        Torch reads a root as a place in the group in some functions, and as a rank of the world in others.
        """
        able = [member for place, member in enumerate(self.members) if member == place]
        return sorted({able[(seed + turn) % len(able)] for turn in (0, 1)}) if able else []


def judged_by(rank: Rank, members: tuple[int, ...], judge: Callable[[Team, CallTally], None]) -> None:
    """Make a group of the members, let them run `judge` in it, and raise the errors. A collective of all ranks."""
    account = CallTally(rank, f", group {list(members)}" if members else "")
    members = members or tuple(range(rank.size))
    with groups_of(rank, [members]) as groups:
        if rank.index in members:
            judge(Team(rank, members, groups[members] or dist.group.WORLD), account)
    account.done()


class CallTally:
    def __init__(self, rank: Rank, where: str) -> None:
        self.rank, self.where, self.findings, self.calls = rank, where, list[WrongResult](), 0

    def compare(self, what: str, got: Any, right: torch.Tensor) -> None:
        self.calls += 1
        what += self.where
        if isinstance(got, functional.AsyncCollectiveTensor):
            got = got.trigger_wait()
        here = got.detach().cpu()
        if same_bits(right, here):
            return
        if right.shape != here.shape or right.dtype != here.dtype:
            shapes = [f"{tuple(one.shape)} {name_of(one.dtype)}" for one in (here, right)]
            self.findings.append(WrongResult(what, f"got {shapes[0]}, expected {shapes[1]}"))
            return
        wrong = (here != right).reshape(-1)
        self.findings.append(WrongResult.of(what, here.reshape(-1), right.reshape(-1), wrong))

    def done(self) -> None:
        raise_findings(self.findings, self.calls, self.rank)
