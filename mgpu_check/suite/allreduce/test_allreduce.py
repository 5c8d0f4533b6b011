"""Allreduce: every algorithm leaves the single-device sum on every rank and device.

The sum is compared bit for bit if every order of summation gives the same bits, else within gamma(n-1)·Σ|x| of the
exact sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check import strategies
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.strategies import examples, shapes, tensors
from mgpu_check.oracles.tensors import DENSE, GAPPED, LAYOUTS, REDUCIBLE, Contributions
from mgpu_check.plugin.ranks import Gpus, Ranks


@st.composite
def contributions(
    draw: st.DrawFn,
    *,
    layouts: Sequence[str] = LAYOUTS,
    operations: Sequence[str] = ("sum",),
    min_dims: int = 0,
    min_size: int = 0,
) -> Contributions:
    """Draw the inputs of a reduction: vectors of up to 70 elements, few divisible by the world size; or tensors."""
    shape = draw(st.one_of(st.integers(min_size, 70).map(lambda length: (length,)), shapes(min_dims, 4, min_size, 6)))
    operation, values = draw(st.sampled_from(tuple(operations))), ("exact", "random")
    return Contributions(draw(tensors(shape=shape, dtypes=REDUCIBLE, values=values, layouts=layouts)), operation)


CHECKS = "mgpu_check.suite.allreduce.reductions"
PLACES = st.sampled_from(("device", "cpu"))


@examples(100)
@given(devices=strategies.device_counts(), data=contributions())
def test_hand_written_allreduce(gpus: Gpus, devices: int, data: Contributions) -> None:
    """Summing everything into device 0 and copying it back leaves the sum on every device, in any layout."""
    NamedFunction(f"{CHECKS}:assert_added_up_by_hand")(data, gpus[:devices])


@examples(60)
@given(devices=strategies.device_counts(), data=contributions(), home=st.integers(0, 7))
def test_reduce_add_and_broadcast(gpus: Gpus, devices: int, data: Contributions, home: int) -> None:
    """`comm.reduce_add` to any device, and a broadcast from there, leave the sum of tensors on every device.

    DataParallel adds up gradients with these functions. The inputs stay unchanged.
    """
    NamedFunction(f"{CHECKS}:assert_added_up")(data, gpus[:devices], gpus[home % devices])


@examples(10, quick=2)
@given(data=contributions(), home=st.integers(0, 7))
def test_broadcast_of_every_layout(gpus: Gpus, data: Contributions, home: int) -> None:
    """`broadcast` and `broadcast_coalesced` copy every layout from any device to all, bit for bit."""
    NamedFunction(f"{CHECKS}:assert_broadcast")(data, gpus, gpus[home % len(gpus)])


@examples(6, quick=1)
@given(seed=strategies.seeds())
def test_nccl_in_one_process(gpus: Gpus, seed: int) -> None:
    """The functions of `torch.cuda.nccl` give the right results on all devices of a process."""
    NamedFunction("mgpu_check.suite.allreduce.reductions:assert_nccl_calls")(gpus, seed)


@examples(120)
@given(size=strategies.world_sizes(), data=contributions(layouts=DENSE), place=PLACES)
def test_all_reduce(ranks: Ranks, size: int, data: Contributions, place: str) -> None:
    """`dist.all_reduce` leaves the sum on every rank, for device and CPU tensors."""
    ranks.run(f"{CHECKS}:assert_all_reduce_matches", data, place, size=size)


@examples(80)
@given(
    size=strategies.world_sizes(), data=contributions(layouts=DENSE, operations=("min", "max", "product")), place=PLACES
)
def test_all_reduce_of_other_operations(ranks: Ranks, size: int, data: Contributions, place: str) -> None:
    """`dist.all_reduce` leaves the minimum, maximum or product on every rank."""
    ranks.run(f"{CHECKS}:assert_all_reduce_matches", data, place, size=size)


@examples(40)
@given(size=strategies.world_sizes(), data=contributions(layouts=("transposed", *GAPPED), min_dims=2, min_size=2))
def test_all_reduce_of_views_on_devices(ranks: Ranks, size: int, data: Contributions) -> None:
    """`dist.all_reduce` of a view on a device gives the sum, or refuses it: "Tensors must be contiguous"."""
    ranks.run(f"{CHECKS}:assert_view_is_reduced_or_refused", data, size=size)


@pytest.mark.gpus(least=2)
@examples(30)
@given(size=strategies.world_sizes(least=2), data=contributions(layouts=GAPPED, min_dims=1, min_size=2))
def test_all_reduce_of_views_on_the_cpu(ranks: Ranks, size: int, data: Contributions) -> None:
    """`dist.all_reduce` of a CPU view with gaps leaves the sum on every rank."""
    ranks.run(f"{CHECKS}:assert_view_is_reduced", data, size=size)


@examples(80)
@given(size=strategies.world_sizes(), data=contributions(), place=PLACES)
def test_ring_allreduce(ranks: Ranks, size: int, data: Contributions, place: str) -> None:
    """A ring of point-to-point messages leaves the sum on every rank, with chunks of any size."""
    ranks.run(f"{CHECKS}:assert_recipe_matches", "ring_allreduce", data, place, size=size)


@examples(80)
@given(size=strategies.world_sizes(), data=contributions(), place=PLACES)
def test_tree_allreduce(ranks: Ranks, size: int, data: Contributions, place: str) -> None:
    """A binomial tree of point-to-point messages leaves the sum on every rank, for any number of ranks."""
    ranks.run(f"{CHECKS}:assert_recipe_matches", "tree_allreduce", data, place, size=size)


@examples(80)
@given(size=strategies.world_sizes(), root=st.integers(0, 63), data=contributions(layouts=DENSE), place=PLACES)
def test_reduce_then_broadcast(ranks: Ranks, size: int, root: int, data: Contributions, place: str) -> None:
    """`dist.reduce` to any rank, and `dist.broadcast` from there, leave the sum on every rank."""
    ranks.run(f"{CHECKS}:assert_recipe_matches", "reduce_broadcast", data, place, root % size, size=size)
