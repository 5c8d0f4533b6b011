"""Check the subgroups that torch makes: each rank must get its own group, and all groups in order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.asserts.findings import on_any_rank
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.collectives.findings import WrongResult, raise_findings


def assert_subgroups_divide(rank: Rank) -> None:
    """Assert that subgroups divide the world as requested: each rank gets its own group and all groups in order. A
    collective.

    Covers `new_subgroups` of 1, 2 and half of the ranks, `new_subgroups_by_enumeration` of odd and even ranks, and
    `new_group` of ranks out of order. `new_group` must sort them, or keep their order with ``sort_ranks=False`` if
    torch supports it. Each rank must get the right numbers of all members, and collectives must follow their order.
    """
    everybody = list(range(rank.size))
    turns = [part for part in (everybody[1::2], everybody[::2]) if part]
    wanted: dict[str, tuple[list[list[int]], Callable[[], Any]]] = {
        "new_subgroups_by_enumeration": (turns, functools.partial(dist.new_subgroups_by_enumeration, turns))
    }
    for count in {1, 2, rank.size // 2}:
        if count and rank.size % count == 0:
            parts = [everybody[start : start + count] for start in everybody[::count]]
            wanted[f"new_subgroups of {count}"] = (parts, functools.partial(dist.new_subgroups, count))
    mixed = [number for part in turns for number in part]
    backwards = [part[::-1] for part in turns]
    wanted["new_group of ranks out of order"] = ([everybody], functools.partial(_new_groups, rank, [mixed]))
    for parts in ([mixed], backwards):
        kept = functools.partial(_new_groups, rank, parts, sort_ranks=False)
        wanted[f"new_group, sort_ranks=False, of {parts}"] = (parts, kept)
    findings: list[WrongResult] = []
    for what, (parts, make) in wanted.items():
        try:
            own, groups = make()
        except TypeError as refusal:
            if "sort_ranks" not in str(refusal):
                raise
            continue  # this version of torch lacks sort_ranks
        findings += [WrongResult(what, text) for text in _wrong(rank, parts, own, groups)]
        dist.destroy_process_group(own)
    raise_findings(findings, len(wanted), rank)


def _new_groups(rank: Rank, parts: Sequence[list[int]], **options: Any) -> tuple[Any, list[Any]]:
    """Make a group of each part; return this rank's group, and all groups."""
    groups = [dist.new_group(part, **options) for part in parts]
    return next(group for group, part in zip(groups, parts, strict=True) if rank.index in part), groups


def _wrong(rank: Rank, parts: Sequence[list[int]], own: Any, groups: Sequence[Any]) -> list[str]:
    place = next(number for number, part in enumerate(parts) if rank.index in part)
    members = dist.get_process_group_ranks(own)
    if on_any_rank(rank, members != parts[place]):
        # With wrong members a collective could hang, so all ranks leave it out.
        return [f"this rank's subgroup has the ranks {members}, expected {parts[place]}"] * (members != parts[place])
    mine = [number for number, group in enumerate(groups) if group is own]
    wrong = []
    if len(groups) != len(parts) or mine != [place]:
        wrong.append(f"this rank's own is at {mine} of {len(groups)} subgroups, expected at {place} of {len(parts)}")
    told = {
        "this rank's number": (dist.get_rank(own), members.index(rank.index)),
        "the size": (dist.get_world_size(own), len(members)),
        "get_global_rank": ([dist.get_global_rank(own, number) for number in range(len(members))], members),
        "get_group_rank": ([dist.get_group_rank(own, member) for member in members], list(range(len(members)))),
    }
    wrong += [f"{name} in {members} is {got}, expected {right}" for name, (got, right) in told.items() if got != right]
    gathered = torch.zeros(len(members), dtype=torch.int64, device=rank.device)
    dist.all_gather(list(gathered.chunk(len(members))), torch.tensor([rank.index], device=rank.device), group=own)
    entered = torch.zeros(rank.size, dtype=torch.int64, device=rank.device)
    entered[rank.index] = 1
    dist.all_reduce(entered, group=own)
    if entered.tolist() != [int(other in members) for other in range(rank.size)]:
        wrong.append(f"an all_reduce in the subgroup {members} does not sum exactly its members")
    elif gathered.tolist() != members:
        wrong.append(f"an all_gather in the subgroup {members} gives the ranks {gathered.tolist()}")
    return wrong
