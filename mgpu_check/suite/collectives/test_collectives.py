"""Collectives: each leaves the result of a single-device model on every rank, and changes nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.collectives import call_strategies as calls
from mgpu_check.suite.collectives import program_strategies as steps
from mgpu_check.suite.collectives.cases import CollectiveCall
from mgpu_check.suite.collectives.findings import assert_shared
from mgpu_check.suite.collectives.program_cases import CollectiveStep
from mgpu_check.suite.common.budget import examples

if TYPE_CHECKING:
    from mgpu_check import Ranks

PLACES = st.sampled_from(("device", "cpu"))


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_all_reduce_of_every_dtype(ranks: Ranks, size: int, seed: int) -> None:
    """`all_reduce` is right for every operation and dtype, also at the limits of the dtype."""
    assert_shared(
        ranks.run("mgpu_check.suite.collectives.calls:assert_collectives_match", calls.all_reduces(seed), size=size)
    )


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_reductions_of_every_dtype(ranks: Ranks, size: int, seed: int) -> None:
    """`reduce` and `reduce_scatter` are right for every operation and dtype, also at the limits of the dtype."""
    ranks.run("mgpu_check.suite.collectives.calls:assert_collectives_match", calls.other_reductions(seed), size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_reductions_as_ieee_says(ranks: Ranks, size: int, seed: int) -> None:
    """NaN, infinities, zeros of both signs and subnormals are reduced according to IEEE 754."""
    assert_shared(
        ranks.run("mgpu_check.suite.collectives.calls:assert_collectives_match", calls.special(seed), size=size)
    )


@pytest.mark.gpus(least=3)
@examples(6, quick=1)
@given(size=calls.worlds(least=3), seed=calls.seeds)
def test_rounding_of_reductions(ranks: Ranks, size: int, seed: int) -> None:
    """Sums, means and products are within the derived bound, and have the same bits on all ranks."""
    assert_shared(
        ranks.run("mgpu_check.suite.collectives.calls:assert_collectives_match", calls.rounding(seed), size=size)
    )


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_copies_of_every_dtype(ranks: Ranks, size: int, seed: int) -> None:
    """Every collective that copies keeps every bit of every dtype, and delivers it to the right ranks."""
    ranks.run("mgpu_check.suite.collectives.calls:assert_collectives_match", calls.copies(seed), size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_sizes(ranks: Ranks, size: int, seed: int) -> None:
    """Every collective is right with no elements, with few, and with about 4,096, 64 Ki and 1 Mi elements."""
    ranks.run("mgpu_check.suite.collectives.calls:assert_collectives_match", calls.sizes(seed), size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_layouts(ranks: Ranks, size: int, seed: int) -> None:
    """Collectives on views, in place and with uneven parts are right or refused, and change no other memory."""
    ranks.run("mgpu_check.suite.collectives.calls:assert_collectives_match", calls.layouts(seed), size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_asynchronous_collectives(ranks: Ranks, size: int, seed: int) -> None:
    """Several collectives in flight are right after they are waited for, in any order."""
    ranks.run("mgpu_check.suite.collectives.calls:assert_collectives_match", calls.asynchronous(seed), size=size)


@examples(12, quick=2)
@given(data=st.data(), size=calls.worlds(), seed=calls.seeds)
def test_groups(ranks: Ranks, data: st.DataObject, size: int, seed: int) -> None:
    """Collectives in a group involve its members only, other ranks keep their data, and new subgroups have the right members."""
    groups = data.draw(calls.partitions(size), label="groups")
    ranks.run(_in_groups, calls.in_groups(groups, seed), size=size)


def _matching(rank: Rank, wanted: list[CollectiveCall]) -> list[tuple[str, str]]:
    from mgpu_check.suite.collectives.calls import assert_collectives_match

    return assert_collectives_match(rank, wanted)


def _in_groups(rank: Rank, wanted: list[CollectiveCall]) -> None:
    from mgpu_check.asserts.findings import Findings
    from mgpu_check.suite.collectives.subgroups import assert_subgroups_divide

    with Findings() as findings:
        with findings.collected():
            _matching(rank, wanted)
        with findings.collected():
            assert_subgroups_divide(rank)


@pytest.mark.gpus(least=2)
@examples(6, quick=1)
@given(size=calls.worlds(least=2), seed=calls.seeds)
def test_messages(ranks: Ranks, size: int, seed: int) -> None:
    """Messages arrive whole, once, in order and under their tag: blocking, asynchronous, and in batches."""
    ranks.run(_messages, seed, size=size)


@pytest.mark.gpus(least=2)
@examples(6, quick=1)
@given(size=calls.worlds(least=2), seed=calls.seeds)
def test_messages_from_any_source(ranks: Ranks, size: int, seed: int) -> None:
    """`recv` without a source takes each message once, and returns the rank that sent it."""
    ranks.run(_any_source, seed, size=size)


@examples(8, quick=2)
@given(size=calls.worlds(), seed=calls.seeds)
def test_object_collectives(ranks: Ranks, size: int, seed: int) -> None:
    """Collectives of Python objects deliver equal objects to the right ranks, for any size and kind."""
    ranks.run(_objects, seed, size=size)


@pytest.mark.gpus(least=2)
@examples(6, quick=1)
@given(size=calls.worlds(least=2), seed=calls.seeds)
def test_barriers(ranks: Ranks, size: int, seed: int) -> None:
    """No rank leaves `barrier`, or `monitored_barrier`, before the last one has entered it."""
    ranks.run(_barriers, seed, size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_functional_collectives(ranks: Ranks, size: int, seed: int) -> None:
    """Functional collectives return the results of their models, along each dimension, and leave their input unchanged."""
    ranks.run(_functional, seed, size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_differentiable_collectives(ranks: Ranks, size: int, seed: int) -> None:
    """Differentiable collectives give the results and gradients of the same computation in one process."""
    ranks.run(_differentiable, seed, size=size)


@examples(8, quick=2)
@given(size=calls.worlds(), seed=calls.seeds)
def test_coalesced_collectives(ranks: Ranks, size: int, seed: int) -> None:
    """Coalesced collectives give the same results as separate calls for each tensor."""
    ranks.run(_coalesced, seed, size=size)


@examples(8, quick=2)
@given(size=calls.worlds())
def test_device_meshes(ranks: Ranks, size: int) -> None:
    """In a device mesh each rank has the right coordinates, and collectives along a dimension involve the right ranks."""
    ranks.run(_meshes, steps.mesh_shapes(size), size=size)


@examples(24, quick=4)
@given(size=calls.worlds(), program=steps.programs(), dtype=st.sampled_from(("int64", "int32", "uint8")), place=PLACES)
def test_programs_of_collectives(
    ranks: Ranks, size: int, program: list[CollectiveStep], dtype: str, place: str
) -> None:
    """After each step of a program of collectives, all tensors of all ranks match a model in one process."""
    ranks.run(_program, program, dtype, place, size=size)


@examples(6, quick=1)
@given(seed=calls.seeds)
def test_world_of_one(ranks: Ranks, seed: int) -> None:
    """In a world of one rank every collective leaves the data of the rank unchanged."""
    alone = [*calls.all_reduces(seed), *calls.copies(seed), *calls.special(seed)]
    ranks.run("mgpu_check.suite.collectives.calls:assert_collectives_match", alone, size=1)


@pytest.mark.gpus(least=2)
@examples(6, quick=1)
@given(size=calls.worlds(least=2), seed=calls.seeds)
def test_bias_of_rounding(ranks: Ranks, size: int, seed: int) -> None:
    """Sums round to nearest, without a bias towards zero or away from it (false alarms: below 1 in 10^9)."""
    ranks.run(_unbiased, seed, size=size)


def _some(rank: Rank, seed: int) -> list[tuple[int, ...]]:
    """Return two groups of at least two ranks, or none in a world of one or two.

    The first group leaves out rank 0, so that every member has another rank in the group than in the world. The second leaves
    out another rank.
    """
    missing = (0, 1 + seed % max(1, rank.size - 1))
    everybody = range(rank.size)
    return [tuple(one for one in everybody if one != other) for other in missing] if rank.size > 2 else []


def _messages(rank: Rank, seed: int) -> None:
    from mgpu_check.asserts.findings import Findings
    from mgpu_check.suite.collectives.messages import assert_messages_arrive

    with Findings() as findings:
        for way, place, messages in (
            ("batched", "device", steps.messages(rank.size, seed, "device", tags=False)),
            ("batched", "device", steps.messages(rank.size, seed + 3, "device", tags=False, alike=True)),
            ("blocking", "device", steps.messages(rank.size, seed + 1, "device", tags=False)),
            ("batched", "cpu", steps.messages(rank.size, seed, "cpu", tags=False)),
            ("blocking", "cpu", steps.messages(rank.size, seed + 1, "cpu", tags=True)),
            ("flying", "cpu", steps.messages(rank.size, seed + 2, "cpu", alike=True)),
        ):
            with findings.collected():
                assert_messages_arrive(rank, messages, way, place)


def _any_source(rank: Rank, seed: int) -> None:
    from mgpu_check.asserts.findings import Findings
    from mgpu_check.suite.collectives.messages import assert_any_source_tells_the_sender

    with Findings() as findings:
        for turn, dtype in enumerate(("float32", "int64", "bfloat16")):
            target = (seed + turn) % rank.size
            with findings.collected():
                assert_any_source_tells_the_sender(rank, target, seed % 7 + turn, dtype, (seed * 3 + turn) % 50 + 1)
        for others in _some(rank, seed)[:1]:
            with findings.collected():
                assert_any_source_tells_the_sender(rank, others[seed % len(others)], 1, "float32", 9, others)


def _objects(rank: Rank, seed: int) -> None:
    import torch.distributed as dist

    from mgpu_check.asserts.findings import Findings
    from mgpu_check.suite.collectives.objects import assert_objects_travel

    with Findings() as findings:
        for turn in range(3):
            with findings.collected():
                assert_objects_travel(rank, seed + turn)
        over_devices = dist.new_group(backend="nccl")
        with findings.collected():
            assert_objects_travel(rank, seed, over_devices)
        dist.destroy_process_group(over_devices)


def _barriers(rank: Rank, seed: int) -> None:
    from mgpu_check.asserts.findings import Findings
    from mgpu_check.suite.collectives.objects import BarrierKind, assert_barrier_holds

    some = seed % rank.size
    barriers: list[tuple[int, BarrierKind]] = [(late, "of devices") for late in sorted({0, rank.size - 1, some})]
    kinds: tuple[BarrierKind, ...] = ("of devices", "of the CPU", "monitored", "asynchronous")
    with Findings() as findings:
        for late, kind in (*barriers, *((some, kind) for kind in kinds[1:])):
            with findings.collected():
                assert_barrier_holds(rank, late, kind)
        for members in _some(rank, seed)[:1]:
            for kind in kinds[:3]:
                with findings.collected():
                    assert_barrier_holds(rank, members[seed % len(members)], kind, members)


def _functional(rank: Rank, seed: int) -> None:
    import torch

    from mgpu_check.asserts.findings import Findings
    from mgpu_check.suite.collectives.functional import assert_functional_match

    with Findings() as findings:
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            with findings.collected():
                assert_functional_match(rank, dtype, seed)
        for members in _some(rank, seed)[seed % 2 :][:1]:
            with findings.collected():
                assert_functional_match(rank, torch.float32, seed, members)


def _differentiable(rank: Rank, seed: int) -> None:
    from mgpu_check.asserts.findings import Findings
    from mgpu_check.suite.collectives.functional import assert_differentiable_match

    with Findings() as findings:
        for members in ((), *_some(rank, seed)):
            with findings.collected():
                assert_differentiable_match(rank, seed, members)


def _coalesced(rank: Rank, seed: int) -> None:
    from mgpu_check.asserts.findings import Findings
    from mgpu_check.suite.collectives.functional import assert_coalesced_match

    with Findings() as findings:
        for members in ((), *_some(rank, seed)[:1]):
            with findings.collected():
                assert_coalesced_match(rank, seed, members)


def _meshes(rank: Rank, shapes: list[tuple[int, ...]]) -> None:
    from mgpu_check.asserts.findings import Findings
    from mgpu_check.suite.collectives.meshes import assert_mesh_matches

    with Findings() as findings:
        for shape in shapes:
            with findings.collected():
                assert_mesh_matches(rank, shape)


def _program(rank: Rank, program: list[CollectiveStep], dtype: str, place: str) -> None:
    import torch

    from mgpu_check.suite.collectives.programs import assert_program_matches

    assert_program_matches(rank, program, getattr(torch, dtype), place)


def _unbiased(rank: Rank, seed: int) -> None:
    import torch

    from mgpu_check.asserts.findings import Findings
    from mgpu_check.suite.collectives.biased_rounding import assert_rounding_is_unbiased, most_ranks

    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    with Findings() as findings:
        for dtype in (one for one in dtypes if rank.size <= most_ranks(one)):
            for function, place in (
                ("all_reduce", "device"),
                ("all_reduce", "cpu"),
                ("reduce", "device"),
                ("reduce_scatter_tensor", "device"),
            ):
                with findings.collected():
                    assert_rounding_is_unbiased(rank, function, dtype, place, seed)
