"""Loading: all ranks together load each sample once per epoch, in the order of the sampler, with any number of workers.

Small cases are enumerated: each length with each world size.
"""

from __future__ import annotations

from hypothesis import given

from mgpu_check import strategies
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.strategies import examples
from mgpu_check.plugin.ranks import Gpus, Ranks

CHECKS = "mgpu_check.suite.loading.checks"


def test_sampler_covers_the_dataset(gpus: Gpus) -> None:
    """`DistributedSampler` gives the ranks disjoint shares, up to its padding, for every length and world size."""
    NamedFunction(f"{CHECKS}:assert_sampler_covers")()


@examples(20, quick=2)
@given(world=strategies.world_sizes(), seed=strategies.seeds())
def test_sampler_shuffles_by_seed_and_epoch(gpus: Gpus, world: int, seed: int) -> None:
    """The order of a sampler depends only on its seed and `set_epoch`, equally on all ranks."""
    NamedFunction(f"{CHECKS}:assert_sampler_shuffles")(world, seed)


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_samplers_know_their_rank(ranks: Ranks, seed: int) -> None:
    """A sampler without arguments takes rank and world size from the process group, in worlds of every size."""
    for size in range(1, ranks.size + 1):
        ranks.run(f"{CHECKS}:assert_samplers_of_ranks", seed, size=size)


def test_batches_are_pinned(gpus: Gpus) -> None:
    """`pin_memory` pins every tensor of a batch, and batches reach the devices unchanged."""
    NamedFunction(f"{CHECKS}:assert_pinned_batches")(gpus)


@examples(5, quick=1)
@given(seed=strategies.seeds())
def test_datasets_are_divided(gpus: Gpus, seed: int) -> None:
    """Parts of a dataset, split by hand or by `random_split`, are disjoint, cover it, and are the same on all ranks."""
    NamedFunction(f"{CHECKS}:assert_partitions")(seed)


@examples(5, quick=1)
@given(seed=strategies.seeds())
def test_epochs_are_resumed(gpus: Gpus, seed: int) -> None:
    """An epoch interrupted after any batch resumes with its remaining batches, by epoch or state."""
    NamedFunction(f"{CHECKS}:assert_resumes")(seed)


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_loaders_of_ranks_cover_the_dataset(ranks: Ranks, seed: int) -> None:
    """The loaders of all ranks yield each sample once per epoch, and each batch arrives whole on the rank's device."""
    for size in sorted({1, ranks.size}):
        ranks.run(f"{CHECKS}:assert_loaders_cover", seed, size=size)


def test_streams_are_shared(ranks: Ranks) -> None:
    """An iterable dataset split among ranks and workers yields each sample once, last batches included."""
    for size in sorted({1, ranks.size}):
        ranks.run(f"{CHECKS}:assert_streams_cover", size=size)
