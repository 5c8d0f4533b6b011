"""Run each check of a rank on several cases, and in groups of some ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mgpu_check.asserts.findings import Findings, run_all
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.collectives.cases import REDUCED, CollectiveCall, Message, messages_between
from mgpu_check.oracles.collectives.repeated_calls import assert_rounding_is_unbiased, groups_of, most_ranks
from mgpu_check.suite.collectives import functional, messages
from mgpu_check.suite.collectives.calls import assert_collectives_match
from mgpu_check.suite.collectives.groups import assert_mesh_matches, assert_subgroups_divide
from mgpu_check.torch_hooks.collective_table import TRANSFERS


def _some(rank: Rank, seed: int) -> list[tuple[int, ...]]:
    """Return two groups, or none of one or two ranks: the first lacks rank 0, so that numbers in it are no ranks."""
    missing = (0, 1 + seed % max(1, rank.size - 1))
    return [members for outside in missing for members in _without(rank, outside)]


def _without(rank: Rank, outside: int) -> list[tuple[int, ...]]:
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


def assert_messages_of_all_ways_arrive(rank: Rank, drawn: Sequence[Message], seed: int) -> None:
    """Assert that messages arrive: in batches, blocking and asynchronous, of devices and of the CPU, and in a group."""
    between = partial(messages_between, rank.size)
    placed = [message.between_ranks(rank.size) for message in drawn]
    large = [Message(0, rank.size - 1, 0, "int8", (1 << 20) + 3, seed)]
    cases: list[tuple[Any, ...]] = [
        (placed, "batched", "device"),
        ([message for message in placed if message.dtype in REDUCED], "flying", "cpu"),
        (between(seed, "device", tags=False, own=True), "batched", "device"),
        (between(seed + 3, "device", tags=False, alike=True), "batched", "device"),
        (between(seed + 1, "device", tags=False), "blocking", "device"),
        (between(seed, "cpu", tags=False), "batched", "cpu"),
        (between(seed + 1, "cpu", tags=True), "blocking", "cpu"),
        (between(seed + 2, "cpu", alike=True), "flying", "cpu"),
        ((large, "blocking", "device"), (large, "flying", "cpu"))[seed % 2],
    ]
    wanted = _some(rank, seed)[:1]
    with groups_of(rank, wanted) as groups:
        for members in wanted:
            for turn, (way, placement) in enumerate((("batched", "device"), ("flying", "cpu"), ("blocking", "device"))):
                inside = messages_between(len(members), seed, placement, tags=placement == "cpu")[turn::3]
                moved = [replace(sent, source=members[sent.source], target=members[sent.target]) for sent in inside]
                cases.append((moved, way, placement, members, groups[members]))
        run_all(partial(messages.assert_messages_arrive, rank, *case) for case in cases)


def assert_messages_from_any_source_arrive(
    rank: Rank, target: int, tag: int, elements: Sequence[int], outside: int
) -> None:
    """Assert that `recv` without a source returns the sender: for three dtypes, and in a group.
    Ranks from `target` on receive, under tags from `tag` on; each dtype has a number of elements."""
    cases = [
        ((target + turn) % rank.size, tag + turn, dtype, count, ())
        for turn, (dtype, count) in enumerate(zip(("float32", "int64", "bfloat16"), elements, strict=True))
    ]
    groups = [(members[target % len(members)], 1, "float32", 9, members) for members in _without(rank, outside)]
    run_all(partial(messages.assert_any_source_tells_the_sender, rank, *case) for case in (*cases, *groups))


def assert_objects_travel_on_all_ways(rank: Rank, root: int, drawn: Sequence[object], seed: int) -> None:
    """Assert that objects travel over the CPU, over devices, and in a group: drawn ones, and some of each kind."""
    checks = [partial(messages.assert_objects_travel, rank, root + turn, seed + turn) for turn in range(3)]
    checks.append(partial(messages.assert_objects_travel, rank, root, seed, backend="nccl"))
    checks += [
        partial(messages.assert_objects_travel, rank, root + 1, seed, members) for members in _some(rank, seed)[:1]
    ]
    run_all((partial(messages.assert_drawn_objects_travel, rank, root, drawn), *checks))


def assert_barriers_hold(rank: Rank, late: int, outside: int) -> None:
    """Assert that barriers of all kinds hold: with several ranks as the last, and in a group without `outside`."""
    forms: tuple[messages.BarrierForm, ...] = ("of devices", "of the CPU", "monitored", "asynchronous")
    last = late % rank.size
    cases: list[tuple[int, messages.BarrierForm, tuple[int, ...]]]
    cases = [(latecomer, forms[0], ()) for latecomer in sorted({0, rank.size - 1, last})]
    cases += [(last, form, ()) for form in forms[1:]]
    for members in _without(rank, outside):
        cases += [(members[late % len(members)], form, members) for form in forms[:3]]
    run_all(partial(messages.assert_barrier_holds, rank, *case) for case in cases)


def assert_functional_match_in_groups(rank: Rank, seed: int) -> None:
    """Assert that functional collectives match their models: for several dtypes, and in a group."""
    cases: list[tuple[tuple[int, ...], torch.dtype]]
    cases = [((), dtype) for dtype in (torch.float32, torch.int64, torch.bfloat16)]
    cases += [(members, torch.float32) for members in _some(rank, seed)[seed % 2 :][:1]]
    judges = ((members, partial(functional.judge_functional, dtype=dtype, seed=seed)) for members, dtype in cases)
    run_all(partial(functional.judged, rank, members, judge) for members, judge in judges)


def assert_differentiable_match_in_groups(rank: Rank, seed: int) -> None:
    """Assert that differentiable collectives match their models: of all ranks, and in groups."""
    run_all(
        partial(functional.assert_differentiable_match, rank, seed, members) for members in ((), *_some(rank, seed))
    )


def assert_coalesced_match_in_groups(rank: Rank, dtype: str, seed: int) -> None:
    """Assert that coalesced collectives match separate calls: of all ranks, and in a group."""
    judge = partial(functional.judge_coalesced, dtype=getattr(torch, dtype), seed=seed)
    run_all(partial(functional.judged, rank, members, judge) for members in ((), *_some(rank, seed)[:1]))


def assert_meshes_match(rank: Rank, shapes: Sequence[tuple[int, ...]]) -> None:
    """Assert that meshes of all these shapes match."""
    run_all(partial(assert_mesh_matches, rank, shape) for shape in shapes)


def assert_sums_are_unbiased(rank: Rank, seed: int) -> None:
    """Assert that the sums of each collective are unbiased, in each floating dtype with a bit left for fractions."""
    functions = [(name, "device") for name, row in TRANSFERS.items() if row.reduces] + [("all_reduce", "cpu")]
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    cases = itertools.product((dtype for dtype in dtypes if rank.size <= most_ranks(dtype)), functions)
    run_all(partial(assert_rounding_is_unbiased, rank, name, dtype, place, seed) for dtype, (name, place) in cases)
