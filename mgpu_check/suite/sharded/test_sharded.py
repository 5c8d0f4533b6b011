"""Sharding by torch: each rank has its part of the single-device state, and all ranks together have all of it.

Data are exact where possible, so results must have the bits of one device; see
`mgpu_check.oracles.training.cases`.
"""

from __future__ import annotations

from hypothesis import given

from mgpu_check import strategies
from mgpu_check.oracles.strategies import MORE, exact_trainings, examples
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.plugin.ranks import Ranks
from mgpu_check.settings import active

CHECKS = "mgpu_check.suite.sharded"
SEEDS = strategies.seeds()
SIZES = strategies.world_pairs()
WORLDS = strategies.large_worlds()
FEW = strategies.large_worlds(most=3)
"""Worlds of at most three ranks, for checks of operators: each rank derives the sharding by itself, so more ranks are
slow and show nothing more."""
TRAININGS = exact_trainings()
_OF_ALL_ROWS = 5  # times the timeout, because all forty rows of options take a minute on a busy machine


@examples(4, quick=1)
@given(sizes=SIZES)
def test_device_meshes(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    """Meshes of one to three dimensions, with ranks in any order, have the right coordinates and groups."""
    for size in sizes:
        ranks.run(f"{CHECKS}.dtensors:assert_meshes_agree", size=size)


@examples(8, quick=1)
@given(sizes=SIZES, seed=SEEDS)
def test_redistribution(ranks: Ranks, sizes: tuple[int, ...], seed: int) -> None:
    """DTensors move between all placements, divided evenly or not, and every rank holds its part, bit for bit."""
    for size in sizes:
        ranks.run(f"{CHECKS}.redistribution:assert_redistribution_agrees", seed, dimensions=1, size=size)


@examples(8, quick=1)
@given(sizes=SIZES, seed=SEEDS)
def test_redistribution_in_two_dimensions(ranks: Ranks, sizes: tuple[int, ...], seed: int) -> None:
    """DTensors on a two-dimensional mesh move between placements of both dimensions, and every rank holds its part."""
    for size in sizes:
        ranks.run(f"{CHECKS}.redistribution:assert_redistribution_agrees", seed, dimensions=2, size=size)


@examples(6, quick=1)
@given(sizes=SIZES, seed=SEEDS)
def test_gradients_of_redistribution(ranks: Ranks, sizes: tuple[int, ...], seed: int) -> None:
    """Gradients pass back through redistribution: of gathers reduced and scattered, of shards gathered."""
    for size in sizes:
        ranks.run(f"{CHECKS}.redistribution:assert_gradients_are_redistributed", seed, size=size)


@examples(6, quick=1)
@given(size=FEW, seed=SEEDS)
def test_making_dtensors(ranks: Ranks, size: int, seed: int) -> None:
    """DTensors are made, cast and divided right, and functions of their parts give the results of the whole."""
    ranks.run(f"{CHECKS}.dtensors:assert_dtensors_are_made", seed, size=size)


@examples(8, quick=1)
@given(size=FEW, seed=SEEDS)
def test_operators_on_dtensors(ranks: Ranks, size: int, seed: int) -> None:
    """Operators on DTensors give the results and gradients of the full tensors, for operands divided evenly or not."""
    ranks.run(f"{CHECKS}.dtensors:assert_operators_agree", seed, size=size)


@examples(4, quick=1)
@given(size=FEW, seed=SEEDS)
def test_losses_of_dtensors(ranks: Ranks, size: int, seed: int) -> None:
    """Mean losses of DTensors are the mean over all samples, for parts of any size on each rank."""
    ranks.run(f"{CHECKS}.dtensors:assert_losses_agree", seed, size=size)


@examples(6, quick=1)
@given(sizes=SIZES, seed=SEEDS)
def test_sync_batchnorm(ranks: Ranks, sizes: tuple[int, ...], seed: int) -> None:
    """SyncBatchNorm over ranks with different numbers of samples equals BatchNorm of all samples on one device."""
    for size in sizes:
        ranks.run(f"{CHECKS}.sync_batchnorm:assert_sync_batchnorm_agrees", seed, size=size)


@examples(8, quick=1)
@given(sizes=SIZES, training=TRAININGS)
def test_fully_shard(ranks: Ranks, sizes: tuple[int, ...], training: ExactTraining) -> None:
    """A model under `fully_shard` trains like on one device, divided evenly or not, with accumulated gradients."""
    for size in sizes:
        ranks.run(f"{CHECKS}.fully_sharded:assert_fully_sharded_agrees", training, dimensions=1, size=size)


@examples(6, quick=1)
@given(sizes=SIZES, training=TRAININGS)
def test_hybrid_shard(ranks: Ranks, sizes: tuple[int, ...], training: ExactTraining) -> None:
    """A model under `fully_shard` on a two-dimensional mesh (shards and replicas) trains like on one device."""
    for size in sizes:
        ranks.run(f"{CHECKS}.fully_sharded:assert_fully_sharded_agrees", training, dimensions=2, size=size)


@examples(2, quick=1)
@given(size=WORLDS, training=TRAININGS, more=MORE)
def test_options_of_fully_shard(ranks: Ranks, size: int, training: ExactTraining, more: bool) -> None:
    """A model under `fully_shard` trains like on one device with each pair of its options."""
    timeout = _OF_ALL_ROWS * active().rank_timeout if more else None
    ranks.run(f"{CHECKS}.fully_sharded:assert_options_agree", training, more=more, size=size, timeout=timeout)


@examples(6, quick=1)
@given(size=WORLDS, seed=SEEDS)
def test_mixed_precision(ranks: Ranks, size: int, seed: int) -> None:
    """Mixed precision of `fully_shard` computes and reduces in the dtypes of its policy; parameters stay float32."""
    # Far below half a unit in the last place of whole numbers in bfloat16, so bfloat16 rounds it away.
    training = ExactTraining(widths=(6, 7, 3), batch=8, steps=1, seed=seed, fine=2.0**-14)
    ranks.run(f"{CHECKS}.fully_sharded:assert_mixed_precision_agrees", training, size=size)


@examples(6, quick=1)
@given(sizes=SIZES, training=TRAININGS)
def test_clipping(ranks: Ranks, sizes: tuple[int, ...], training: ExactTraining) -> None:
    """Clipping under `fully_shard`, by norm and by value, matches one device."""
    for size in sizes:
        ranks.run(f"{CHECKS}.fully_sharded:assert_clipping_agrees", training, size=size)


@examples(6, quick=1)
@given(size=WORLDS, training=TRAININGS)
def test_state_dict(ranks: Ranks, size: int, training: ExactTraining) -> None:
    """Full state dicts of a sharded model and its optimizer match one device, and can be distributed again."""
    ranks.run(f"{CHECKS}.checkpoints:assert_state_dict_agrees", training, size=size)


@examples(6, quick=1)
@given(sizes=SIZES, training=TRAININGS)
def test_distributed_checkpoint(ranks: Ranks, sizes: tuple[int, ...], training: ExactTraining) -> None:
    """Training continues like on one device from a checkpoint that another world size saved."""
    for saving, loading in ((sizes[0], sizes[-1]), (sizes[-1], sizes[0])):
        directory = ranks.run(f"{CHECKS}.checkpoints:saved_checkpoint", training, size=saving)[0]
        ranks.run(f"{CHECKS}.checkpoints:assert_checkpoint_continues", training, directory, saving, size=loading)


@examples(2, quick=1)
@given(size=WORLDS, training=TRAININGS, more=MORE)
def test_options_of_state_dicts(ranks: Ranks, size: int, training: ExactTraining, more: bool) -> None:
    """State dicts have the values of one device, and can be set again, with each pair of StateDictOptions."""
    ranks.run(f"{CHECKS}.checkpoints:assert_state_options_agree", training, more=more, size=size)
