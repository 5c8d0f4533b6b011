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

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.known_defects import known_defect
from mgpu_check.asserts.models import assert_replicas_agree, gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.steps import full_precision
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.common.reference_training import Gradients, Rows, judged, slack, terms_of
from mgpu_check.suite.common.training_cases import WholeRun
from mgpu_check.suite.distributed.training import SMALL_BUCKET, Place, Replica, own_group, under_ddp

Hook = Callable[[Any, Any], Any]
"""A communication hook: it takes a state, such as a process group, and a bucket."""

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
    """Return allreduce_hook in each compressing wrapper, with the dtype of the wrapper."""
    return [
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), torch.float16),
        (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), torch.bfloat16),
    ]


def assert_averaging_hook_exact(rank: Rank, runs: Sequence[WholeRun], long: Sequence[WholeRun]) -> None:
    """Assert that `allreduce_hook`, and a user's hook that sums and divides, give the gradients of DDP without a hook.

    Args:
        long: runs of more steps, for `allreduce_hook` only.
    """
    with judged() as findings:
        for name, hook, megabytes, trained in (
            ("allreduce_hook, small buckets", default_hooks.allreduce_hook, SMALL_BUCKET, runs),
            ("a hook, one bucket", _sum_then_divide, 25, runs),
            ("allreduce_hook, one bucket", default_hooks.allreduce_hook, 25, long),
        ):
            for run in trained:
                _averaged(run, Place.of(rank), findings, hook, what=name, bucket_cap_mb=megabytes)


def _averaged(run: WholeRun, place: Place, findings: Findings, hook: Hook, **options: Any) -> None:
    """Train with an averaging hook, and check the buckets of each step; `options` are those of `Replica`."""
    replica = Replica(run, place, findings, **options)
    seen: list[int] = []
    replica.parallel.register_comm_hook(_group_of(place), _noting(hook, seen))
    for _ in range(run.steps):
        seen.clear()
        replica.step()
        _judge_buckets(replica, seen)


def _group_of(place: Place) -> dist.ProcessGroup:
    return place.rank.group if place.group is None else place.group


def _noting(hook: Hook, seen: list[int]) -> Hook:
    def noted(group: Any, bucket: Any) -> Any:
        parameters, gradients = bucket.parameters(), bucket.gradients()
        seen.extend(map(id, parameters))
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        shaped = [gradient.shape for gradient in gradients] == [parameter.shape for parameter in parameters]
        if not shaped or not torch.equal(flat, bucket.buffer()):
            seen.append(0)
        return hook(group, bucket)

    # DDP compares annotations with its own types, and does not resolve annotations that are strings.
    noted.__annotations__.clear()
    return noted


def _judge_buckets(replica: Replica, seen: list[int]) -> bool:
    """Check, and return, whether the hook got each parameter once, with its gradient, in the order of the buffer."""
    wanted = sorted(id(parameter) for parameter in replica.module.parameters())
    where = f"{replica.what}, step {replica.number}, rank {replica.place.rank.index}"
    message = (
        f"{where}: the hook was called for {len(seen)} parameters, expected each of {len(wanted)} once, with its "
        "gradient"
    )
    replica.findings.require(sorted(seen) == wanted, message, ranks=[replica.place.rank.index])
    return sorted(seen) == wanted


def _sum_then_divide(group: Any, bucket: Any) -> Any:
    size = group.size()
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / size)


def assert_compressed_gradients_rounded(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that compressing hooks and wrappers round gradients to their dtype, and no further.

    The hooks are fp16_compress_hook, bf16_compress_hook, both wrappers, and those that quantize to 8 bits. Data for
    float16 is small, because float16 ends at 65504. The mean of gradients of this size must not overflow.

    Raises:
        GradientMismatch: an element is off by more than the roundings of the compressed sum, or has digits beyond the
            dtype.
    """
    place = Place.of(rank)
    with judged() as findings:
        for name, options in _QUANTIZING:
            _quantized(runs[0], place, findings, name, options)
        for run in runs:
            for hook, dtype in (*_COMPRESSING, *(_wrapped() if run is runs[0] else ())):
                _compressed(run, place, findings, hook, dtype)
        for hook, dtype in _COMPRESSING:
            _judge_largest(place, hook, dtype, findings)


def _compressed(
    run: WholeRun, place: Place, findings: Findings, hook: Hook, dtype: torch.dtype, what: str = ""
) -> None:
    """Run one backward pass with a hook that compresses to `dtype`, and compare the gradients."""
    own = replace(run, small=dtype == torch.float16)
    replica = Replica(own, place, findings, what=hook.__name__ + what)
    replica.parallel.register_comm_hook(place.group, hook)
    shards = _filling(replica, replica.shards(replica.next_batch()), dtype)
    replica.backward(shards[place.index])
    _judge_compressed(replica, replica.one.parts(shards), dtype)


def _quantized(run: WholeRun, place: Place, findings: Findings, name: str, options: dict[str, Any]) -> None:
    """Run one backward pass with a hook that sends 8 bits for each gradient, and compare the gradients."""
    replica = Replica(run, place, findings, what=f"{name} with {options}")
    hook: Hook = getattr(quantization_hooks, name)
    replica.parallel.register_comm_hook(_group_of(place), lambda group, bucket: hook(group, bucket, **options))
    shards = replica.shards(replica.next_batch())
    replica.backward(shards[place.index])
    parts = replica.one.parts(shards)
    # Each rank rounds to 1/255 of the range of its own gradients, which contains 0.
    ranges = [max((float(one.abs().max()) for one in part.values() if one is not None), default=0.0) for part in parts]
    for key, parameter in replica.module.named_parameters():
        right = torch.stack(terms_of(parts, key)).sum(0)
        replica.judge_gradient(key, parameter, right, sum(ranges) * 2 / 255, "quantized")


def _filling(replica: Replica, shards: list[Rows], dtype: torch.dtype) -> list[Rows]:
    """Multiply targets, and so gradients, by an odd number, so that sums need all bits of `dtype` but are still
    exact."""
    parts = replica.one.parts(shards)
    largest = max(float(torch.stack(terms_of(parts, name)).abs().sum(0).max()) for name in parts[0])
    # A rank's own gradients are larger by the number of ranks until the hook divides, and float16 ends at 65504.
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
        message = f"{replica.what}, rank {rank}, gradient of {name}: it holds values that {dtype} cannot represent"
        replica.findings.require(kept, message, ranks=[rank])


def _judge_largest(place: Place, hook: Hook, dtype: torch.dtype, findings: Findings) -> None:
    """Check that the hook divides gradients before it sums them, if `dtype` holds each gradient but not the sum."""
    device = place.rank.device
    # Unless the divisor is a power of two, quotients may round up, and then their sum must not overflow.
    rounds = bool(place.size & (place.size - 1))
    largest = torch.finfo(dtype).max * (0.875 if rounds else 1.0)
    module = nn.Linear(1, 1, bias=False).to(device)
    parallel = under_ddp(module, device, process_group=place.group)
    parallel.register_comm_hook(place.group, hook)
    parallel(torch.full((1, 1), largest, device=device)).sum().backward()
    got = gradient_or_zeros(module.weight).item()
    off = (place.size + 2) * torch.finfo(dtype).eps * largest if rounds else 0.0
    message = (
        f"DDP on {place.size} ranks, {hook.__name__}, rank {place.rank.index}: the mean of gradients of {largest:g} "
        f"is {got:g}"
    )
    findings.require(abs(got - largest) <= off, message, ranks=[place.rank.index])


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
    low rank must come whole. The same holds for `batched_powerSGD_hook`, which compresses a bucket as one matrix.

    Args:
        more: whether the first run has each pair of options of PowerSGD, or one row of them.
    """
    with judged() as findings:
        for run in runs:
            for row in drawn_rows(_APPROXIMATIONS, _together, seed=run.seed, more=more and run is runs[0], share=100):
                _low_rank(run, Place.of(rank), findings, f" with {words_of(row, _APPROXIMATIONS)}", chosen=row)
            # Several buckets: PowerSGD must keep an error for each, but count steps, not buckets.
            start = {"warm_start": run.seed % 2 > 0}
            what = f", small buckets, warm_start={start['warm_start']}"
            _low_rank(run, Place.of(rank), findings, what, chosen=start, bucket_cap_mb=SMALL_BUCKET)
            _low_rank(run, Place.of(rank), findings, hook="batched_powerSGD_hook")
        for count, epsilon in ((2, 0), (2, 1e-8), (3, 0)):  # from 3 on torch uses another factorization
            with full_precision():
                _judge_matrices_of_rank(count, epsilon, Place.of(rank), findings)


def _judge_matrices_of_rank(count: int, epsilon: float, place: Place, findings: Findings) -> None:
    """Check that PowerSGD with `count` columns, at most 3, reduces a gradient of this rank as a whole."""
    device, targets = place.rank.device, torch.arange(10.0 * count, device="cpu").reshape(count, 10) ** 2 % 7 - 3
    samples = torch.arange(12.0 * count, device="cpu").reshape(count, 12) ** 2 % 5 - 2
    mean = targets.T @ samples * (place.size + 1) / 2
    layer = nn.Linear(12, 10, bias=False).to(device)
    parallel = under_ddp(layer, device, process_group=place.group)
    options: dict[str, Any] = {"orthogonalization_epsilon": epsilon}
    state = powerSGD_hook.PowerSGDState(_group_of(place), count, 2, min_compression_rate=1, **options)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(1, 5):
        parallel.zero_grad()
        ((place.index + 1) * parallel(samples.to(device)) * targets.to(device)).sum().backward()
        off = float((gradient_or_zeros(layer.weight).cpu() - mean).abs().max())
        message = f"powerSGD_hook on {device}, {options}: a matrix of rank {count} in step {step} is off by {off:g}"
        findings.require(off <= 2.0**-12 * float(mean.abs().max()), message, ranks=[place.rank.index])


def _low_rank(
    run: WholeRun,
    place: Place,
    findings: Findings,
    what: str = "",
    hook: str = "powerSGD_hook",
    chosen: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train by PowerSGD, which compresses from the third step on.

    Args:
        chosen: the options of PowerSGD.
        options: the options of DistributedDataParallel.
    """
    replica = Replica(run, place, findings, what=f"{hook}{what}", **options)
    state = powerSGD_hook.PowerSGDState(_group_of(place), start_powerSGD_iter=2, **(chosen or {}))
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
            replica.backward(shards[place.index])
            done = True
        if not done:
            return  # DDP cannot step after an exception in backward
        if _judge_buckets(replica, order) and state.use_error_feedback:
            _judge_left_out(replica, shards[place.index], order, _left_out(state) - before)
        held = {name: p.grad for name, p in replica.module.named_parameters() if p.grad is not None}
        with findings.collected():
            assert_replicas_agree(held, group=place.group, what=f"{replica.what}, gradients of step {number}")


def assert_hooks_keep_to_groups(rank: Rank, runs: Sequence[WholeRun], first: Sequence[int]) -> None:
    """Assert that hooks of models that train in a group of ranks average over exactly this group.

    `post_localSGD_hook` averages over all ranks in the first two steps. Afterwards it averages over the group, or not
    at all.

    Args:
        runs: runs of at least three steps, so that PowerSGD compresses and local steps occur.
        first: the ranks of one group; all others form the second group.
    """
    with judged() as findings, own_group(rank, first) as (members, place):
        what = f", in the group {members}"
        for run in (replace(one, seed=one.seed + members[0]) for one in runs):
            once = replace(run, steps=1)
            average, named = default_hooks.allreduce_hook, f"allreduce_hook{what}"
            _averaged(once, place, findings, average, what=named, bucket_cap_mb=SMALL_BUCKET)
            for hook, dtype in (*_COMPRESSING, *_wrapped()[:1]):
                _compressed(run, place, findings, hook, dtype, what)
            _low_rank(run, place, findings, what)
        for run in runs:
            for averages in (True, False):
                _locally_averaged(run, place, members, findings, averages)
        for hook, dtype in _COMPRESSING:
            _judge_largest(place, hook, dtype, findings)


def _locally_averaged(run: WholeRun, place: Place, members: Sequence[int], findings: Findings, averages: bool) -> None:
    """Train with post_localSGD_hook on all ranks, and compare each gradient with the mean over the right ranks.

    Args:
        averages: post_local_gradient_allreduce: local steps average over the group.
    """
    what = f"post_localSGD_hook in the group {list(members)}, post_local_gradient_allreduce={averages}"
    rank = place.rank
    # Several buckets: the hook must count steps, not buckets.
    replica = Replica(run, rank, findings, what=what, bucket_cap_mb=SMALL_BUCKET)
    state = post_localSGD_hook.PostLocalSGDState(_group_of(replica.place), _group_of(place), 2, averages)
    seen: list[int] = []
    replica.parallel.register_comm_hook(state, _noting(post_localSGD_hook.post_localSGD_hook, seen))
    for number in range(run.steps):
        seen.clear()
        shards = replica.shards(replica.next_batch())
        replica.optimizer.zero_grad()
        replica.backward(shards[rank.index])
        own = range(rank.size) if number < 2 else members if averages else [rank.index]
        parts = replica.one.parts([shards[index] for index in own])
        _judge_buckets(replica, seen)
        replica.judge_mean(parts, len(own))
        replica.finish(parts, from_exact=True)


def _left_out(state: powerSGD_hook.PowerSGDState) -> torch.Tensor:
    """Return the error that PowerSGD keeps for the next step, bucket by bucket; 0 before the first compressed step.

    A bucket that is compressed as one matrix is padded with zeros.
    """
    return torch.cat([value.clone() for value in state.error_dict.values()] or [torch.zeros(1)]).cpu()


def _judge_left_out(replica: Replica, own: Rows, order: list[int], more: torch.Tensor) -> None:
    """Check that this rank's own gradient is the compressed gradient plus `more`, the growth of the kept error."""
    exact = replica.one.parts([own])[0]
    named = {id(parameter): (name, parameter) for name, parameter in replica.module.named_parameters()}
    sizes = [named[key][1].numel() for key in order]
    kept = (more[: sum(sizes)] if len(more) > 1 else more.expand(sum(sizes))).split(sizes)
    for key, part in zip(order, kept, strict=True):
        name, parameter = named[key]
        expected, got = exact[name], gradient_or_zeros(parameter).cpu() + part.view(parameter.shape)
        assert expected is not None
        expected = expected.cpu() * replica.place.size
        # Three float32 terms of this magnitude: 64 roundoffs are ample, while a lost error is as large as the terms.
        most = float(max(expected.abs().max(), part.abs().max(), 1.0))
        off = float((got - expected).abs().max())
        rank = replica.place.rank.index
        message = (
            f"{replica.what}, step {replica.number}, rank {rank}, {name}: the compressed gradient plus the error kept "
            f"for the next step differs by up to {off:g} from this rank's own gradient plus the error kept before"
        )
        replica.findings.require(off <= most * 2.0**-18, message, ranks=[rank])
