"""Check communication hooks of DistributedDataParallel that average and compress. All are collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from mgpu_check.asserts.findings import Findings, require
from mgpu_check.asserts.models import gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.training.cases import WholeRun
from mgpu_check.oracles.training.reference_training import Gradients, Rows, judged, slack, terms_of
from mgpu_check.suite.distributed.training import SMALL_BUCKET, Member, Replica, own_group, under_ddp

Hook = Callable[[Any, Any], Any]  # a communication hook: it takes a state, such as a process group, and a bucket

_COMPRESSING: tuple[tuple[Hook, torch.dtype], ...] = (
    (default_hooks.fp16_compress_hook, torch.float16),
    (default_hooks.bf16_compress_hook, torch.bfloat16),
)


def _wrapped() -> list[tuple[Hook, torch.dtype]]:
    float16, bfloat16 = default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper
    wrappers = ((float16, torch.float16), (bfloat16, torch.bfloat16))
    return [(wrap(default_hooks.allreduce_hook), dtype) for wrap, dtype in wrappers]


def assert_averaging_hook_exact(rank: Rank, runs: Sequence[WholeRun], long: Sequence[WholeRun]) -> None:
    """Assert that `allreduce_hook`, and a user's hook that sums and divides, give the gradients of DDP without a hook.
    `long` runs have more steps, and are for `allreduce_hook` only."""
    with judged() as findings:
        for name, hook, megabytes, trained in (
            ("allreduce_hook, small buckets", default_hooks.allreduce_hook, SMALL_BUCKET, runs),
            ("a hook, one bucket", _sum_then_divide, 25, runs),
            ("allreduce_hook, one bucket", default_hooks.allreduce_hook, 25, long),
        ):
            for run in trained:
                _averaged(run, Member.of(rank), findings, hook, label=name, bucket_cap_mb=megabytes)


def _averaged(run: WholeRun, member: Member, findings: Findings, hook: Hook, **options: Any) -> None:
    replica = Replica(run, member, findings, **options)
    parameter_ids: list[int] = []
    replica.parallel.register_comm_hook(_group_of(member), _noting(hook, parameter_ids))
    for _ in range(run.steps):
        parameter_ids.clear()
        replica.step()
        _judge_buckets(replica, parameter_ids)


def _group_of(member: Member) -> dist.ProcessGroup:
    return member.rank.group if member.group is None else member.group


def _noting(hook: Hook, parameter_ids: list[int]) -> Hook:
    def noted(group: Any, bucket: Any) -> Any:
        parameters, gradients = bucket.parameters(), bucket.gradients()
        parameter_ids.extend(map(id, parameters))
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        shaped = [gradient.shape for gradient in gradients] == [parameter.shape for parameter in parameters]
        if not shaped or not torch.equal(flat, bucket.buffer()):
            parameter_ids.append(0)
        return hook(group, bucket)

    # DDP compares annotations with its own types, and does not resolve annotations that are strings:
    # torch/nn/parallel/distributed.py, _check_comm_hook, torch 2.13.
    noted.__annotations__.clear()
    return noted


def _judge_buckets(replica: Replica, parameter_ids: list[int]) -> bool:
    """Check, and return, whether the hook got each parameter once, with its gradient, in the order of the buffer."""
    wanted = sorted(id(parameter) for parameter in replica.module.parameters())
    text = f"the hook was called for {len(parameter_ids)} parameters, expected each of {len(wanted)} once, with"
    replica.require(sorted(parameter_ids) == wanted, f"{text} its gradient", f", step {replica.number}")
    return sorted(parameter_ids) == wanted


def _sum_then_divide(group: Any, bucket: Any) -> Any:
    size = group.size()
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / size)


def assert_compressed_gradients_rounded(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that compressing hooks and wrappers round gradients to their dtype, and no further.

    The hooks are fp16_compress_hook, bf16_compress_hook and both wrappers. Data for float16 is small, because float16
    ends at 65504. The mean of gradients of this size must not overflow.
    """
    member = Member.of(rank)
    with judged() as findings:
        for run in runs:
            for hook, dtype in (*_COMPRESSING, *(_wrapped() if run is runs[0] else ())):
                _compressed(run, member, findings, hook, dtype)
        for hook, dtype in _COMPRESSING:
            _judge_largest(member, hook, dtype, findings)


def _compressed(
    run: WholeRun, member: Member, findings: Findings, hook: Hook, dtype: torch.dtype, suffix: str = ""
) -> None:
    replica = Replica(replace(run, small=dtype == torch.float16), member, findings, label=hook.__name__ + suffix)
    replica.parallel.register_comm_hook(member.group, hook)
    shards = _filling(replica, replica.shards(replica.next_batch()), dtype)
    replica.backward(shards[member.index])
    _judge_compressed(replica, replica.one.parts(shards), dtype)


def _filling(replica: Replica, shards: list[Rows], dtype: torch.dtype) -> list[Rows]:
    """Multiply targets, and so gradients, by an odd number, so that sums need all bits of `dtype` but stay exact."""
    shard_gradients = replica.one.parts(shards)
    largest = max(float(torch.stack(terms_of(shard_gradients, name)).abs().sum(0).max()) for name in shard_gradients[0])
    # A rank's own gradients are larger by the number of ranks until the hook divides, and float16 ends at 65504.
    limits = torch.finfo(dtype)
    most = int(min(2 / limits.eps, limits.max / replica.member.size) / max(largest, 1.0))
    factor = (most - 1) | 1 if most > 1 else 1
    return [(x, targets * factor) for x, targets in shards]


def _judge_compressed(replica: Replica, shard_gradients: list[Gradients], dtype: torch.dtype) -> None:
    for name, parameter in replica.module.named_parameters():
        terms = terms_of(shard_gradients, name)
        tolerance = slack(dtype, replica.member.size, terms)
        replica.judge_gradient(name, parameter, torch.stack(terms).sum(0), tolerance, "compressed")
        got, rank = gradient_or_zeros(parameter), replica.member.rank.index
        kept = got.dtype == parameter.dtype and torch.equal(got.to(dtype).to(got.dtype), got)
        message = f"{replica.label}, rank {rank}, gradient of {name}: it holds values that {dtype} cannot represent"
        replica.findings.require(kept, message, ranks=[rank])


def _judge_largest(member: Member, hook: Hook, dtype: torch.dtype, findings: Findings) -> None:
    """Check that the hook divides gradients before it sums them, if `dtype` holds each gradient but not the sum."""
    device = member.rank.device
    # Unless the divisor is a power of two, quotients may round up, and then their sum must not overflow.
    rounds = bool(member.size & (member.size - 1))
    largest = torch.finfo(dtype).max * (0.875 if rounds else 1.0)
    module = nn.Linear(1, 1, bias=False).to(device)
    parallel = under_ddp(module, device, process_group=member.group)
    parallel.register_comm_hook(member.group, hook)
    parallel(torch.full((1, 1), largest, device=device)).sum().backward()
    got = gradient_or_zeros(module.weight).item()
    off = (member.size + 2) * torch.finfo(dtype).eps * largest if rounds else 0.0
    subject, text = f"DDP on {member.size} ranks, {hook.__name__}", f"the mean of gradients of {largest:g} is {got:g}"
    require(findings, member.rank, abs(got - largest) <= off, subject, text)


def assert_hooks_keep_to_groups(rank: Rank, runs: Sequence[WholeRun], first_group: Sequence[int]) -> None:
    """Assert that hooks of models that train in a group of ranks average over exactly this group.
    All ranks outside `first_group` form the second group."""
    with judged() as findings, own_group(rank, first_group) as (members, member):
        suffix = f", in the group {members}"
        for run in (replace(original, seed=original.seed + members[0]) for original in runs):
            once = replace(run, steps=1)
            average, named = default_hooks.allreduce_hook, f"allreduce_hook{suffix}"
            _averaged(once, member, findings, average, label=named, bucket_cap_mb=SMALL_BUCKET)
            for hook, dtype in (*_COMPRESSING, *_wrapped()[:1]):
                _compressed(run, member, findings, hook, dtype, suffix)
        for hook, dtype in _COMPRESSING:
            _judge_largest(member, hook, dtype, findings)
