"""Collectives: each leaves the result of a single-device model on every rank, and changes nothing else.

`strategies` lists the calls of an example: every dtype, operation and size.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.oracles.collectives.cases import CollectiveStep, Message, assert_shared
from mgpu_check.oracles.strategies import MORE, examples
from mgpu_check.plugin.ranks import Ranks
from mgpu_check.suite.collectives import strategies as calls

CHECKS = "mgpu_check.suite.collectives"
MATCH = f"{CHECKS}.calls:assert_collectives_match"
PLACES = st.sampled_from(("device", "cpu"))


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_all_reduce_of_every_dtype(ranks: Ranks, size: int, seed: int) -> None:
    """`all_reduce` is right for every operation and dtype, also at the limits of the dtype."""
    assert_shared(ranks.run(MATCH, calls.all_reduces(seed), size=size))


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_reductions_of_every_dtype(ranks: Ranks, size: int, seed: int) -> None:
    """`reduce` and `reduce_scatter` are right for every operation and dtype, also at the limits of the dtype."""
    ranks.run(MATCH, calls.other_reductions(seed), size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_reductions_as_ieee_says(ranks: Ranks, size: int, seed: int) -> None:
    """NaN, infinities, zeros of both signs and subnormals are reduced according to IEEE 754."""
    assert_shared(ranks.run(MATCH, calls.special(seed), size=size))


@pytest.mark.gpus(least=3)
@examples(6, quick=1)
@given(size=calls.worlds(least=3), seed=calls.seeds)
def test_rounding_of_reductions(ranks: Ranks, size: int, seed: int) -> None:
    """Sums, means and products are within the derived bound, and have the same bits on all ranks."""
    assert_shared(ranks.run(MATCH, calls.rounding(seed), size=size))


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_copies_of_every_dtype(ranks: Ranks, size: int, seed: int) -> None:
    """Every collective that copies keeps every bit of every dtype, and delivers it to the right ranks."""
    ranks.run(MATCH, calls.copies(seed), size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_sizes(ranks: Ranks, size: int, seed: int) -> None:
    """Every collective is right with no elements, with few, and with about 4,096, 64 Ki and 1 Mi elements."""
    ranks.run(MATCH, calls.sizes(seed), size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_layouts(ranks: Ranks, size: int, seed: int) -> None:
    """Collectives on views, in place and with uneven parts are right or refused, and change no other memory."""
    ranks.run(MATCH, calls.layouts(seed), size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_asynchronous_collectives(ranks: Ranks, size: int, seed: int) -> None:
    """Several collectives in flight are right after they are waited for, in any order."""
    ranks.run(MATCH, calls.asynchronous(seed), size=size)


@examples(3, quick=1)
@given(size=calls.worlds(), seed=calls.seeds, more=MORE)
def test_options_of_collectives(ranks: Ranks, size: int, seed: int, more: bool) -> None:
    """Collectives are right with each pair of options, from dtype and layout to group and coalescing manager."""
    assert_shared(ranks.run(MATCH, calls.options(size, seed, complete=more), size=size))


@examples(12, quick=2)
@given(data=st.data(), size=calls.worlds(), seed=calls.seeds)
def test_groups(ranks: Ranks, data: st.DataObject, size: int, seed: int) -> None:
    """Collectives in a group involve its members only, others keep their data, and subgroups have the right members."""
    groups = data.draw(calls.partitions(size), label="groups")
    ranks.run(f"{CHECKS}.calls:assert_groups_match", calls.in_groups(groups, seed), size=size)


@pytest.mark.gpus(least=2)
@examples(6, quick=1)
@given(size=calls.worlds(least=2), messages=calls.messages(), seed=calls.seeds)
def test_messages(ranks: Ranks, size: int, messages: list[Message], seed: int) -> None:
    """Messages arrive whole, once, in order and under their tag: blocking, asynchronous, and in batches."""
    ranks.run(f"{CHECKS}.messages:assert_messages_of_all_ways_arrive", messages, seed, size=size)


@pytest.mark.gpus(least=2)
@examples(6, quick=1)
@given(
    size=calls.worlds(least=2),
    target=calls.members,
    tag=st.integers(0, 7),
    elements=st.lists(st.integers(1, 50), min_size=3, max_size=3),
    outside=calls.members,
)
def test_messages_from_any_source(
    ranks: Ranks, size: int, target: int, tag: int, elements: list[int], outside: int
) -> None:
    """`recv` without a source takes each message once, and returns the rank that sent it."""
    ranks.run(f"{CHECKS}.messages:assert_messages_from_any_source_arrive", target, tag, elements, outside, size=size)


@examples(8, quick=2)
@given(
    size=calls.worlds(), root=calls.members, objects=st.lists(calls.OBJECTS, min_size=1, max_size=4), seed=calls.seeds
)
def test_object_collectives(ranks: Ranks, size: int, root: int, objects: list[object], seed: int) -> None:
    """Collectives of Python objects deliver equal objects to the right ranks, for any size and kind."""
    ranks.run(f"{CHECKS}.messages:assert_objects_travel_on_all_ways", root, objects, seed, size=size)


@pytest.mark.gpus(least=2)
@examples(6, quick=1)
@given(size=calls.worlds(least=2), late=calls.members, outside=calls.members)
def test_barriers(ranks: Ranks, size: int, late: int, outside: int) -> None:
    """No rank leaves `barrier`, or `monitored_barrier`, before the last one has entered it."""
    ranks.run(f"{CHECKS}.messages:assert_barriers_hold", late, outside, size=size)


@pytest.mark.gpus(least=2)
@examples(6, quick=1)
@given(size=calls.worlds(least=2), late=calls.members)
def test_stores(ranks: Ranks, size: int, late: int) -> None:
    """Values, counters and decisions in a store are the same on all ranks, and `wait` waits for all of its keys."""
    ranks.run(f"{CHECKS}.messages:assert_stores_agree", late, size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_functional_collectives(ranks: Ranks, size: int, seed: int) -> None:
    """Functional collectives return the results of their models along each dimension, and keep their input."""
    ranks.run(f"{CHECKS}.functional:assert_functional_match_in_groups", seed, size=size)


@examples(6, quick=1)
@given(size=calls.worlds(), seed=calls.seeds)
def test_differentiable_collectives(ranks: Ranks, size: int, seed: int) -> None:
    """Differentiable collectives give the results and gradients of the same computation in one process."""
    ranks.run(f"{CHECKS}.functional:assert_differentiable_match_in_groups", seed, size=size)


@examples(8, quick=2)
@given(size=calls.worlds(), seed=calls.seeds)
def test_coalesced_collectives(ranks: Ranks, size: int, seed: int) -> None:
    """Several collectives in a coalescing manager give the same results as separate calls for each tensor."""
    ranks.run(f"{CHECKS}.functional:assert_coalesced_match_in_groups", seed, size=size)


@examples(24, quick=4)
@given(size=calls.worlds(), program=calls.programs(), dtype=st.sampled_from(("int64", "int32", "uint8")), place=PLACES)
def test_programs_of_collectives(
    ranks: Ranks, size: int, program: list[CollectiveStep], dtype: str, place: str
) -> None:
    """After each step of a program of collectives, all tensors of all ranks match a model in one process."""
    ranks.run(f"{CHECKS}.programs:assert_program_matches", program, dtype, place, size=size)


@examples(6, quick=1)
@given(seed=calls.seeds)
def test_world_of_one(ranks: Ranks, seed: int) -> None:
    """In a world of one rank every collective leaves the data of the rank unchanged."""
    alone = [*calls.all_reduces(seed), *calls.copies(seed), *calls.special(seed)]
    ranks.run(MATCH, alone, size=1)


@pytest.mark.gpus(least=2)
@examples(6, quick=1)
@given(size=calls.worlds(least=2), seed=calls.seeds)
def test_bias_of_rounding(ranks: Ranks, size: int, seed: int) -> None:
    """Sums round to nearest, without a bias towards zero or away from it (false alarms: below 1 in 10^9)."""
    ranks.run(f"{CHECKS}.calls:assert_sums_are_unbiased", seed, size=size)
