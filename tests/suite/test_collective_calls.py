"""Calls of collectives that follow from a number: none that would be left out, and each way of calling. And the table of
collectives, which all lists of them follow."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from mgpu_check.acceptance.collectives import test_collectives as acceptance
from mgpu_check.asserts import known_defects
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import RankFailure
from mgpu_check.oracles.collectives.cases import (
    COPIED,
    COPYING,
    FUNCTIONS,
    NOT_CALLED,
    REDUCING,
    STEPS,
    CollectiveCall,
    Message,
    form_of,
    left_out,
)
from mgpu_check.suite.collectives import functional
from mgpu_check.suite.collectives import strategies as calls
from mgpu_check.suite.collectives.calls import assert_collectives_match
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, TRANSFERS

GROUPS = [(0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 2, 3)]


@pytest.mark.parametrize("seed", range(0, 60, 7))
def test_no_call_is_one_that_no_backend_takes(seed):
    drawn = [*calls.sizes(seed), *calls.asynchronous(seed), *calls.in_groups(GROUPS, seed)]
    assert [str(call) for call in drawn if left_out(call)] == []


@pytest.mark.parametrize("seed", range(0, 60, 7))
def test_every_collective_is_called_in_groups_on_devices_and_the_cpu(seed):
    places = {(call.function, call.place) for call in calls.in_groups(GROUPS, seed)}
    assert places == {(function, place) for function in (*REDUCING, *COPYING) for place in calls.PLACES}
    sums = {call.function for call in calls.in_groups(GROUPS, seed) if call.op == "SUM" and call.function in REDUCING}
    assert sums == set(REDUCING)


def test_each_pair_of_options_is_drawn_and_by_some_backend_taken():
    drawn = calls.options(4, 3, complete=True)
    assert [str(call) for call in drawn if left_out(call)] == []
    rows = calls.option_rows()
    assert {(row["dtype"], row["coalesced"]) for row in rows} == set(itertools.product(COPIED, (False, True)))
    assert {row["layout"] for row in rows if row["op"] == "MIN"} >= {"scalar", "in place", "uneven", "gaps"}
    assert {row["root"] for row in rows if row["dtype"] == "bool" and row["root"]} == {row["root"] for row in rows} - {
        None
    }
    eighths = [call for seed in range(8) for call in calls.options(4, seed, complete=False)]
    assert {str(replace(call, seed=0)) for call in eighths} == {str(replace(call, seed=0)) for call in drawn}
    assert len(eighths) < 1.3 * len(drawn)


def test_a_message_goes_to_another_rank_in_a_world_of_any_size():
    for source, target, size in itertools.product(range(5), range(5), (2, 3, 4)):
        placed = Message(source, target, 0, "int8", 3, 0).between_ranks(size)
        assert placed.source == source % size != placed.target < size


def test_every_collective_of_tensors_is_called_or_left_out_for_a_reason():
    of_tensors = {name for name, row in COLLECTIVES.items() if row.transfer is not None}
    ours = {name for name in of_tensors if "distributed_c10d" in COLLECTIVES[name].homes}
    assert set(FUNCTIONS) | set(NOT_CALLED) >= ours and not set(FUNCTIONS) & set(NOT_CALLED)
    called = set(re.findall(r"\bfunctional\.(\w+)", Path(str(functional.__file__)).read_text()))
    newer = {name.replace("tensor", "single").replace("into_", "") for name in called}
    assert {name for name in of_tensors if "_functional_collectives" in COLLECTIVES[name].homes} <= called | newer


def test_suite_and_acceptance_try_every_transfer():
    assert {COLLECTIVES[name].does for name in FUNCTIONS} == set(TRANSFERS)
    assert {COLLECTIVES[form_of(name)].does for name in TRANSFERS} == set(TRANSFERS)
    assert {name for name, _ in acceptance.OPERATIONS} == {*TRANSFERS, "send_recv"}
    assert set(STEPS) == {"add", *TRANSFERS, "shift"}
    assert set(acceptance.MEASURED) == set(TRANSFERS) - {"reduce", "gather", "scatter"}
    assert set(calls.LARGE) <= set(FUNCTIONS)


def test_the_table_has_the_parameters_of_torch():
    for name, row in FUNCTIONS.items():
        names = list(inspect.signature(getattr(dist, name)).parameters)
        assert set(row.tensors) == set(names[: len(set(row.tensors))]), name
        assert (row.transfer.root in names) == bool(row.transfer.root), name
        assert ("op" in names) == row.reduces, name
        assert not row.newer or COLLECTIVES[row.newer].tensors == row.tensors, name


@pytest.mark.parametrize("name", TRANSFERS)
def test_a_transfer_gives_each_member_its_sources(name):
    """The sources of all members are the members that give, and all that take get something."""
    transfer = TRANSFERS[name]
    for count, root in itertools.product((1, 2, 3), (0, 1)):
        if root < count:
            sources = [transfer.sources(member, count, root) for member in range(count)]
            assert {giver for one in sources for giver in one} == {m for m in range(count) if transfer.gives(m, root)}
            assert [bool(one) for one in sources] == [transfer.takes(member, root) for member in range(count)]


def on_one_rank(call: CollectiveCall, result: str, rank: Rank) -> list[str]:
    """Run a call whose function reduces wrongly on a device, and return the known defects that have shown."""

    @functools.wraps(dist.reduce_scatter)  # its parameters are read
    def reduce_scatter(output, inputs, *args, **kwargs):
        if result == "one more":
            output.copy_(inputs[0] + 1)
        elif output.is_contiguous():
            output.copy_(inputs[0])

    met: list[known_defects.Met] = []
    with mock.patch.object(dist, "reduce_scatter", reduce_scatter), known_defects.reported_to(met.append):
        assert_collectives_match(rank, [call])
    return [one.name for one in met if one.failed]


ALONE = [{"op": "PREMUL_SUM"}, {"layout": "channels_last", "elements": 24}]


@pytest.mark.parametrize("given", ALONE, ids=str)
def test_a_rank_alone_that_only_copies_meets_a_known_defect(ranks, given):
    call = CollectiveCall("reduce_scatter", "float32", **given)
    assert ranks.run(on_one_rank, call, "copied", size=1) == [["nccl-reduce-scatter-alone"]]
    with pytest.raises(RankFailure, match=r"reduce_scatter .* is wrong on rank 0 of 1"):
        ranks.run(on_one_rank, call, "one more", size=1)
