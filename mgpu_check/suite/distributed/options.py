"""Compare DistributedDataParallel with each of its options with one device, bit for bit. All functions are collectives.

Each function trains its runs one after the other, and raises only after the last, so that no rank waits for one that
has failed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.gradients import gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.common.whole_numbers.cases import WholeRun
from mgpu_check.suite.common.whole_numbers.reference import as_it_is, freeze_first, judged
from mgpu_check.suite.distributed.replica import Place, Replica, train, under_ddp

_LARGE = (1 << 18) + 4099
"""Elements of float32 with more than 1 MiB."""

SMALL_BUCKET = 0.0001
"""MiB, about 100 bytes: so small that nearly every parameter has its own bucket."""


def assert_models_train(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that each run under DDP has the outputs, gradients and parameters of one device in every step."""
    with judged() as findings:
        for run in runs:
            train(run, rank, findings)
            if findings.enough(rank):
                break


def assert_buckets_reduced(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that gradients in many buckets, as copies and as views, equal those of one device.

    The order of buckets changes after the first step, when DDP rebuilds them. With views DDP gets no `device_ids`. A
    bucket above 1 MiB is checked, too.
    """
    with judged() as findings:
        _judge_large_bucket(rank, findings)
        for run in runs:
            for view in (False, True):
                what = f"bucket_cap_mb={SMALL_BUCKET}, gradient_as_bucket_view={view}"
                options: dict[str, Any] = {"device_ids": None} if view else {}
                train(
                    run, rank, findings, what=what, bucket_cap_mb=SMALL_BUCKET, gradient_as_bucket_view=view, **options
                )


_OPTIONS: Mapping[str, Sequence[Any]] = {
    "gradient_as_bucket_view": (False, True),
    "find_unused_parameters": (False, True),
    "static_graph": (False, True),
    "bucket_cap_mb": (None, SMALL_BUCKET),
    "bucket_cap_mb_list": (None, (SMALL_BUCKET, 1)),
    "device_ids": ("own", None),
    "output_device": (None, "own"),
    "device_mesh": (None, "own"),
    "init_sync": (True, False),
    "dim": (0, 1),
    "check_reduction": (False, True),
    "batched_grad_copy": (False, True),
    "skip_all_reduce_unused_params": (False, True),
    "forward_sync_buffers": (None, True, False),
}
"""Options of DistributedDataParallel with their values, the default first; "own" is the rank's device, or a mesh of all
ranks. Without `init_sync` all ranks start with the parameters and buffers of the first."""


def _together(row: Mapping[str, Any]) -> bool:
    """Return whether DDP takes these options together: what skips unused parameters must know them."""
    unused = row.get("find_unused_parameters")
    if row.get("device_ids", "own") is None and row.get("output_device"):
        return False
    return not (row.get("static_graph") and unused) and not (row.get("skip_all_reduce_unused_params") and not unused)


def assert_options_agree(rank: Rank, run: WholeRun, *, more: bool) -> None:
    """Assert that a run under DDP trains as on one device with each pair of options.

    Args:
        more: whether to train with all rows of options, or with a quarter of them, by the seed of the run.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    options = {name: values for name, values in _OPTIONS.items() if name in known}
    with judged() as findings:
        for row in drawn_rows(options, _together, seed=run.seed, more=more):
            given = {name: value for name, value in row.items() if value not in ("own", _OPTIONS[name][0])}
            if row.get("output_device"):
                given["output_device"] = rank.device
            if row.get("device_mesh"):
                given["device_mesh"] = init_device_mesh("cuda", (rank.size,))
            prepare = as_it_is if row.get("init_sync", True) else _like_the_first(run)
            train(run, rank, findings, what=f"options {words_of(row, _OPTIONS)}", prepare=prepare, **given)
            if findings.enough(rank):
                break


def _like_the_first(run: WholeRun) -> Callable[[nn.Module], None]:
    def prepare(module: nn.Module) -> None:
        module.load_state_dict(run.build(0).state_dict())

    return prepare


class _Weighted(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_LARGE))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() + self.bias.sum()


def _judge_large_bucket(rank: Rank, findings: Findings) -> None:
    """Check the mean of gradients in one bucket above 1 MiB, element by element, in two steps."""
    places = torch.arange(_LARGE) % 251
    model = under_ddp(_Weighted().to(rank.device), rank.device)
    right = places + (rank.size - 1) / 2
    for step in range(2):
        model.zero_grad()
        model((places + rank.index).float().to(rank.device)).backward()
        gradient = gradient_or_zeros(model.module.weight).cpu()
        # DDP multiplies by the rounded inverse of the world size, then adds.
        wrong = (gradient - right).abs() > right * 2.0**-20
        first = int(wrong.int().argmax())
        message = (
            f"DDP on {rank.size} ranks, a bucket of {_LARGE} elements, step {step}, rank {rank.index}: "
            f"{int(wrong.sum())} elements of the gradient are wrong, the first at {first}: {gradient[first].item()}, "
            f"expected {right[first].item()}"
        )
        findings.require(not bool(wrong.any()), message, ranks=[rank.index])


def assert_unused_parameters_reduced(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that find_unused_parameters averages parameters that some ranks have used, and skips those of no rank.

    Even ranks use head 0 and odd ranks head 1; the heads swap with each step, and head 2 is never used. Gradients are
    copies of buckets, or views of them.
    """
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
    """Assert that static_graph trains a layer that is used twice and recomputed, next to a layer that is never used."""
    with judged() as findings:
        for run in runs:
            train(run, rank, findings, what="static_graph", static_graph=True)


def assert_frozen_parameters_kept(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that frozen parameters get and keep rank 0's values, and that ignored parameters stay each rank's own."""
    with judged() as findings:
        for run in runs:
            train(run, rank, findings, what="first layer frozen", prepare=freeze_first)
            _ignoring(run, rank, findings)


def _ignoring(run: WholeRun, rank: Rank, findings: Findings) -> None:
    """Make DDP ignore a parameter, which must keep the rank's own value and gradient."""
    own = run.build(rank.index).to(rank.device)
    name, parameter = list(own.named_parameters())[-1]
    before = parameter.detach().clone()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(own, [name])
    parallel = under_ddp(own, rank.device)
    ones = torch.full((rank.index + 1, 16), 1.0, device=rank.device)
    parallel(ones).sum().backward()
    what = f"DDP of {run.model} on {rank.size} ranks, {name} ignored, rank {rank.index}"
    findings.require(torch.equal(parameter, before), f"{what}: {name} has changed", ranks=[rank.index])
    # The last parameter is a bias, so its gradient is the number of this rank's rows.
    right = parameter.grad is not None and bool((parameter.grad == rank.index + 1).all())
    message = f"{what}: its gradient is {parameter.grad}, expected {rank.index + 1}, that of this rank alone"
    findings.require(right, message, ranks=[rank.index])


def assert_groups_apart(rank: Rank, runs: Sequence[WholeRun], first: Sequence[int]) -> None:
    """Assert that two groups of ranks, `first` and all others, train independently, each like a device with its run."""
    with judged() as findings, own_group(rank, first) as (members, place):
        for run in runs:
            other = replace(run, seed=run.seed + members[0])
            train(other, place, findings, what=f"process_group of {members}")


@contextlib.contextmanager
def own_group(rank: Rank, first: Sequence[int]) -> Iterator[tuple[list[int], Place]]:
    """Make two groups of ranks, `first` and all others; yield the members of this rank's group and its place.

    A collective.
    """
    chosen = sorted({member % rank.size for member in first})
    both = [chosen, [index for index in range(rank.size) if index not in chosen]]
    groups = [dist.new_group(members) if members else None for members in both]
    members, group = next((one, group) for one, group in zip(both, groups, strict=True) if rank.index in one)
    yield members, Place(rank, members.index(rank.index), len(members), group)
    dist.destroy_process_group(group)
