"""When and how DistributedDataParallel communicates: hooks, no_sync, uneven inputs, delayed parameters. All are collectives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from mgpu_check.checks.distributed_options import SMALL_BUCKET
from mgpu_check.checks.distributed_replica import Replica, under_ddp
from mgpu_check.checks.findings import Findings
from mgpu_check.checks.gradients import gradient_or_zeros
from mgpu_check.checks.replicas import assert_replicas_agree
from mgpu_check.checks.whole import Gradients, Rows, judged, slack, terms_of
from mgpu_check.rank_side.rank import Rank
from mgpu_check.specs.whole import WholeRun

__all__ = [
    "assert_accumulation_exact",
    "assert_averaging_hook_exact",
    "assert_compressed_gradients_rounded",
    "assert_delayed_parameters_reduced",
    "assert_gradient_hooks_apply",
    "assert_low_rank_hook_exact",
    "assert_uneven_inputs_joined",
]


def assert_averaging_hook_exact(rank: Rank, runs: Sequence[WholeRun], long: Sequence[WholeRun]) -> None:
    """Assert that `allreduce_hook`, and a hook of the user that sums and then divides, leave what DDP leaves without one.

    Args:
        long: runs of more steps, with `allreduce_hook` alone.

    Raises:
        GradientMismatch: names run, step, rank, parameter and element.
    """
    __tracebackhide__ = True
    with judged() as findings:
        for name, hook, megabytes, trained in (
            ("allreduce_hook, small buckets", default_hooks.allreduce_hook, SMALL_BUCKET, runs),
            ("a hook, one bucket", _sum_then_divide, 25, runs),
            ("allreduce_hook, one bucket", default_hooks.allreduce_hook, 25, long),
        ):
            for run in trained:
                replica = Replica(run, rank, findings, what=name, bucket_cap_mb=megabytes)
                seen: list[int] = []
                replica.parallel.register_comm_hook(rank.group, _noting(hook, seen))
                for _ in range(run.steps):
                    seen.clear()
                    replica.step()
                    _judge_buckets(replica, seen)


def _noting(hook: Callable[[Any, Any], Any], seen: list[int]) -> Callable[[Any, Any], Any]:
    def noted(group: Any, bucket: Any) -> Any:
        parameters, gradients = bucket.parameters(), bucket.gradients()
        seen.extend(map(id, parameters))
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        shaped = [gradient.shape for gradient in gradients] == [parameter.shape for parameter in parameters]
        if not shaped or not torch.equal(flat, bucket.buffer()):
            seen.append(0)
        return hook(group, bucket)

    # DDP compares annotations with its own types, and does not resolve those that are strings.
    noted.__annotations__.clear()
    return noted


def _judge_buckets(replica: Replica, seen: list[int]) -> bool:
    """Look whether the hook was given each parameter once, and with each its gradient, in the order of the buffer; return it."""
    wanted = sorted(id(parameter) for parameter in replica.module.parameters())
    where = f"{replica.what}, step {replica.number}, rank {replica.place.rank.index}"
    message = f"{where}: the hook was called for {len(seen)} parameters, expected each of {len(wanted)} once, with its gradient"
    replica.findings.require(sorted(seen) == wanted, message, ranks=[replica.place.rank.index])
    return sorted(seen) == wanted


def _sum_then_divide(group: Any, bucket: Any) -> Any:
    size = group.size()
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / size)


def assert_compressed_gradients_rounded(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that fp16_compress_hook, bf16_compress_hook and hooks that are wrapped for them leave gradients that are rounded as that dtype says, not more.

    For float16 the data are small: it ends at 65504. The mean of gradients as large as that is as large, too.

    Raises:
        GradientMismatch: an element is off by more than the roundings of the compressed sum, or is not of that dtype.
    """
    __tracebackhide__ = True
    hooks = [(default_hooks.fp16_compress_hook, torch.float16), (default_hooks.bf16_compress_hook, torch.bfloat16)]
    wrapped = [
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), torch.float16),
        (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), torch.bfloat16),
    ]
    with judged() as findings:
        for run in runs:
            for hook, dtype in (*hooks, *(wrapped if run is runs[0] else ())):
                own = replace(run, small=dtype == torch.float16)
                replica = Replica(own, rank, findings, what=hook.__name__)
                replica.parallel.register_comm_hook(None, hook)
                shards = _filling(replica, replica.shards(replica.next_batch()), dtype)
                replica.backward(shards[rank.index])
                _judge_compressed(replica, replica.one.parts(shards), dtype)
        for hook, dtype in hooks:
            _judge_largest(rank, hook, dtype, findings)


def _filling(replica: Replica, shards: list[Rows], dtype: torch.dtype) -> list[Rows]:
    """Multiply targets, and so gradients, by an odd number: up to where sums in `dtype` are still exact, and need all its bits."""
    parts = replica.one.parts(shards)
    largest = max(float(torch.stack(terms_of(parts, name)).abs().sum(0).max()) for name in parts[0])
    # Each rank's own are those times the number of ranks, until the hook divides: float16 ends at 65504.
    limits = torch.finfo(dtype)
    most = int(min(2 / limits.eps, limits.max / replica.place.size) / max(largest, 1.0))
    factor = (most - 1) | 1 if most > 1 else 1
    return [(x, targets * factor) for x, targets in shards]


def _judge_compressed(replica: Replica, parts: list[Gradients], dtype: torch.dtype) -> None:
    for name, parameter in replica.module.named_parameters():
        terms = terms_of(parts, name)
        tolerance = slack(dtype, replica.place.size, terms)
        replica.judge_gradient(name, parameter, torch.stack(terms).sum(0), tolerance, "compressed")
        got, rank = gradient_or_zeros(parameter), replica.place.rank.index
        kept = got.dtype == parameter.dtype and torch.equal(got.to(dtype).to(got.dtype), got)
        message = f"{replica.what}, rank {rank}, gradient of {name}: it holds values that {dtype} does not have"
        replica.findings.require(kept, message, ranks=[rank])


def _judge_largest(rank: Rank, hook: Callable[[Any, Any], Any], dtype: torch.dtype, findings: Findings) -> None:
    """Look whether gradients of which `dtype` holds each, but not the sum, are divided before they are added up."""
    # Quotients by a number that is no power of two are rounded, up as well: their sum must not leave the dtype.
    rounds = bool(rank.size & (rank.size - 1))
    largest = torch.finfo(dtype).max * (0.875 if rounds else 1.0)
    module = nn.Linear(1, 1, bias=False).to(rank.device)
    parallel = under_ddp(module, rank.device)
    parallel.register_comm_hook(None, hook)
    parallel(torch.full((1, 1), largest, device=rank.device)).sum().backward()
    got = gradient_or_zeros(module.weight).item()
    off = (rank.size + 2) * torch.finfo(dtype).eps * largest if rounds else 0.0
    message = (
        f"DDP on {rank.size} ranks, {hook.__name__}, rank {rank.index}: the mean of gradients of {largest:g} is {got:g}"
    )
    findings.require(abs(got - largest) <= off, message, ranks=[rank.index])


def assert_low_rank_hook_exact(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that PowerSGD before its first compressed step, and for what it does not compress, is exact; and that ranks agree in it.

    What a compressed step leaves out of a rank's gradient it keeps, and adds to the next one.

    Raises:
        GradientMismatch: a gradient differs from that of one device, or what is left out is not kept.
        ReplicaMismatch: compressed gradients differ between ranks.
    """
    __tracebackhide__ = True
    with judged() as findings:
        for run in runs:
            replica = Replica(run, rank, findings, what="PowerSGD")
            state = powerSGD_hook.PowerSGDState(rank.group, matrix_approximation_rank=1, start_powerSGD_iter=2)
            order: list[int] = []
            replica.parallel.register_comm_hook(state, _noting(powerSGD_hook.powerSGD_hook, order))
            for number in range(1, run.steps + 1):
                if number <= 2:  # PowerSGD counts steps from 0
                    replica.step()
                    continue
                shards = replica.shards(replica.next_batch())
                replica.optimizer.zero_grad()
                order.clear()
                before = _left_out(state)
                replica.backward(shards[rank.index])
                if _judge_buckets(replica, order):
                    _judge_left_out(replica, shards[rank.index], order, _left_out(state) - before)
                held = {name: p.grad for name, p in replica.module.named_parameters() if p.grad is not None}
                with findings.collected():
                    assert_replicas_agree(held, group=rank.group, what=f"{replica.what}, gradients of step {number}")


def _left_out(state: powerSGD_hook.PowerSGDState) -> torch.Tensor:
    """Return what PowerSGD keeps for the next step, of the only bucket; 0 before the first compressed step."""
    return torch.cat([value.clone() for value in state.error_dict.values()] or [torch.zeros(1)]).cpu()


def _judge_left_out(replica: Replica, own: Rows, order: list[int], more: torch.Tensor) -> None:
    """Look whether the gradient of this rank is what came of the step, and what it keeps `more` than before."""
    exact = replica.one.parts([own])[0]
    named = {id(parameter): (name, parameter) for name, parameter in replica.module.named_parameters()}
    sizes = [named[key][1].numel() for key in order]
    kept = more.expand(sum(sizes)).split(sizes)
    for key, part in zip(order, kept, strict=True):
        name, parameter = named[key]
        expected, got = exact[name], gradient_or_zeros(parameter).cpu() + part.view(parameter.shape)
        assert expected is not None
        expected = expected.cpu() * replica.place.size
        # Sums of three, each of that order and rounded to float32: 64 roundoffs, while what is lost is of the order itself.
        most = float(max(expected.abs().max(), part.abs().max(), 1.0))
        off = float((got - expected).abs().max())
        rank = replica.place.rank.index
        message = (
            f"{replica.what}, step {replica.number}, rank {rank}, {name}: a gradient, and what is kept for the next step, "
            f"differ by up to {off:g} from this rank's own gradient and what was kept before"
        )
        replica.findings.require(off <= most * 2.0**-18, message, ranks=[rank])


def assert_accumulation_exact(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that gradients accumulate over micro-batches: within no_sync each rank's own, after the last those of all.

    An exception that leaves no_sync ends it, too. Gradients are copied from buckets, and views of them; some steps begin with zeros
    in the gradients of the step before, which stay where they are.

    Raises:
        GradientMismatch: as in `assert_averaging_hook_exact`.
    """
    __tracebackhide__ = True
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
            pass  # what is left is the inner one alone
        replica.backward((x[:half], targets[:half]))
    own = replica.one.parts([(x[:half], targets[:half])])[0]
    for name, parameter in replica.module.named_parameters():
        exact = own[name]
        assert exact is not None
        when = f"step {replica.number}, within no_sync"
        replica.judge_gradient(name, parameter, exact * replica.place.size, 0.0, when)
    with contextlib.suppress(_Left), replica.parallel.no_sync():
        raise _Left
    replica.backward((x[half:], targets[half:]))
    return replica.one.parts(shards)


class _Left(Exception):
    """A micro-batch that is given up, as when memory does not suffice."""


def assert_uneven_inputs_joined(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that ranks with fewer batches than others join them: what is left is averaged over those that still train.

    Rank r has r + 1 batches; with divide_by_initial_world_size the mean is still over all ranks, without it over those that are
    there. All ranks end with the same parameters.

    Raises:
        GradientMismatch: a gradient differs from that of one device.
        ReplicaMismatch: ranks end with different parameters.
    """
    __tracebackhide__ = True
    with judged() as findings:
        for number, run in enumerate(runs):
            initial = bool((run.seed + number) % 2)
            replica = Replica(run, rank, findings, what=f"join, divide_by_initial_world_size={initial}")
            batches = run.batches()
            with replica.parallel.join(divide_by_initial_world_size=initial):
                for turn in range(rank.index + 1):
                    shards = replica.shards(batches[turn % run.steps])
                    there = range(turn, rank.size)
                    replica.number = turn + 1
                    replica.optimizer.zero_grad()
                    replica.backward(shards[rank.index])
                    parts = replica.one.parts([shards[index] for index in there])
                    _judge_joined(replica, parts, rank.size if initial else len(there))
                    replica.finish(parts, from_exact=True)
            with findings.collected():
                assert_replicas_agree(replica.module, group=rank.group, what=f"{replica.what}, at the end")


def _judge_joined(replica: Replica, parts: list[Gradients], divisor: int) -> None:
    size = replica.place.size
    for name, parameter in replica.module.named_parameters():
        terms = terms_of(parts, name)
        expected = torch.stack(terms).sum(0) * (size / divisor)
        # The divisor is no power of two as soon as some have joined.
        tolerance = 0.0 if divisor == size and not size & (size - 1) else slack(parameter.dtype, 3, terms) * size
        replica.judge_gradient(name, parameter, expected, tolerance, f"batch {replica.number}")


def assert_gradient_hooks_apply(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that hooks are called once a step: a parameter's on each rank's own gradient before the mean, a module's with its outputs.

    Raises:
        GradientMismatch: a gradient is not that of one device whose hook does the same, or a hook was not called once.
    """
    __tracebackhide__ = True
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
    """Assert that gradients with delay_all_reduce_named_params are averaged by the hook of the parameter named for it.

    Raises:
        GradientMismatch: as in `assert_averaging_hook_exact`.
    """
    __tracebackhide__ = True
    with judged() as findings:
        for run in runs:
            replica = _Delayed(run, rank, findings, what="delay_all_reduce_named_params")
            for _ in range(run.steps):
                replica.step()


class _Delayed(Replica):
    """A replica whose last layer is reduced when the first gradient of the first one is there, which is made last."""

    def wrap(self) -> None:
        named = list(self.module.named_parameters())
        self.options = {"delay_all_reduce_named_params": named[-2:], "param_to_hook_all_reduce": named[0][1]}
        super().wrap()

    def backward(self, rows: Rows) -> torch.Tensor:
        outputs = super().backward(rows)
        if self.place.rank.device.type == "cuda":
            # Nothing in DDP waits for this reduction.
            torch.cuda.synchronize(self.place.rank.device)
        return outputs
