"""Check reductions on a rank: by torch and by hand, of all ranks and in a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mgpu_check.asserts.collectives import assert_allreduce_matches
from mgpu_check.asserts.known_defects import known_defect
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.allreduce.cases import Contributions
from mgpu_check.suite.recipes import gradient_exchange as recipes

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def assert_all_reduce_matches(rank: Rank, data: Contributions, place: str) -> None:
    """Assert that `dist.all_reduce` leaves the result of the operation of `data`, for tensors on "device" or "cpu"."""
    parts = data.parts(rank.size)
    tensor = data.placed(parts[rank.index], rank.device if place == "device" else "cpu")
    dist.all_reduce(tensor, _OPERATIONS[data.operation])
    assert_allreduce_matches({rank.index: tensor}, parts, operation=data.operation, what="dist.all_reduce")


def assert_view_is_reduced(rank: Rank, data: Contributions) -> None:
    """Assert that `dist.all_reduce` of a CPU view leaves the sum, with an allowance for the known defect of gloo."""

    def without_gaps(view: torch.Tensor) -> torch.Tensor:
        """Return the first `view.numel()` elements of the memory of a view, without regard to its strides."""
        return view.as_strided((view.numel(),), (1,))

    parts = data.parts(rank.size)
    views = [data.placed(part, "cpu") for part in parts]
    tensor = views[rank.index]
    before = [without_gaps(view).clone() for view in views]
    dist.all_reduce(tensor)

    def explained() -> None:
        held = {rank.index: without_gaps(tensor)}
        assert_allreduce_matches(held, before, what="dist.all_reduce as if without gaps")

    contiguous = all(view.is_contiguous() for view in views)
    with known_defect("gloo-views-with-gaps", explained=explained, contiguous=contiguous, size=rank.size):
        assert_allreduce_matches({rank.index: tensor}, parts, what="dist.all_reduce of a view")


def assert_view_is_reduced_or_refused(rank: Rank, data: Contributions) -> None:
    """Assert that `dist.all_reduce` of a view on a device leaves the sum, or refuses a view that is not contiguous."""
    parts = data.parts(rank.size)
    tensor = data.placed(parts[rank.index], rank.device)
    try:
        dist.all_reduce(tensor)
    except (RuntimeError, ValueError) as refusal:
        if tensor.is_contiguous() or "Tensors must be contiguous" not in str(refusal):
            raise
        return
    assert_allreduce_matches({rank.index: tensor}, parts, what="dist.all_reduce of a view")


def assert_recipe_matches(rank: Rank, name: str, data: Contributions, place: str, *arguments: int) -> None:
    """Assert that the function `name` of `gradient_exchange` leaves the sum, for tensors on "device" or "cpu"."""
    parts = data.parts(rank.size)
    tensor = data.placed(parts[rank.index], rank.device if place == "device" else "cpu")
    getattr(recipes, name)(tensor, *arguments)
    assert_allreduce_matches({rank.index: tensor}, parts, what=name)


def assert_all_reduce_in_a_group_matches(rank: Rank, members: Sequence[int], data: Contributions) -> None:
    """Assert that `dist.all_reduce` in a group sums over its members, and leaves the data of other ranks unchanged."""
    parts = data.parts(rank.size)
    own = parts[rank.index]
    tensor = data.placed(own, rank.device)
    group = dist.new_group(list(members))
    if rank.index not in members:
        assert_allreduce_matches([tensor], [own], what=f"a rank outside of the group {members}")
        return
    dist.all_reduce(tensor, group=group)
    chosen = [parts[member] for member in members]
    assert_allreduce_matches(
        {members.index(rank.index): tensor}, chosen, what=f"dist.all_reduce in the group {members}"
    )
    dist.destroy_process_group(group)
