"""DistributedDataParallel with each of its options trains as one device does, to the bit. All of these are collectives.

Each function takes the runs that it trains, one after the other, and raises only when all of them have ended, so that no rank
waits for one that has found something.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.checks.distributed_replica import Place, Replica, train, under_ddp
from mgpu_check.checks.findings import Findings
from mgpu_check.checks.whole import freeze_first, judged
from mgpu_check.rank_side.rank import Rank
from mgpu_check.specs.whole import WholeRun

__all__ = [
    "assert_buckets_reduced",
    "assert_frozen_parameters_kept",
    "assert_groups_apart",
    "assert_models_train",
    "assert_static_graph_trains",
    "assert_unused_parameters_reduced",
    "own_group",
]

SMALL_BUCKET = 0.0001
"""MiB: a bucket for every 100 bytes, so for nearly every parameter."""


def assert_models_train(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that each run under DDP is that of one device: outputs, gradients, parameters of every step.

    Raises:
        GradientMismatch: names run, step, rank, parameter and element.
    """
    __tracebackhide__ = True
    with judged() as findings:
        for run in runs:
            train(run, rank, findings)


def assert_buckets_reduced(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that gradients in many buckets, copied and in views, are those of one device.

    The order of buckets changes after the first step, when DDP rebuilds them. With views DDP is not told the device.

    Raises:
        GradientMismatch: as in `assert_models_train`.
    """
    __tracebackhide__ = True
    with judged() as findings:
        for run in runs:
            for view in (False, True):
                what = f"bucket_cap_mb={SMALL_BUCKET}, gradient_as_bucket_view={view}"
                options: dict[str, Any] = {"device_ids": None} if view else {}
                train(
                    run, rank, findings, what=what, bucket_cap_mb=SMALL_BUCKET, gradient_as_bucket_view=view, **options
                )


def assert_unused_parameters_reduced(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that find_unused_parameters averages what some ranks have used, and leaves alone what none has.

    Ranks with an even number use head 0, others head 1, which changes with each step; head 2 is never used. Gradients are copied
    from buckets, and views of them.

    Raises:
        GradientMismatch: as in `assert_models_train`.
    """
    __tracebackhide__ = True
    with judged() as findings:
        for run in runs:
            for view in (False, True):
                what = f"find_unused_parameters, gradient_as_bucket_view={view}"
                replica = Replica(
                    run, rank, findings, what=what, find_unused_parameters=True, gradient_as_bucket_view=view
                )
                for number in range(run.steps):
                    replica.forwards = [_head((index + number) % 2) for index in range(rank.size)]
                    replica.step()


def _head(number: int) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    return lambda model, x: torch.as_tensor(model(x, head=number))


def assert_static_graph_trains(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that static_graph trains a layer that is used twice and recomputed, beside one that is never used.

    Raises:
        GradientMismatch: as in `assert_models_train`.
    """
    __tracebackhide__ = True
    with judged() as findings:
        for run in runs:
            train(run, rank, findings, what="static_graph", static_graph=True)


def assert_frozen_parameters_kept(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that parameters that need no gradient are rank 0's and stay so, and that those to ignore stay each rank's own.

    Raises:
        GradientMismatch: as in `assert_models_train`.
    """
    __tracebackhide__ = True
    with judged() as findings:
        for run in runs:
            train(run, rank, findings, what="first layer frozen", prepare=freeze_first)
            _ignoring(run, rank, findings)


def _ignoring(run: WholeRun, rank: Rank, findings: Findings) -> None:
    """Leave one parameter out of DDP: it keeps each rank's own value, and its own gradient."""
    own = run.build(rank.index).to(rank.device)
    name, parameter = list(own.named_parameters())[-1]
    before = parameter.detach().clone()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(own, [name])
    parallel = under_ddp(own, rank.device)
    ones = torch.full((rank.index + 1, 16), 1.0, device=rank.device)
    parallel(ones).sum().backward()
    what = f"DDP of {run.model} on {rank.size} ranks, {name} ignored, rank {rank.index}"
    findings.require(torch.equal(parameter, before), f"{what}: {name} has changed", ranks=[rank.index])
    # The last parameter is the bias: its gradient is the number of this rank's rows.
    right = parameter.grad is not None and bool((parameter.grad == rank.index + 1).all())
    message = f"{what}: its gradient is {parameter.grad}, expected {rank.index + 1}, that of this rank alone"
    findings.require(right, message, ranks=[rank.index])


def assert_groups_apart(rank: Rank, runs: Sequence[WholeRun], first: Sequence[int]) -> None:
    """Assert that two groups of ranks, `first` and all others, train apart: each as one device does with a run of its own.

    Raises:
        GradientMismatch: as in `assert_models_train`.
    """
    __tracebackhide__ = True
    with judged() as findings, own_group(rank, first) as (members, place):
        for run in runs:
            other = replace(run, seed=run.seed + members[0])
            train(other, place, findings, what=f"process_group of {members}")


@contextlib.contextmanager
def own_group(rank: Rank, first: Sequence[int]) -> Iterator[tuple[list[int], Place]]:
    """Make two groups of ranks, `first` and all others; give the members of this rank's, and its place in it. A collective."""
    chosen = sorted({member % rank.size for member in first})
    both = [chosen, [index for index in range(rank.size) if index not in chosen]]
    groups = [dist.new_group(members) if members else None for members in both]
    members, group = next((one, group) for one, group in zip(both, groups, strict=True) if rank.index in one)
    yield members, Place(rank, members.index(rank.index), len(members), group)
    dist.destroy_process_group(group)
