"""Check the subgroups that torch makes, with the right members in order; choose the groups of other checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.asserts.findings import Findings, on_any_rank
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.collectives.cases import CollectiveCall, WrongResult, raise_findings
from mgpu_check.suite.collectives.calls import assert_collectives_match


def assert_subgroups_divide(rank: Rank) -> None:
    """Assert that subgroups divide the world as requested: each rank gets its own, and all in order. A collective.
    `new_group` must sort ranks that are out of order, or keep their order with ``sort_ranks=False`` if torch has it."""
    everybody = list(range(rank.size))
    turns = [ranks for ranks in (everybody[1::2], everybody[::2]) if ranks]
    wanted: dict[str, tuple[list[list[int]], Callable[[], Any]]] = {
        "new_subgroups_by_enumeration": (turns, functools.partial(dist.new_subgroups_by_enumeration, turns))
    }
    for count in {1, 2, rank.size // 2}:
        if count and rank.size % count == 0:
            partition = [everybody[start : start + count] for start in everybody[::count]]
            wanted[f"new_subgroups of {count}"] = (partition, functools.partial(dist.new_subgroups, count))
    mixed = [number for ranks in turns for number in ranks]
    backwards = [ranks[::-1] for ranks in turns]
    wanted["new_group of ranks out of order"] = ([everybody], functools.partial(_new_groups, rank, [mixed]))
    for partition in ([mixed], backwards):
        kept = functools.partial(_new_groups, rank, partition, sort_ranks=False)
        wanted[f"new_group, sort_ranks=False, of {partition}"] = (partition, kept)
    findings: list[WrongResult] = []
    for label, (partition, make) in wanted.items():
        try:
            own, groups = make()
        except TypeError as refusal:
            if "sort_ranks" not in str(refusal):
                raise
            continue  # this version of torch lacks sort_ranks
        findings += [WrongResult(label, text) for text in _wrong(rank, partition, own, groups)]
        dist.destroy_process_group(own)
    raise_findings(findings, len(wanted), rank)


def _new_groups(rank: Rank, partition: Sequence[list[int]], **options: Any) -> tuple[Any, list[Any]]:
    groups = [dist.new_group(ranks, **options) for ranks in partition]
    return next(group for group, ranks in zip(groups, partition, strict=True) if rank.index in ranks), groups


def _called(rank: Rank, group: Any, count: int) -> tuple[list[int], list[int]]:
    """Return 1 for each rank that an all_reduce of a group sums, and the ranks in the order of its all_gather."""
    entered = torch.zeros(rank.size, dtype=torch.int64, device=rank.device)
    entered[rank.index] = 1
    dist.all_reduce(entered, group=group)
    gathered = torch.zeros(count, dtype=torch.int64, device=rank.device)
    dist.all_gather(list(gathered.chunk(count)), torch.tensor([rank.index], device=rank.device), group=group)
    return entered.tolist(), gathered.tolist()


def _wrong(rank: Rank, partition: Sequence[list[int]], own: Any, groups: Sequence[Any]) -> list[str]:
    position = next(number for number, ranks in enumerate(partition) if rank.index in ranks)
    members, own_ranks = dist.get_process_group_ranks(own), partition[position]
    if on_any_rank(rank, members != own_ranks):
        # With wrong members a collective could hang, so all ranks leave it out.
        return [f"this rank's subgroup has the ranks {members}, expected {own_ranks}"] * (members != own_ranks)
    mine = [number for number, group in enumerate(groups) if group is own]
    errors = []
    if len(groups) != len(partition) or mine != [position]:
        of = f"of {len(groups)} subgroups, expected at {position} of {len(partition)}"
        errors.append(f"this rank's own is at {mine} {of}")
    answers = {
        "this rank's number": (dist.get_rank(own), members.index(rank.index)),
        "the size": (dist.get_world_size(own), len(members)),
        "get_global_rank": ([dist.get_global_rank(own, number) for number in range(len(members))], members),
        "get_group_rank": ([dist.get_group_rank(own, member) for member in members], list(range(len(members)))),
    }
    for name, (got, expected) in answers.items():
        errors += [f"{name} in {members} is {got}, expected {expected}"] * (got != expected)
    entered, gathered = _called(rank, own, len(members))
    if entered != [int(index in members) for index in range(rank.size)]:
        errors.append(f"an all_reduce in the subgroup {members} does not sum exactly its members")
    elif gathered != members:
        errors.append(f"an all_gather in the subgroup {members} gives the ranks {gathered}")
    return errors


def some_groups(rank: Rank, seed: int) -> list[tuple[int, ...]]:
    """Return two groups, or none of one or two ranks: the first lacks rank 0, so that numbers in it are no ranks."""
    missing = (0, 1 + seed % max(1, rank.size - 1))
    return [members for outside in missing for members in without(rank, outside)]


def without(rank: Rank, outside: int) -> list[tuple[int, ...]]:
    """Return the group of all ranks but one, or none in a world of one or two."""
    everybody = range(rank.size)
    return [tuple(member for member in everybody if member != outside % rank.size)] if rank.size > 2 else []


def assert_groups_match(rank: Rank, wanted: Sequence[CollectiveCall]) -> None:
    """Assert that subgroups divide the world, and that collectives in groups match their models.
    Collectives are left out if a subgroup is wrong: with wrong members or roots they could hang."""
    with Findings() as findings:
        with findings.collected():
            assert_subgroups_divide(rank)
        if not findings.anywhere(rank):
            assert_collectives_match(rank, wanted)
