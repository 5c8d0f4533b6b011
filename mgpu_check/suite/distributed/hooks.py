"""Check communication hooks of DistributedDataParallel that average, compress and approximate. All are collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

from mgpu_check.asserts.findings import Findings, require
from mgpu_check.asserts.known_defects import known_defect
from mgpu_check.asserts.models import gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.steps import full_precision
from mgpu_check.oracles.training.cases import WholeRun
from mgpu_check.oracles.training.reference_training import Gradients, Rows, judged, slack, terms_of
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.distributed.training import SMALL_BUCKET, Member, Replica, own_group, under_ddp

Hook = Callable[[Any, Any], Any]  # a communication hook: it takes a state, such as a process group, and a bucket

_COMPRESSING: tuple[tuple[Hook, torch.dtype], ...] = (
    (default_hooks.fp16_compress_hook, torch.float16),
    (default_hooks.bf16_compress_hook, torch.bfloat16),
)
_QUANTIZING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("quantization_pertensor_hook", {}),
    ("quantization_perchannel_hook", {}),
    ("quantization_perchannel_hook", {"bucket_size": 32}),
)
"""Hooks that send 8 bits for each gradient, by name, with their options."""


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

    The hooks are fp16_compress_hook, bf16_compress_hook, both wrappers, and those that quantize to 8 bits. Data for
    float16 is small, because float16 ends at 65504. The mean of gradients of this size must not overflow.
    """
    member = Member.of(rank)
    with judged() as findings:
        for name, options in _QUANTIZING:
            _quantized(runs[0], member, findings, name, options)
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


def _quantized(run: WholeRun, member: Member, findings: Findings, name: str, options: dict[str, Any]) -> None:
    """Run one backward pass with a hook that sends 8 bits for each gradient, and compare the gradients."""
    replica = Replica(run, member, findings, label=f"{name} with {options}")
    hook: Hook = getattr(quantization_hooks, name)
    replica.parallel.register_comm_hook(_group_of(member), lambda group, bucket: hook(group, bucket, **options))
    shard_gradients = replica.reduced()
    # Each rank rounds to 1/255 of the range of its own gradients, which contains 0.
    ranges = [
        max((float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None), default=0.0)
        for gradients in shard_gradients
    ]
    for key, parameter in replica.module.named_parameters():
        expected = torch.stack(terms_of(shard_gradients, key)).sum(0)
        replica.judge_gradient(key, parameter, expected, sum(ranges) * 2 / 255, "quantized")


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


_APPROXIMATIONS: Mapping[str, Sequence[Any]] = {
    "matrix_approximation_rank": (1, 2),
    "use_error_feedback": (True, False),
    "warm_start": (True, False),
    "orthogonalization_epsilon": (0, 1e-8),
    "random_seed": (0, 7),
    "min_compression_rate": (2, 1, 1000),
    "batch_tensors_with_same_shape": (False, True),
    "compression_stats_logging_frequency": (10_000, 1),
}
"""Options of PowerSGDState, the default first."""


def _together(row: Mapping[str, Any]) -> bool:
    """Return whether PowerSGD is defined: without an epsilon, two columns of a gradient of rank 1 give NaN."""
    return not (row.get("matrix_approximation_rank") == 2 and row.get("orthogonalization_epsilon") == 0)


def assert_low_rank_hook_exact(rank: Rank, runs: Sequence[WholeRun], *, more: bool) -> None:
    """Assert that PowerSGD is exact before its first compressed step, and that ranks then agree.

    A compressed step leaves out a part of each rank's gradient, and must keep this error for the next step. A matrix of
    low rank must come whole. The same holds for `batched_powerSGD_hook`, which compresses a bucket as one matrix. With
    `more` the first run has each pair of options of PowerSGD, else one row of them.
    """
    with judged() as findings:
        for run in runs:
            for row in drawn_rows(_APPROXIMATIONS, _together, seed=run.seed, more=more and run is runs[0], share=100):
                _low_rank(run, Member.of(rank), findings, f" with {words_of(row, _APPROXIMATIONS)}", chosen=row)
            # Several buckets: PowerSGD must keep an error for each, but count steps, not buckets.
            start = {"warm_start": run.seed % 2 > 0}
            suffix = f", small buckets, warm_start={start['warm_start']}"
            _low_rank(run, Member.of(rank), findings, suffix, chosen=start, bucket_cap_mb=SMALL_BUCKET)
            _low_rank(run, Member.of(rank), findings, hook="batched_powerSGD_hook")
        for count, epsilon in ((2, 0), (2, 1e-8), (3, 0)):
            with full_precision():
                _judge_matrices_of_rank(count, epsilon, Member.of(rank), findings)


def _judge_matrices_of_rank(count: int, epsilon: float, member: Member, findings: Findings) -> None:
    """Check that PowerSGD with `count` columns, at most 3, reduces a gradient of this rank as a whole."""
    device, targets = member.rank.device, torch.arange(10.0 * count, device="cpu").reshape(count, 10) ** 2 % 7 - 3
    samples = torch.arange(12.0 * count, device="cpu").reshape(count, 12) ** 2 % 5 - 2
    mean = targets.T @ samples * (member.size + 1) / 2
    layer = nn.Linear(12, 10, bias=False).to(device)
    parallel = under_ddp(layer, device, process_group=member.group)
    options: dict[str, Any] = {"orthogonalization_epsilon": epsilon}
    state = powerSGD_hook.PowerSGDState(_group_of(member), count, 2, min_compression_rate=1, **options)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(1, 5):
        parallel.zero_grad()
        ((member.index + 1) * parallel(samples.to(device)) * targets.to(device)).sum().backward()
        off = float((gradient_or_zeros(layer.weight).cpu() - mean).abs().max())
        message = f"powerSGD_hook on {device}, {options}: a matrix of rank {count} in step {step} is off by {off:g}"
        findings.require(off <= 2.0**-12 * float(mean.abs().max()), message, ranks=[member.rank.index])


def _low_rank(
    run: WholeRun,
    member: Member,
    findings: Findings,
    suffix: str = "",
    hook: str = "powerSGD_hook",
    chosen: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train by PowerSGD with the `chosen` options, which compresses from the third step on."""
    replica = Replica(run, member, findings, label=f"{hook}{suffix}", **options)
    state = powerSGD_hook.PowerSGDState(_group_of(member), start_powerSGD_iter=2, **(chosen or {}))
    order: list[int] = []
    replica.parallel.register_comm_hook(state, _noting(getattr(powerSGD_hook, hook), order))
    for number in range(1, run.steps + 1):
        if number <= 2:  # PowerSGD counts steps from 0
            replica.step()
            continue
        shards = replica.shards(replica.next_batch())
        replica.optimizer.zero_grad()
        order.clear()
        before, done = _left_out(state), False
        with known_defect("batched-power-sgd-refuses", hook=hook):
            replica.backward(shards[member.index])
            done = True
        if not done:
            return  # DDP cannot step after an exception in backward
        if _judge_buckets(replica, order) and state.use_error_feedback:
            _judge_left_out(replica, shards[member.index], order, _left_out(state) - before)
        replica.agree_with_others(replica.gradients(), f"gradients of step {number}")


def assert_hooks_keep_to_groups(rank: Rank, runs: Sequence[WholeRun], first_group: Sequence[int]) -> None:
    """Assert that hooks of models that train in a group of ranks average over exactly this group.

    `post_localSGD_hook` averages over all ranks in the first two steps; afterwards over the group, or not at all. Runs
    have at least three steps, so that PowerSGD compresses. All ranks outside `first_group` form the second group.
    """
    with judged() as findings, own_group(rank, first_group) as (members, member):
        suffix = f", in the group {members}"
        for run in (replace(original, seed=original.seed + members[0]) for original in runs):
            once = replace(run, steps=1)
            average, named = default_hooks.allreduce_hook, f"allreduce_hook{suffix}"
            _averaged(once, member, findings, average, label=named, bucket_cap_mb=SMALL_BUCKET)
            for hook, dtype in (*_COMPRESSING, *_wrapped()[:1]):
                _compressed(run, member, findings, hook, dtype, suffix)
            _low_rank(run, member, findings, suffix)
        for run in runs:
            for averages in (True, False):
                _locally_averaged(run, member, members, findings, averages)
        for hook, dtype in _COMPRESSING:
            _judge_largest(member, hook, dtype, findings)


def _locally_averaged(
    run: WholeRun, member: Member, members: Sequence[int], findings: Findings, averages: bool
) -> None:
    """Train with post_localSGD_hook on all ranks, and compare each gradient with the mean over the right ranks."""
    label = f"post_localSGD_hook in the group {list(members)}, post_local_gradient_allreduce={averages}"
    rank = member.rank
    # Several buckets: the hook must count steps, not buckets.
    replica = Replica(run, rank, findings, label=label, bucket_cap_mb=SMALL_BUCKET)
    state = post_localSGD_hook.PostLocalSGDState(_group_of(replica.member), _group_of(member), 2, averages)
    parameter_ids: list[int] = []
    replica.parallel.register_comm_hook(state, _noting(post_localSGD_hook.post_localSGD_hook, parameter_ids))
    for number in range(run.steps):
        parameter_ids.clear()
        shards = replica.shards(replica.next_batch())
        replica.optimizer.zero_grad()
        replica.backward(shards[rank.index])
        own = range(rank.size) if number < 2 else members if averages else [rank.index]
        shard_gradients = replica.one.parts([shards[index] for index in own])
        _judge_buckets(replica, parameter_ids)
        replica.judge_mean(shard_gradients, len(own))
        replica.finish(shard_gradients, from_exact=True)


def _left_out(state: powerSGD_hook.PowerSGDState) -> torch.Tensor:
    """Return the error that PowerSGD keeps for the next step, bucket by bucket; 0 before the first compressed step."""
    return torch.cat([value.clone() for value in state.error_dict.values()] or [torch.zeros(1)]).cpu()


def _judge_left_out(replica: Replica, own: Rows, order: list[int], growth: torch.Tensor) -> None:
    """Check that this rank's own gradient is the compressed gradient plus `growth`, the growth of the kept error."""
    exact = replica.one.parts([own])[0]
    named = {id(parameter): (name, parameter) for name, parameter in replica.module.named_parameters()}
    sizes = [named[key][1].numel() for key in order]
    kept = (growth[: sum(sizes)] if len(growth) > 1 else growth.expand(sum(sizes))).split(sizes)
    for key, kept_error in zip(order, kept, strict=True):
        name, parameter = named[key]
        expected, got = exact[name], gradient_or_zeros(parameter).cpu() + kept_error.view(parameter.shape)
        assert expected is not None
        expected = expected.cpu() * replica.member.size
        # Three float32 terms of this magnitude: 64 roundoffs are ample, while a lost error is as large as the terms.
        most = float(max(expected.abs().max(), kept_error.abs().max(), 1.0))
        off, rank = float((got - expected).abs().max()), replica.member.rank.index
        message = (
            f"{replica.label}, step {replica.number}, rank {rank}, {name}: the compressed gradient plus the error kept "
            f"for the next step differs by up to {off:g} from this rank's own gradient plus the error kept before"
        )
        replica.findings.require(off <= most * 2.0**-18, message, ranks=[rank])
