"""The first line of a finding names what is wrong; a raw error of torch in a check is a finding that names the
call."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel, scatter_gather

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import CollectiveMismatch, RankFailure, UnexpectedError
from mgpu_check.oracles.collectives.cases import CollectiveCall
from mgpu_check.oracles.collectives.repeated_calls import RepeatedCollective
from mgpu_check.suite.collectives.calls import assert_collectives_match
from mgpu_check.suite.distributed.state import assert_arguments_arrive
from mgpu_check.torch_hooks.patches import replaced

pytestmark = pytest.mark.gpus(2)


def test_the_expression_that_raised_is_named(ranks):
    """No dtype of torch has this name."""
    cases = [RepeatedCollective("all_reduce", "float33", 64)]
    with pytest.raises(RankFailure) as caught:
        ranks.run("mgpu_check.oracles.collectives.repeated_calls:views_of", cases)
    first = str(caught.value).splitlines()[0]
    assert re.search(
        r"raised UnexpectedError: getattr\(torch, \S+\) raised AttributeError: .*'float33' \(in \w+(/\w+)?.py:\d+\)",
        first,
    )
    assert isinstance(caught.value.__cause__, UnexpectedError)


def test_errors_of_other_code_are_unchanged(ranks):
    def of_a_user() -> None:
        raise ValueError("mine")

    with pytest.raises(RankFailure, match="raised ValueError: mine"):
        ranks.run(of_a_user)


def _without_its_list(rank: Rank) -> None:
    real = dist.scatter

    def scatter(tensor: Any, scatter_list: Any = None, **given: Any) -> Any:
        return real(tensor, None, **given)

    with replaced(dist, "scatter", scatter):
        assert_collectives_match(rank, [CollectiveCall("scatter", "int64", elements=5)])


def test_a_collective_that_raises_is_named_with_its_dtype_size_and_device(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks.run(_without_its_list)
    assert isinstance(caught.value.__cause__, CollectiveMismatch)
    first = next(line for line in str(caught.value).splitlines() if "CollectiveMismatch" in line)
    assert "scatter, int64, 5 elements" in first
    assert re.search(r"on cuda:\d raised ValueError: .*scatter_list", first)


def _with_a_wrong_sum(rank: Rank) -> None:
    real = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **given: Any) -> Any:
        done = real(tensor, *args, **given)
        if rank.index == 1:
            tensor.view(-1)[0] += 1
        return done

    calls = [CollectiveCall("all_reduce", "int32", elements=count) for count in (5, 9)]
    with replaced(dist, "all_reduce", all_reduce):
        assert_collectives_match(rank, calls)


def test_the_first_line_names_the_first_wrong_collective(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks.run(_with_a_wrong_sum)
    first, second, third, *_ = str(caught.value.__cause__).splitlines()
    assert (
        first.startswith("all_reduce SUM, int32, 5 elements") and "is wrong on rank 1 of 2 (cuda:1): element 0" in first
    )
    assert "1 of 5 elements of int32 are wrong" in first
    assert second.startswith("  2 of 2 collectives are wrong; all of them: function all_reduce, dtype int32")
    assert third.startswith("  all_reduce SUM, int32, 9 elements")


def _with_tuples_in_place_of_named_ones(rank: Rank) -> None:
    with replaced(scatter_gather, "_is_namedtuple", lambda *_: False):
        assert_arguments_arrive(rank, [2, 3], 0)


def _with_one_more_in_lists(rank: Rank) -> None:
    real = DistributedDataParallel.forward

    def forward(self: Any, *args: Any, more: Any, **given: Any) -> Any:
        return real(self, *args, more=more | {"list": [more["list"][0] + 1, more["list"][1]]}, **given)

    with replaced(DistributedDataParallel, "forward", forward):
        assert_arguments_arrive(rank, [2, 3], 0)


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (
            _with_tuples_in_place_of_named_ones,
            r"the type of argument more\['list'\]\[1\] is 'tuple', expected '_PairOfModels'",
        ),
        (
            _with_one_more_in_lists,
            r"argument more\['list'\]\[0\] \(int64\[\d, \d+\] on cuda:\d\) is wrong: \d+ of \d+ elements, the first \[0, 0\]: "
            r"expected -?\d, got -?\d",
        ),
    ],
)
def test_an_argument_that_does_not_arrive_is_shown_with_its_value(ranks, check, found):
    with pytest.raises(
        RankFailure, match=f"rank 0 of 2 raised GradientMismatch: DDP on 2 ranks, nested arguments, rank 0: {found}"
    ):
        ranks.run(check)
