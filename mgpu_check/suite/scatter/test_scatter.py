"""Scatter and gather: shards are disjoint, in order and on their devices, and gathering them restores the batch."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from mgpu_check import strategies
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.strategies import examples, given_sizes
from mgpu_check.plugin.ranks import Gpus
from mgpu_check.strategies import Split, TensorSpec

CHECKS = "mgpu_check.suite.scatter.checks"

TUTORIAL = {
    (30, 1): [30],
    (30, 2): [15, 15],
    (30, 3): [10, 10, 10],
    (30, 8): [4, 4, 4, 4, 4, 4, 4, 2],
    (10, 1): [10],
    (10, 2): [5, 5],
    (10, 3): [4, 4, 2],
    (10, 8): [2, 2, 2, 2, 2],
}
"""(batch size, devices) -> the sizes that the model prints in PyTorch's tutorial on data parallelism."""

FLOATS = ("float32", "float64", "float16", "bfloat16")


@examples(120)
@given(split=strategies.splits(values=("distinct", "random", "special", "bits"), leaves=True))
def test_shards_cover_the_batch(gpus: Gpus, split: Split) -> None:
    """Shards of `nn.parallel.scatter` cover the batch in order, without overlap, each on its device."""
    NamedFunction(f"{CHECKS}:assert_scattered")(gpus, split)


@examples(60, quick=24)
@given(split=strategies.splits(kinds=()))
def test_shards_have_the_sizes_of_chunk(gpus: Gpus, split: Split) -> None:
    """An uneven batch is split like by `torch.chunk`: the last shard is smaller, or there are fewer shards."""
    NamedFunction(f"{CHECKS}:assert_sizes_of_chunk")(gpus, split)


@examples(40)
@given(split=strategies.splits(leaves=True))
def test_leaves_reach_every_device(gpus: Gpus, split: Split) -> None:
    """Non-tensor arguments, positional or keyword, reach every device unchanged."""
    NamedFunction(f"{CHECKS}:assert_leaves_everywhere")(gpus, split)


@examples(40)
@given(
    size=st.sampled_from((30, 10)),
    count=strategies.device_counts(most=8).filter(lambda count: (30, count) in TUTORIAL),
    features=st.integers(1, 6),
)
def test_tutorial_shapes(gpus: Gpus, size: int, count: int, features: int) -> None:
    """The model inside DataParallel sees the sizes that PyTorch's tutorial prints: 30 over 2 is 15+15, and so on."""
    NamedFunction(f"{CHECKS}:assert_sizes_of_tutorial")(gpus[:count], size, features, TUTORIAL[size, count])


@examples(90)
@given(split=strategies.splits(values=("distinct", "random", "special", "bits")))
@example(split=Split(TensorSpec((3, 2)), 3, target="cpu"))
def test_gather_restores_the_batch(gpus: Gpus, split: Split) -> None:
    """Gathering the shards of a batch gives the batch, bit for bit, on the requested device."""
    NamedFunction(f"{CHECKS}:assert_gather_restores")(gpus, split)


@examples(50)
@given(inputs=strategies.splits(kinds=(), dims=(0,)), seed=strategies.seeds())
def test_inputs_and_labels_stay_aligned(gpus: Gpus, inputs: Split, seed: int) -> None:
    """`split_batch` puts each input and its label in one shard, on one device."""
    NamedFunction(f"{CHECKS}:assert_labels_aligned")(gpus, inputs, seed)


@examples(60)
@given(split=strategies.splits(kinds=(), dims=(0,), values=("distinct", "bits")))
def test_batches_split_by_hand(gpus: Gpus, split: Split) -> None:
    """Slices give every device its part of the batch, and collecting the parts restores it."""
    NamedFunction(f"{CHECKS}:assert_dealt_by_hand")(gpus, split)


def test_every_container(gpus: Gpus) -> None:
    """Tuples, lists, dicts and named tuples, also nested, are scattered and gathered part by part."""
    NamedFunction(f"{CHECKS}:assert_containers")(gpus)


@examples(10, quick=1)
@given(seed=strategies.seeds())
def test_every_dtype_and_order(gpus: Gpus, seed: int) -> None:
    """Shards have the bits of the batch for every dtype and bit pattern, in any order of devices."""
    NamedFunction(f"{CHECKS}:assert_any_bits")(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_large_batches(gpus: Gpus, seed: int) -> None:
    """Shards around 64 KiB, 1 MiB and 4 MiB are right, and gathering restores the batch, from CPU or a device."""
    NamedFunction(f"{CHECKS}:assert_large_batches")(gpus, seed)


@examples(4, quick=1)
@given(sizes=given_sizes(), seed=strategies.seeds())
def test_sizes_and_outputs_that_are_given(gpus: Gpus, sizes: list[int], seed: int) -> None:
    """`comm.scatter` uses the given sizes, and `comm.scatter` and `comm.gather` fill given output tensors."""
    NamedFunction(f"{CHECKS}:assert_given_sizes")(gpus, sizes, seed)


@examples(50)
@given(
    split=strategies.splits(kinds=(), dtypes=FLOATS),
    seed=strategies.seeds(),
    used=st.none() | st.frozensets(st.integers(0, 7), min_size=1),
)
def test_gradient_returns_through_scatter(gpus: Gpus, split: Split, seed: int, used: frozenset[int] | None) -> None:
    """The gradient of the shards returns to the batch, on its device, element by element.

    A shard without influence on the loss has a gradient of zeros.
    """
    NamedFunction(f"{CHECKS}:assert_gradient_scattered")(gpus, split, seed, used)


@examples(40)
@given(split=strategies.splits(kinds=(), dtypes=FLOATS))
def test_gradient_returns_through_gather(gpus: Gpus, split: Split) -> None:
    """The gradient of a gathered batch returns to each shard, on its own device."""
    NamedFunction(f"{CHECKS}:assert_gradient_gathered")(gpus, split)


@examples(20)
@given(values=st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=8), target=strategies.places())
def test_losses_gather_to_a_vector(gpus: Gpus, values: list[float], target: str) -> None:
    """Scalars gathered from the devices, such as losses, become a vector in the order of the devices."""
    count = min(len(values), len(gpus))
    NamedFunction(f"{CHECKS}:assert_scalars_stacked")(values[:count], gpus[:count], target)
