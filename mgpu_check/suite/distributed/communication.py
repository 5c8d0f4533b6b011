"""Check when DistributedDataParallel communicates: no_sync, uneven inputs, gradient hooks, delayed parameters.

All functions are collectives.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.replicas import assert_replicas_agree
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.whole_numbers.cases import WholeRun
from mgpu_check.suite.common.whole_numbers.reference import Gradients, Rows, judged
from mgpu_check.suite.distributed.replica import Replica, under_ddp


def assert_accumulation_exact(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that gradients accumulate over micro-batches: local ones within no_sync, averaged ones after the last.

    An exception within no_sync must end it too. Gradients are copies of buckets, or views of them. Every second step
    keeps the gradient tensors of the step before and zeroes them.
    """
    with judged() as findings:
        for run in runs:
            view = bool(run.seed % 2)  # seeds follow each other
            what = f"no_sync for the first of two micro-batches, gradient_as_bucket_view={view}"
            replica = Replica(run, rank, findings, what=what, gradient_as_bucket_view=view)
            for _ in range(run.steps):
                replica.step(by_hand=functools.partial(_accumulate, replica), set_to_none=replica.number % 2 == 0)


def _accumulate(replica: Replica, shards: list[Rows]) -> list[Gradients]:
    x, targets = shards[replica.place.index]
    half = len(x) // 2
    with replica.parallel.no_sync():
        with replica.parallel.no_sync():
            pass  # ends only the inner no_sync
        replica.backward((x[:half], targets[:half]))
    own = replica.one.parts([(x[:half], targets[:half])])[0]
    for name, parameter in replica.module.named_parameters():
        exact = own[name]
        assert exact is not None
        when = f"step {replica.number}, within no_sync"
        replica.judge_gradient(name, parameter, exact * replica.place.size, 0.0, when)
    with contextlib.suppress(_AbandonedBatch), replica.parallel.no_sync():
        raise _AbandonedBatch
    replica.backward((x[half:], targets[half:]))
    return replica.one.parts(shards)


class _AbandonedBatch(Exception):
    """A micro-batch that is abandoned, as when memory runs out."""


def assert_uneven_inputs_joined(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that `join` lets ranks with fewer batches wait for the others, and that gradients have the right mean.

    Rank r has r + 1 batches; a second run rotates these numbers among the ranks. With divide_by_initial_world_size the
    mean is over all ranks, without it over those that still train. All ranks end with the parameters and buffers of the
    rank that has trained longest. With throw_on_early_termination all ranks raise as soon as one has no batch left.
    """
    with judged() as findings:
        for number, run in enumerate(runs):
            initial = bool((run.seed + number) % 2)
            _join(run, rank, findings, initial, list(range(1, rank.size + 1)))
            if rank.size > 1:
                shift = 1 + run.seed % (rank.size - 1)
                _join(run, rank, findings, not initial, [1 + (index + shift) % rank.size for index in range(rank.size)])
            _stop_together(run, rank, findings)
        _join_with_buffers(rank, findings)
        _join(runs[0], rank, findings, True, [2] * rank.size, enable=False)


def _join(
    run: WholeRun, rank: Rank, findings: Findings, initial: bool, counts: Sequence[int], *, enable: bool = True
) -> None:
    """Train each rank on its number of batches in `counts`; `initial` is divide_by_initial_world_size."""
    what = f"join of {counts} batches, divide_by_initial_world_size={initial}, enable={enable}"
    replica = Replica(run, rank, findings, what=what)
    batches = run.batches()
    with replica.parallel.join(divide_by_initial_world_size=initial, enable=enable):
        for turn in range(counts[rank.index]):
            shards = replica.shards(batches[turn % run.steps])
            there = [index for index, count in enumerate(counts) if count > turn]
            replica.number = turn + 1
            replica.optimizer.zero_grad()
            replica.backward(shards[rank.index])
            parts = replica.one.parts([shards[index] for index in there])
            replica.judge_mean(parts, rank.size if initial else len(there))
            replica.finish(parts, from_exact=True)
    if counts[rank.index] == max(counts):
        # Only here has the single device taken all steps; the comparison of replicas below covers the other ranks.
        replica.judge_parameters()
    with findings.collected():
        assert_replicas_agree(replica.module, group=rank.group, what=f"{replica.what}, at the end")


class _CallCounter(nn.Linear):
    """A layer that counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def _join_with_buffers(rank: Rank, findings: Findings) -> None:
    """Check that all ranks end with the buffers of the rank that trains longest, which is in the middle of many."""
    longest = rank.size // 2
    count = 4 if rank.index == longest else 1 + rank.index % 3
    layer = _CallCounter().to(rank.device)
    parallel = under_ddp(layer, rank.device)
    with parallel.join():
        for _ in range(count):
            parallel(torch.ones(1, 1, device=rank.device)).sum().backward()
    calls = int(layer.calls)
    message = (
        f"DDP on {rank.size} ranks, join, rank {rank.index}: a buffer that counts batches ends as {calls}, expected "
        f"4, as on rank {longest}, which has trained on the most"
    )
    findings.require(calls == 4, message, ranks=[rank.index])


def _stop_together(run: WholeRun, rank: Rank, findings: Findings) -> None:
    """Check that with throw_on_early_termination all ranks raise, and stop, when rank 0 has no batch left."""
    replica = Replica(run, rank, findings, what="join, throw_on_early_termination=True")
    shard = replica.shards(replica.next_batch())[rank.index]
    done, raised = 0, False
    try:
        with replica.parallel.join(throw_on_early_termination=True):
            for _ in range(rank.index + 1):
                replica.backward(shard)
                done += 1
    except RuntimeError:
        raised = True
    message = (
        f"{replica.what}, rank {rank.index} of {rank.size}, where rank 0 has one batch: trained on {done} batches, "
        f"expected 1, and {'raised' if raised else 'did not raise'}"
    )
    findings.require(done == 1 and raised == (rank.size > 1), message, ranks=[rank.index])


def assert_gradient_hooks_apply(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that hooks of parameters and modules are called once a step.

    The hook of a parameter gets the rank's own gradient, before the mean.
    """
    with judged() as findings:
        for run in runs:
            replica = Replica(run, rank, findings, what="a hook that doubles a gradient")
            name, parameter = next(replica.module.named_parameters())
            calls = {"forward hook": 0, "full backward hook": 0, "forward hook of DDP": 0}
            parameter.register_hook(lambda gradient: gradient * 2)
            inner = list(replica.module.children())[-1]
            inner.register_forward_hook(_counting(calls, "forward hook"))
            inner.register_full_backward_hook(_counting(calls, "full backward hook"))
            replica.parallel.register_forward_hook(_counting(calls, "forward hook of DDP"))
            for _ in range(run.steps):
                replica.step(by_hand=functools.partial(_doubled, replica, name))
            for hook, count in calls.items():
                message = f"{replica.what}, rank {rank.index}: the {hook} was called {count} times in {run.steps} steps"
                findings.require(count == run.steps, message, ranks=[rank.index])


def _counting(calls: dict[str, int], name: str) -> Callable[..., None]:
    def count(*_: object) -> None:
        calls[name] += 1

    return count


def _doubled(replica: Replica, name: str, shards: list[Rows]) -> list[Gradients]:
    replica.backward(shards[replica.place.index])
    parts = replica.one.parts(shards)
    for part in parts:
        exact = part[name]
        part[name] = None if exact is None else exact * 2
    return parts


def assert_delayed_parameters_reduced(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that the hook of `param_to_hook_all_reduce` averages the gradients of `delay_all_reduce_named_params`."""
    with judged() as findings:
        for run in runs:
            replica = _Delayed(run, rank, findings, what="delay_all_reduce_named_params")
            for _ in range(run.steps):
                replica.step()


class _Delayed(Replica):
    """A replica that reduces its last layer when the gradient of the first layer is ready, which comes last."""

    def wrap(self) -> None:
        named = list(self.module.named_parameters())
        self.options = {"delay_all_reduce_named_params": named[-2:], "param_to_hook_all_reduce": named[0][1]}
        super().wrap()

    def backward(self, rows: Rows) -> torch.Tensor:
        outputs = super().backward(rows)
        if self.place.rank.device.type == "cuda":
            # DDP does not wait for this reduction.
            torch.cuda.synchronize(self.place.rank.device)
        return outputs
