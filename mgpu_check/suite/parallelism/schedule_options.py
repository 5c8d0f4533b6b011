"""Train by schedules of `torch.distributed.pipelining` with each pair of values of their options."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from mgpu_check.asserts.findings import run_all
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.exact_training.cases import ExactTraining
from mgpu_check.suite.common.pairs import drawn_rows
from mgpu_check.suite.parallelism.tensor_pipeline import assert_schedule_agrees

_BY_ROWS = TensorChunkSpec(0)
_VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
_SINGLE = ("ScheduleGPipe", "Schedule1F1B")
_OPTIONS: Mapping[str, Sequence[Any]] = {
    "schedule": (
        *_SINGLE,
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleLoopedBFS",
        *_VEE,
    ),
    "micro_batches": (4, 2, 8),
    "scale_grads": (True, False),
    "args_chunk_spec": (None, (_BY_ROWS,)),
    "kwargs_chunk_spec": (None, {"rows": _BY_ROWS}),
    "output_merge_spec": (None, _BY_ROWS),
    "backward_requires_autograd": (True, False),
    "defer_pp_recv": (False, True),
}
"""Options of schedules, the default first."""
_OF_SEVERAL = ("backward_requires_autograd", "defer_pp_recv")


def _together(ranks: int, row: Mapping[str, Any]) -> bool:
    """Return whether a schedule on this number of ranks has these options."""
    schedule = row.get("schedule", "")
    if row.get("micro_batches", 8) < ranks or (schedule and not hasattr(pipelining, schedule)):
        return False
    if schedule in _SINGLE and any(row.get(name, _OPTIONS[name][0]) is not _OPTIONS[name][0] for name in _OF_SEVERAL):
        return False
    if schedule == "ScheduleLoopedBFS" and (row.get("args_chunk_spec") or row.get("kwargs_chunk_spec")):
        return False
    if ("ZeroBubble" in schedule or schedule in _VEE) and row.get("defer_pp_recv"):
        # With backward passes in two parts torch receives in another order than it sends: pytorch#178815.
        return False
    return schedule != "ScheduleDualPipeV" or bool(row.get("micro_batches", 8) >= 2 * ranks)


def assert_schedule_options_agree(training: ExactTraining, rank: Rank, *, more: bool) -> None:
    """Assert that schedules train as one device does with each pair of their options. A collective.

    Args:
        training: has as many linear layers as there are ranks, and a batch of a multiple of 8.
        more: whether to train with all rows of options, or with an eighth of them, by the seed of the training.

    Raises:
        GradientMismatch: see `assert_schedule_agrees`.
    """
    __tracebackhide__ = True
    checks = []
    for row in drawn_rows(_OPTIONS, functools.partial(_together, rank.size), seed=training.seed, more=more, share=8):
        schedule, micro_batches = row["schedule"], row["micro_batches"]
        others = {
            name: value
            for name, value in row.items()
            if name not in ("schedule", "micro_batches", "scale_grads") and value is not _OPTIONS[name][0]
        }
        stages = 1 if schedule in _SINGLE else 2
        check = functools.partial(
            assert_schedule_agrees,
            training,
            schedule,
            micro_batches,
            rank,
            stages,
            scaled=row["scale_grads"],
            in_vee=schedule in _VEE,
            options=others,
        )
        checks.append(check)
    run_all(checks)
