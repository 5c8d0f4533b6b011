"""DistributedDataParallel: with every option, each step leaves the same bits as on one device.

The data are whole numbers whose sums do not round (`mgpu_check.oracles.training.reference_training`), so no comparison
needs a tolerance. One exception: if the number of ranks is not a power of two, the mean may round by
`mgpu_check.oracles.training.reference_training.slack`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.oracles.strategies import MORE, examples, mostly_all, seeds, whole_runs
from mgpu_check.oracles.training.cases import PLAIN, WholeRun
from mgpu_check.plugin.ranks import Ranks

Runs = tuple[WholeRun, ...]
SEEDS = seeds()


@examples(8, quick=1)
@given(size=mostly_all(), runs=whole_runs(PLAIN))
def test_models(ranks: Ranks, size: int, runs: Runs) -> None:
    """MLPs, LeNet, a residual block, embeddings, attention and tied weights train like on one device."""
    ranks.run("mgpu_check.suite.distributed.training:assert_models_train", runs, size=size)


@examples(8, quick=1)
@given(size=mostly_all(), runs=whole_runs(("deep", "wide"), least=3))
def test_buckets(ranks: Ranks, size: int, runs: Runs) -> None:
    """Gradients match one device with many small buckets, and with parameters above 64 Ki, as copies or views."""
    ranks.run("mgpu_check.suite.distributed.training:assert_buckets_reduced", runs, size=size)


@examples(2, quick=1)
@given(size=mostly_all(), runs=whole_runs(("deep",), least=3), more=MORE)
def test_pairs_of_options(ranks: Ranks, size: int, runs: Runs, more: bool) -> None:
    """Models train like on one device with each pair of options of DistributedDataParallel."""
    ranks.run("mgpu_check.suite.distributed.training:assert_options_agree", runs[0], more=more, size=size)


@pytest.mark.gpus(least=2)
@examples(4, quick=1)
@given(size=mostly_all(), seed=SEEDS)
def test_uneven_batches(ranks: Ranks, size: int, seed: int) -> None:
    """In `join` ranks that still have batches train on, and all end with the parameters and buffers of the last."""
    ranks.run("mgpu_check.suite.distributed.training:assert_uneven_ranks_join", seed, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("heads",), least=3, most=4))
def test_unused_parameters(ranks: Ranks, size: int, runs: Runs) -> None:
    """find_unused_parameters: gradients of parameters that some ranks use are averaged over all; unused get none."""
    ranks.run("mgpu_check.suite.distributed.training:assert_unused_parameters_reduced", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("reused",), least=3))
def test_static_graph(ranks: Ranks, size: int, runs: Runs) -> None:
    """static_graph: models train like on one device, with a layer used twice and recomputed, and an unused one."""
    ranks.run("mgpu_check.suite.distributed.training:assert_static_graph_trains", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("mlp",)))
def test_frozen_parameters(ranks: Ranks, size: int, runs: Runs) -> None:
    """Frozen parameters come from rank 0 and stay unchanged; parameters that DDP ignores stay each rank's own."""
    ranks.run("mgpu_check.suite.distributed.training:assert_frozen_parameters_kept", runs, size=size)


@pytest.mark.gpus(least=2)
@examples(8, quick=2)
@given(size=mostly_all(2), runs=whole_runs(("mlp",)), first=st.sets(st.integers(0, 7), min_size=1))
def test_process_groups(ranks: Ranks, size: int, runs: Runs, first: set[int]) -> None:
    """Two process groups train two models independently."""
    ranks.run("mgpu_check.suite.distributed.training:assert_groups_apart", runs, sorted(first), size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("deep",), least=2), long=whole_runs(("mlp",), least=4, most=4))
def test_averaging_hooks(ranks: Ranks, size: int, runs: Runs, long: Runs) -> None:
    """allreduce_hook, and a user's hook that sums and divides, get every gradient once and act like no hook."""
    ranks.run("mgpu_check.suite.distributed.state:assert_averaging_hook_exact", runs, long, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("mlp",)))
def test_compressing_hooks(ranks: Ranks, size: int, runs: Runs) -> None:
    """fp16_compress_hook and bf16_compress_hook round gradients to these dtypes, and not further."""
    ranks.run("mgpu_check.suite.distributed.state:assert_compressed_gradients_rounded", runs, size=size)


@pytest.mark.gpus(least=2)
@examples(8, quick=1)
@given(size=mostly_all(2), runs=whole_runs(("mlp",)), first=st.sets(st.integers(0, 7), min_size=1))
def test_hooks_in_groups(ranks: Ranks, size: int, runs: Runs, first: set[int]) -> None:
    """Hooks that average and compress take the mean over the process group of the model."""
    ranks.run("mgpu_check.suite.distributed.state:assert_hooks_keep_to_groups", runs, sorted(first), size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("mlp", "lenet"), least=2))
def test_accumulation(ranks: Ranks, size: int, runs: Runs) -> None:
    """no_sync: gradients are local within it, and those of all micro-batches of all ranks after the next sync."""
    ranks.run("mgpu_check.suite.distributed.training:assert_accumulation_exact", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("mlp",), least=4, most=4))
def test_gradient_hooks(ranks: Ranks, size: int, runs: Runs) -> None:
    """Hooks of parameters and modules run once in each of four steps, before the mean is taken."""
    ranks.run("mgpu_check.suite.distributed.training:assert_gradient_hooks_apply", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), seed=SEEDS)
def test_state_of_the_start(ranks: Ranks, size: int, seed: int) -> None:
    """A wrapped model holds rank 0's parameters and buffers of all dtypes and sizes, bit for bit."""
    ranks.run("mgpu_check.suite.distributed.state:assert_starts_from_the_first_rank", seed, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("counting", "counting"), least=2))
def test_buffers(ranks: Ranks, size: int, runs: Runs) -> None:
    """Each step starts from rank 0's buffers of all dtypes, or without broadcast_buffers from the rank's own."""
    ranks.run("mgpu_check.suite.distributed.state:assert_buffers_follow_the_first_rank", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("float64 inside", "float16 inside", "bfloat16 inside"), small=True))
def test_mixed_dtypes(ranks: Ranks, size: int, runs: Runs) -> None:
    """Gradients of a model with parameters of two dtypes have the right dtypes and values."""
    ranks.run("mgpu_check.suite.distributed.state:assert_mixed_dtypes_train", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("residual",)))
def test_channels_last(ranks: Ranks, size: int, runs: Runs) -> None:
    """Gradients of convolutions in channels_last are right and have that layout."""
    ranks.run("mgpu_check.suite.distributed.state:assert_channels_last_trains", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), rows=st.permutations((1, 2, 3, 4)), seed=SEEDS)
def test_arguments(ranks: Ranks, size: int, rows: list[int], seed: int) -> None:
    """Nested positional and keyword arguments arrive on the device, and outputs keep their structure."""
    ranks.run("mgpu_check.suite.distributed.state:assert_arguments_arrive", rows, seed, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("mlp", "tied")))
def test_evaluation(ranks: Ranks, size: int, runs: Runs) -> None:
    """Evaluation between steps, on all ranks or on rank 0 alone, matches one device and does not affect training."""
    ranks.run("mgpu_check.suite.distributed.state:assert_evaluation_leaves_no_trace", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("mlp", "mlp"), least=2))
def test_checkpoint(ranks: Ranks, size: int, runs: Runs) -> None:
    """Training continues without a difference from a checkpoint that rank 0 saves and every rank loads."""
    ranks.run("mgpu_check.suite.distributed.state:assert_checkpoint_goes_on", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("mlp", "mlp"), rows=(4, 3, 2, 1), small=True))
def test_autocast(ranks: Ranks, size: int, runs: Runs) -> None:
    """Steps under autocast to bfloat16 and float16 are exact on small numbers."""
    ranks.run("mgpu_check.suite.distributed.training:assert_autocast_trains", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("mlp",), least=3))
def test_scaler(ranks: Ranks, size: int, runs: Runs) -> None:
    """GradScaler: scales do not change gradients, and an infinity on one rank makes all ranks skip the step."""
    ranks.run("mgpu_check.suite.distributed.training:assert_scaler_skips_together", runs, size=size)


@examples(8, quick=2)
@given(size=mostly_all(), runs=whole_runs(("mlp", "mlp", "lenet")))
def test_clipping(ranks: Ranks, size: int, runs: Runs) -> None:
    """clip_grad_norm_ uses the norm of the gradient of the whole batch."""
    ranks.run("mgpu_check.suite.distributed.training:assert_clipping_takes_the_whole_norm", runs, size=size)
