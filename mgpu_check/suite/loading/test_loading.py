"""Loading: all ranks together load each sample once per epoch, in the order of the sampler, with any number of workers.

Small cases are enumerated: each length with each world size.
"""

from __future__ import annotations

from hypothesis import given

from mgpu_check import strategies
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.strategies import MORE, examples
from mgpu_check.plugin.ranks import Gpus, Ranks

SAMPLERS = "mgpu_check.suite.loading.samplers"
LOADERS = "mgpu_check.suite.loading.loaders"


def test_sampler_covers_the_dataset(gpus: Gpus) -> None:
    """`DistributedSampler` gives the ranks disjoint shares, up to its padding, for every length and world size."""
    NamedFunction(f"{SAMPLERS}:assert_sampler_covers")()


@examples(20, quick=2)
@given(world=strategies.world_sizes(), seed=strategies.seeds())
def test_sampler_shuffles_by_seed_and_epoch(gpus: Gpus, world: int, seed: int) -> None:
    """The order of a sampler depends only on its seed and `set_epoch`, equally on all ranks."""
    NamedFunction(f"{SAMPLERS}:assert_sampler_shuffles")(world, seed)


@examples(5, quick=1)
@given(seed=strategies.seeds())
def test_samplers_draw_from_their_generator(gpus: Gpus, seed: int) -> None:
    """Samplers and loaders with a generator draw a new order each epoch, and repeat all epochs from the same seed."""
    NamedFunction("mgpu_check.suite.loading.samplers:assert_samplers_draw")(seed)


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_every_order_is_as_likely(gpus: Gpus, seed: int) -> None:
    """A shuffling sampler gives all orders with the same frequency over many epochs."""
    NamedFunction(f"{SAMPLERS}:assert_orders_are_likely")(seed)


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_samplers_know_their_rank(ranks: Ranks, seed: int) -> None:
    """A sampler without arguments takes rank and world size from the process group, in worlds of every size."""
    for size in range(1, ranks.size + 1):
        ranks.run("mgpu_check.suite.loading.loaders:assert_samplers_of_ranks", seed, size=size)


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_batch_samplers_cut_in_batches(gpus: Gpus, seed: int) -> None:
    """`BatchSampler` divides the order of any sampler into batches, for every length and batch size."""
    NamedFunction(f"{SAMPLERS}:assert_batch_sampler_covers")(seed)


def test_last_batches_are_loaded(gpus: Gpus) -> None:
    """A loader yields its whole share, with a smaller last batch unless drop_last is set, and has the right length."""
    NamedFunction(f"{LOADERS}:assert_last_batches")()


@examples(2, quick=1)
@given(seed=strategies.seeds(), more=MORE)
def test_options_of_loaders(gpus: Gpus, seed: int, more: bool) -> None:
    """DataLoader yields the right batches with each pair of its options."""
    NamedFunction("mgpu_check.suite.loading.loaders:assert_loader_options_agree")(seed, more=more)


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_workers_keep_the_order(gpus: Gpus, seed: int) -> None:
    """Batches of several workers arrive whole in the sampler's order in each epoch, and their errors are raised."""
    NamedFunction(f"{LOADERS}:assert_workers_in_order")(seed)


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_workers_are_seeded_apart(gpus: Gpus, seed: int) -> None:
    """Workers have different seeds in each epoch, and the same generator gives the same seeds again."""
    NamedFunction(f"{LOADERS}:assert_worker_seeds")(seed)


def test_batches_are_pinned(gpus: Gpus) -> None:
    """`pin_memory` pins every tensor of a batch and uses custom methods; batches reach the devices unchanged."""
    from mgpu_check.suite.loading.loaders import assert_pinned_batches, assert_pinned_by_themselves

    assert_pinned_batches(gpus)
    assert_pinned_by_themselves()


@examples(5, quick=1)
@given(seed=strategies.seeds())
def test_datasets_are_divided(gpus: Gpus, seed: int) -> None:
    """Parts of a dataset, split by hand or by `random_split`, are disjoint, cover it, and are the same on all ranks."""
    NamedFunction(f"{LOADERS}:assert_partitions")(seed)


@examples(5, quick=1)
@given(seed=strategies.seeds())
def test_epochs_are_resumed(gpus: Gpus, seed: int) -> None:
    """An epoch interrupted after any batch resumes with its remaining batches, by epoch or state."""
    NamedFunction(f"{LOADERS}:assert_resumes")(seed)


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_loaders_of_ranks_cover_the_dataset(ranks: Ranks, seed: int) -> None:
    """The loaders of all ranks yield each sample once per epoch, and each batch arrives whole on the rank's device."""
    for size in sorted({1, ranks.size}):
        ranks.run("mgpu_check.suite.loading.loaders:assert_loaders_cover", seed, size=size)


def test_streams_are_shared(ranks: Ranks) -> None:
    """An iterable dataset split among ranks and workers yields each sample once, last batches included."""
    for size in sorted({1, ranks.size}):
        ranks.run("mgpu_check.suite.loading.loaders:assert_streams_cover", size=size)
