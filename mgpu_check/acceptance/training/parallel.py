"""Check training on several GPUs at once for the acceptance: a disagreement is an observation about the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mgpu_check.devices.observations import Observation, Subject, Work
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import CheckFailure, ReplicaMismatch
from mgpu_check.suite.gradients.cases import TrainingSpec
from mgpu_check.suite.gradients.checks import (
    assert_data_parallel_agrees,
    assert_distributed_agrees,
    assert_distributed_replicas_agree,
)


def examine_data_parallel(devices: Sequence[torch.device], training: TrainingSpec) -> list[Observation]:
    return [
        _looked(range(len(devices)), "DataParallel", training, lambda: assert_data_parallel_agrees(training, devices))
    ]


def examine_distributed(rank: Rank, training: TrainingSpec) -> list[Observation]:
    return _of_ranks(rank, "DDP", training, lambda: assert_distributed_agrees(training, rank))


def examine_replicas(rank: Rank, training: TrainingSpec) -> list[Observation]:
    """Check that DDP keeps all ranks equal bit for bit. A collective."""
    return _of_ranks(rank, "DDP replicas", training, lambda: assert_distributed_replicas_agree(training, rank))


def _of_ranks(rank: Rank, what: str, training: TrainingSpec, check: Callable[[], None]) -> list[Observation]:
    seen = _looked(range(rank.size), what, training, check)
    # All ranks observe the same group, so only the first reports success, but every rank reports a failure.
    return [seen] if seen.outcome == "failed" or rank.index == 0 else []


def _looked(members: Sequence[int], what: str, training: TrainingSpec, check: Callable[[], None]) -> Observation:
    subject, case, work = Subject("group", tuple(members)), f"{what}, {training}", Work(operations=training.steps)
    try:
        check()
    except CheckFailure as failure:
        # If replicas differ, those in the minority are suspects. Wrong gradients do not show whose contribution is
        # wrong.
        odd = failure.ranks if isinstance(failure, ReplicaMismatch) and 2 * len(failure.ranks) < len(members) else ()
        evidence = {"message": str(failure), "kind": type(failure).__name__}
        return Observation("training", subject, "failed", str(failure).splitlines()[0], case, work, evidence, odd)
    return Observation("training", subject, "passed", case=case, work=work)
