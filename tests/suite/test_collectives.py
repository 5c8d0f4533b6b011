"""The check of collectives: its data are exact, and a fault in each operation is seen, and located by the
data."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mgpu_check.acceptance.collectives.checks import examine_collectives, observations_of_views, time_collectives
from mgpu_check.acceptance.collectives.test_collectives import covering_groups, roots_of
from mgpu_check.acceptance.faults import planted_from
from mgpu_check.acceptance.verdict import explain
from mgpu_check.devices.observations import Part, Subject
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import CollectiveMismatch
from mgpu_check.oracles.collectives.repeated_calls import Cases, RepeatedCollective, Terms, View, WrongIteration
from mgpu_check.suite.collectives.calls import assert_subgroups_divide
from mgpu_check.torch_hooks.collective_table import TRANSFERS
from mgpu_check.torch_hooks.tensors import as_bits

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
REDUCTIONS = ("sum", "avg", "product", "min", "max")
COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_terms_have_one_result_in_every_order(dtype):
    index, order = torch.arange(70, 600), random.Random(dtype)
    for count, reduction in itertools.product((1, 2, 3, 4, 8, 16), REDUCTIONS):
        if reduction == "avg" and "float" not in dtype:
            continue
        terms = Terms(reduction, getattr(torch, dtype), count, seed=3)
        parts = [terms.of_rank(rank, index) for rank in range(count)]
        right = terms.result(index)
        for _ in range(3):
            shuffled = order.sample(parts, count)
            got = shuffled[0].clone()
            for part in shuffled[1:]:
                got = COMBINE[reduction](got, part)
            if reduction == "avg":
                got = (got.double() / count).to(got.dtype)
            assert torch.equal(as_bits(got), as_bits(right)), (count, reduction)
        if reduction == "sum" and count in (2, 4, 8):
            assert terms.who(index[:50], (right - parts[1])[:50]) == ("lacks the term of", 1)
            if dtype == "float64":  # others have no room for it
                assert terms.who(index[:50], (right + parts[0])[:50]) == ("has twice the term of", 0)
            assert terms.who(index[:50], parts[1][:50]) == (
                ("is only the term of", 1) if count > 2 else ("lacks the term of", 0)
            )


REDUCING = tuple(name for name, transfer in TRANSFERS.items() if transfer.reduces)
COPYING = (*(name for name in TRANSFERS if name not in REDUCING), "send_recv")
ALL = Cases((
    *(
        RepeatedCollective(operation, dtype, 4000, (), reduction, root, 2, seed=5)
        for root, (operation, reduction) in enumerate(itertools.product(REDUCING, REDUCTIONS))
        for dtype in (("float32", "bfloat16") if reduction == "avg" else ("float16", "int8"))
    ),
    *(RepeatedCollective(operation, dtype, 4003, root=2, iterations=3) for operation in COPYING for dtype in ("float64", "uint8")),
    RepeatedCollective("all_reduce", "bfloat16", 4000, (0, 1, 3), "avg", iterations=2),
    *(RepeatedCollective("send_recv", "float32", 4000, members, iterations=3) for members in ((0, 1, 3), (1, 2))),
    *(RepeatedCollective("all_gather", "float32", 4000, pair) for pair in itertools.combinations(range(4), 2)),
))  # fmt: skip


def spoiled(rank, text, cases):
    from mgpu_check.simulated.hardware import Hardware, planted

    fault = planted_from(text) if text else None
    with planted(Hardware([fault.fault.defect(fault.parameters)] if fault else [], 16 << 20)):
        return examine_collectives(rank, cases)


def spoiled_by_each(rank, texts, cases):
    return [spoiled(rank, text, cases) for text in texts]


def test_all_operations_are_right_on_right_hardware(ranks):
    found, *others = ranks.run(spoiled, "", ALL, size=4)
    assert others == [[], [], []]
    assert [(entry.case, entry.seen) for entry in found if entry.outcome != "passed"] == []
    groups = [entry for entry in found if entry.subject.kind == "group"]
    assert len(groups) == len(ALL.all) and all(entry.work.operations and entry.work.bytes > 3900 for entry in groups)
    pairs = {entry.subject.members for entry in found if entry.subject.kind == "copy"}
    assert pairs == set(itertools.permutations(range(4), 2))
    # In a world without all members of a group, as in a second look at fewer GPUs, the others are called.
    fewer = ranks.run(spoiled, "", Cases(ALL.all[-6:]), devices=[3, 1])
    assert [entry.subject for entry in fewer[0]] == [Subject("group", (0, 1))]


@pytest.mark.parametrize("count", [3, 4, 5, 8, 9])
def test_each_operation_is_tried_with_each_gpu_in_groups_of_each_size(count):
    """And with a root that leaves a result to each of them."""
    for turn in range(count):
        groups = covering_groups(count, turn)
        assert {len(members) for members in groups} == {2, 3, count // 2} - {1, count}
        for size in {len(members) for members in groups}:
            assert set(range(count)) == {rank for members in groups if len(members) == size for rank in members}
    for operation, row in TRANSFERS.items():
        takers = {rank for root in roots_of(operation, 3) for rank in range(3) if row.takes(rank, root)}
        assert takers == {0, 1, 2}, operation


def test_a_fault_at_one_exact_size_is_seen_whatever_the_number_of_gpus(ranks):
    cases = Cases(tuple(RepeatedCollective("all_reduce", "float32", 1 << 20, seed=seed) for seed in range(2)))
    found, *_ = ranks.run(spoiled, "all-reduce-rare:every=2", cases, size=3)
    assert [entry.outcome for entry in found] == ["passed", "failed"]
    assert {entry.work.bytes for entry in found} == {1 << 20}


SPOILED = [
    ("collective-wrong", (), "result is wrong|are wrong"),
    ("all-reduce-dtype:dtype=float16", ("all_reduce",), "wrong on rank 2"),
    ("all-gather-swapped", ("all_gather",), "other data"),
    ("reduce-scatter-lanes", ("reduce_scatter",), "inverted|other values"),
    ("broadcast-nan", ("broadcast",), "wrong on rank 2"),
    ("all-to-all-wrong", ("all_to_all",), "wrong on rank 2"),
    ("copy-zeros", ("all_to_all", "send_recv", "all_gather"), "zeros"),
    ("copy-out", ("all_reduce",), "wrong on rank"),
]


@pytest.mark.slow
def test_each_wrong_collective_is_seen_and_the_right_gpu_accused(ranks):
    several = Cases((
        *(RepeatedCollective("all_reduce", dtype, 4000, iterations=2) for dtype in ("float32", "float16")),
        *(RepeatedCollective(operation, "float32", 8192, root=i, iterations=3) for i, operation in enumerate(REDUCING + COPYING)),
        *(
            RepeatedCollective(operation, "float32", 4000, pair)
            for operation in ("all_reduce", "all_gather", "broadcast")
            for pair in itertools.combinations(range(4), 2)
        ),
    ))  # fmt: skip
    each, *_ = ranks.run(spoiled_by_each, [text for text, *_ in SPOILED], several, size=4)
    for found, (text, operations, said) in zip(each, SPOILED, strict=True):
        failed = [entry for entry in found if entry.outcome == "failed"]
        wanted = planted_from(text).parts
        accused = set(explain(found, [0] * 4).parts)
        if text == "all-to-all-wrong":  # its data point at giver and taker, whom a second look tells apart
            assert all(set(entry.suspects) >= set(wanted[0].members) for entry in failed), failed
            assert accused <= set(wanted), failed
        else:
            assert accused == set(wanted), (text, failed)
        assert {entry.evidence["collective"]["operation"] for entry in failed} >= set(operations), text
        assert any(re.search(said, entry.seen) for entry in failed), (text, [entry.seen for entry in failed])


def views(wrong, members=(0, 1, 2, 3), checked=4):
    """Observations of ranks: rank -> sources of the wrong data."""
    seen = []
    for rank in members:
        found = tuple(WrongIteration(1, 5, 100, 7, "it holds zeros", tuple(wrong[rank])) for _ in range(rank in wrong))
        seen.append([View(0, rank, members, 400, checked, len(found), found)])
    return seen


SUSPECTS = [
    ("all_to_all", {2: [0]}, (0, 2)),
    ("all_to_all", {2: [0, 1, 3]}, (2,)),
    ("scatter", {0: [1], 2: [1]}, (1,)),
    ("all_to_all", {0: [1], 2: [3]}, ()),
    ("all_reduce", {0: [3], 1: [3], 2: [3], 3: [3]}, (3,)),
    ("all_reduce", {0: [], 1: [], 2: [], 3: []}, ()),
    ("all_reduce", {0: [3], 1: [], 2: [3], 3: [3]}, ()),
    ("all_reduce", {1: []}, (1,)),
    ("all_gather", {1: [0, 3]}, (1,)),
    ("reduce", {1: []}, ()),
    ("broadcast", {3: [0]}, ()),
]


@pytest.mark.parametrize(("operation", "wrong", "suspects"), SUSPECTS)
def test_suspects_are_whom_the_data_point_at(operation, wrong, suspects):
    (found,) = observations_of_views([RepeatedCollective(operation, "float32", 400, iterations=4)], views(wrong))
    assert (found.outcome, found.subject, found.suspects) == ("failed", Subject("group", (0, 1, 2, 3)), suspects)
    assert "1 of 4 results are wrong; in iteration 1 5 of 100 from 7 on: it holds zeros" in found.seen
    assert found.evidence["wrong"][0]["rank"] == min(wrong)


def test_the_root_is_told_as_a_rank_of_the_group():
    (found,) = observations_of_views([RepeatedCollective("broadcast", "float32", 400, root=18)], views({1: [2]}))
    assert ", root 2," in found.case and found.evidence["collective"]["root"] == 2


def test_of_sends_the_pair_is_named():
    found = observations_of_views([RepeatedCollective("send_recv", "float32", 400, iterations=4)], views({2: [0]}))
    assert [(entry.outcome, entry.subject) for entry in found] == [("failed", Subject("copy", (0, 2)))]
    assert set(explain(found, [0] * 4).parts) <= {Part("link", (0, 2)), Part("gpu", (0,)), Part("gpu", (2,))}


def test_a_call_is_timed_on_those_that_take_part(ranks):
    def timed(rank):
        from mgpu_check.simulated.hardware import Hardware, planted

        with planted(Hardware([], 16 << 20)):
            cases = [
                RepeatedCollective("all_reduce", "float32", 1 << 16, iterations=2),
                RepeatedCollective("broadcast", "int8", 64, (1, 2)),
            ]
            return time_collectives(rank, cases, 3)

    found = ranks.run(timed, size=3)
    assert [[len(times) for times in seen] for seen in found] == [[3, 0], [3, 3], [3, 3]]
    assert all(time > 0 for seen in found for times in seen for time in times)


@pytest.fixture
def last_of_many() -> Iterator[Rank]:
    """The last of 64 ranks, whose collectives leave what each has: the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=63, world_size=64)
    yield Rank(63, 64, 63, 0, torch.device("cpu"))
    dist.destroy_process_group()


def test_a_sum_that_lacks_members_is_named_in_a_large_world(last_of_many: Rank) -> None:
    with pytest.raises(CollectiveMismatch, match=r"new_subgroups of 32: .*does not sum exactly its members"):
        assert_subgroups_divide(last_of_many)
