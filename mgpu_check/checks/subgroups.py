"""Subgroups that torch makes of the world: each rank is told its own, and all of them in order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.checks.collective_findings import WrongResult, raise_findings
from mgpu_check.checks.findings import on_any_rank
from mgpu_check.rank_side.rank import Rank

__all__ = ["assert_subgroups_divide"]


def assert_subgroups_divide(rank: Rank) -> None:
    """Assert that subgroups divide the world as asked: each rank gets its own, and all of them in order. A collective.

    By `new_subgroups` of 1, 2 and half of the ranks, and by `new_subgroups_by_enumeration` of odd and of even ranks.

    Raises:
        CollectiveMismatch: with all that went wrong on this rank.
    """
    __tracebackhide__ = True
    everybody = list(range(rank.size))
    turns = [part for part in (everybody[1::2], everybody[::2]) if part]
    wanted: dict[str, tuple[list[list[int]], Callable[[], Any]]] = {
        "new_subgroups_by_enumeration": (turns, functools.partial(dist.new_subgroups_by_enumeration, turns))
    }
    for count in {1, 2, rank.size // 2}:
        if count and rank.size % count == 0:
            parts = [everybody[start : start + count] for start in everybody[::count]]
            wanted[f"new_subgroups of {count}"] = (parts, functools.partial(dist.new_subgroups, count))
    findings: list[WrongResult] = []
    for what, (parts, make) in wanted.items():
        own, groups = make()
        findings += [WrongResult(what, text) for text in _wrong(rank, parts, own, groups)]
        dist.destroy_process_group(own)
    raise_findings(findings, len(wanted), rank)


def _wrong(rank: Rank, parts: Sequence[list[int]], own: Any, groups: Sequence[Any]) -> list[str]:
    place = next(number for number, part in enumerate(parts) if rank.index in part)
    members = dist.get_process_group_ranks(own)
    if on_any_rank(rank, members != parts[place]):
        # A collective of others might never end; so all leave it out.
        return [f"this rank's subgroup has the ranks {members}, expected {parts[place]}"] * (members != parts[place])
    mine = [number for number, group in enumerate(groups) if group is own]
    wrong = []
    if len(groups) != len(parts) or mine != [place]:
        wrong.append(f"this rank's own is at {mine} of {len(groups)} subgroups, expected at {place} of {len(parts)}")
    entered = torch.zeros(rank.size, dtype=torch.int64, device=rank.device)
    entered[rank.index] = 1
    dist.all_reduce(entered, group=own)
    if entered.tolist() != [int(other in members) for other in range(rank.size)]:
        wrong.append(f"an all_reduce in the subgroup {members} adds up what ranks outside of it have, or not all")
    return wrong
