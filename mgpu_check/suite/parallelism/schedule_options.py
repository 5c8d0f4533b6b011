"""Train by schedules of `torch.distributed.pipelining` with each pair of values of their options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from mgpu_check.asserts.findings import run_all
from mgpu_check.asserts.known_defects import left_out
from mgpu_check.asserts.models import assert_same
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.suite.common.pairs import drawn_rows
from mgpu_check.suite.parallelism.torch_parallelism import assert_schedule_agrees
from mgpu_check.torch_hooks.tensors import copied

_BY_ROWS, _BY_COLUMNS = TensorChunkSpec(0), TensorChunkSpec(1)
_VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
_SINGLE = ("ScheduleGPipe", "Schedule1F1B")
_OPTIONS: Mapping[str, Sequence[Any]] = {
    "schedule": (*_SINGLE, "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS", *_VEE),
    "micro_batches": (4, 2, 8),
    "scale_grads": (True, False),
    "args_chunk_spec": (None, (_BY_ROWS,)),
    "kwargs_chunk_spec": (None, {"rows": _BY_ROWS}, {"rows": _BY_COLUMNS}),
    "output_merge_spec": (None, _BY_ROWS),
    "backward_requires_autograd": (True, False),
    "defer_pp_recv": (False, True),
}
"""Options of schedules, the default first."""
_OF_SEVERAL = ("backward_requires_autograd", "defer_pp_recv")
_DEFERS = "defer_pp_recv" in inspect.signature(pipelining.ScheduleLoopedBFS).parameters
TAKES_UNEVEN = not hasattr(pipelining.PipelineStage, "_validate_fwd_input")
"""True if a stage accepts inputs of other shapes than the first. Torch 2.11 refuses them."""


def _together(ranks: int, row: Mapping[str, Any]) -> bool:
    """Return whether a schedule on this number of ranks has these options."""
    schedule = row.get("schedule", "")
    if row.get("micro_batches", 8) < ranks or (schedule and not hasattr(pipelining, schedule)):
        return False
    if schedule in _SINGLE and any(row.get(name, _OPTIONS[name][0]) is not _OPTIONS[name][0] for name in _OF_SEVERAL):
        return False
    if schedule == "ScheduleLoopedBFS" and (row.get("args_chunk_spec") or row.get("kwargs_chunk_spec")):
        return False
    if row.get("defer_pp_recv") and (not _DEFERS or "ZeroBubble" in schedule or schedule in _VEE):
        # With backward passes in two parts torch receives in another order than it sends: pytorch#178815.
        return False
    return schedule != "ScheduleDualPipeV" or bool(row.get("micro_batches", 8) >= 2 * ranks)


def assert_schedule_options_agree(training: ExactTraining, rank: Rank, *, more: bool) -> None:
    """Assert that schedules train as one device does with each pair of their options. A collective.

    Args:
        training: has as many linear layers as there are ranks, and a batch of a multiple of 8.
        more: whether to train with all rows of options, or with an eighth of them, by the seed of the training.
    """
    checks = []
    for row in drawn_rows(_OPTIONS, functools.partial(_together, rank.size), seed=training.seed, more=more, share=8):
        schedule, micro_batches = row["schedule"], row["micro_batches"]
        others = {
            name: value
            for name, value in row.items()
            if name not in ("schedule", "micro_batches", "scale_grads") and value is not _OPTIONS[name][0]
        }
        stages = 1 if schedule in _SINGLE else 2
        options = {"scaled": row["scale_grads"], "in_vee": schedule in _VEE, "options": others}
        checks.append(functools.partial(
            assert_schedule_agrees, training, schedule, micro_batches, rank, stages, **options
        ))  # fmt: skip
    if TAKES_UNEVEN:
        checks.append(functools.partial(_assert_uneven_parts_are_joined, rank))
    else:
        left_out("uneven micro-batches of a stage alone", "this torch refuses them")
    run_all(checks, rank)


def _assert_uneven_parts_are_joined(rank: Rank) -> None:
    """Assert that a stage alone returns its outputs in order for micro-batches of several lengths: several stages
    cannot have these."""
    alone, groups = dist.new_subgroups_by_enumeration([[index] for index in range(rank.size)])
    layer = nn.Linear(3, 2, bias=False).to(rank.device)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).view(2, 3))
    x = torch.arange(21.0, device=rank.device).view(7, 3)
    outputs = pipelining.ScheduleGPipe(pipelining.PipelineStage(layer, 0, 1, rank.device, group=alone), 3).step(x)
    label = f"ScheduleGPipe of 3 micro-batches of 7 samples in one stage, on {rank.device}"
    assert_same({"outputs": copied(outputs)}, {"outputs": copied(layer(x)).double()}, label, rank.index)
    for group in groups:
        dist.destroy_process_group(group)
