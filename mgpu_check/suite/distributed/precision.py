"""Check mixed-precision training under DistributedDataParallel: autocast, GradScaler, clipping. All are collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from mgpu_check.asserts.findings import Findings
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.whole_numbers.cases import WholeRun
from mgpu_check.suite.common.whole_numbers.reference import Gradients, judged, total
from mgpu_check.suite.distributed.replica import Replica
from mgpu_check.suite.recipes.training import weighted

_SCALE = 64.0


def assert_autocast_trains(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that steps under autocast compute in its dtype and give the gradients of one device.

    Numbers are small enough to be exact in that dtype.
    """
    with judged() as findings:
        for number, run in enumerate(runs):
            dtype = (torch.bfloat16, torch.float16)[number % 2]
            replica = Replica(run, rank, findings, what=f"autocast to {dtype}")
            kinds: list[torch.dtype] = []

            def call(
                model: nn.Module, x: torch.Tensor, dtype: torch.dtype = dtype, kinds: list[torch.dtype] = kinds
            ) -> torch.Tensor:
                if x.dtype == torch.float64:
                    return torch.as_tensor(model(x))
                with torch.autocast(x.device.type, dtype):
                    outputs = torch.as_tensor(model(x))
                kinds.append(outputs.dtype)
                return outputs.float()

            replica.forwards = call
            for _ in range(run.steps):
                replica.step()
            message = f"{replica.what}, rank {rank.index}: outputs are of {kinds}, expected {dtype}"
            findings.require(all(kind == dtype for kind in kinds), message, ranks=[rank.index])


def assert_scaler_skips_together(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that a GradScaler keeps gradients, and that an infinity on a rank makes all skip and halve the scale.

    The last rank has the infinity, in every second step. If one of two optimizers has infinite gradients, only the
    other may step.
    """
    with judged() as findings:
        _judge_two_optimizers(rank, findings)
        for run in runs:
            replica = Replica(run, rank, findings, what="GradScaler")
            scaler = torch.amp.GradScaler(rank.device.type, init_scale=_SCALE, growth_interval=1)
            expected = _SCALE
            for number in range(run.steps):
                shards = replica.shards(replica.next_batch())
                spoilt = number % 2 == 0
                replica.optimizer.zero_grad()
                x, targets = replica.on_device(shards[rank.index])
                loss = weighted(replica.parallel(x), targets) * rank.size
                if spoilt and rank.index == rank.size - 1:
                    loss = loss + next(replica.module.parameters()).sum() * math.inf
                scaler.scale(loss).backward()
                scaler.unscale_(replica.optimizer)
                if spoilt:
                    scaler.step(replica.optimizer)
                    replica.judge_parameters()
                else:
                    parts = replica.one.parts(shards)
                    replica.judge_gradients(parts)
                    replica.put_exact(total(parts))
                    scaler.step(replica.optimizer)
                    replica.one.step(total(parts))
                    replica.judge_parameters()
                    replica.settle()
                scaler.update()
                expected *= 0.5 if spoilt else 2.0
                got = scaler.get_scale()
                message = (
                    f"{replica.what}, step {replica.number}, rank {rank.index}: the scale is {got}, expected {expected}"
                )
                findings.require(got == expected, message, ranks=[rank.index])


def _judge_two_optimizers(rank: Rank, findings: Findings) -> None:
    """Check two optimizers with one scaler, which scales a list or tuple of losses; each in turn has an infinity."""
    for spoilt in (0, 1):
        parameters = [nn.Parameter(torch.ones(3, device=rank.device)) for _ in range(2)]
        optimizers = [torch.optim.SGD([parameter], lr=0.5) for parameter in parameters]
        scaler = torch.amp.GradScaler(rank.device.type, init_scale=_SCALE)
        losses = [
            parameter.sum() * (math.inf if number == spoilt else 1.0) for number, parameter in enumerate(parameters)
        ]
        for scaled in scaler.scale(losses if spoilt else tuple(losses)):
            scaled.backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        got = (parameters[spoilt][0].item(), parameters[1 - spoilt][0].item(), scaler.get_scale())
        message = (
            f"GradScaler with two optimizers, infinite gradients in number {spoilt}, rank {rank.index}: its "
            f"parameter, the other's, and the scale are {got}, expected {(1.0, 0.5, _SCALE / 2)}"
        )
        findings.require(got == (1.0, 0.5, _SCALE / 2), message, ranks=[rank.index])


def assert_clipping_takes_the_whole_norm(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that `clip_grad_norm_` after the mean gives the norm of the whole batch's gradient, and scales by it.

    Raises:
        GradientMismatch: the norm is off by more than rounding, or gradients are not scaled by it. A sum of n positive
            terms has a relative error of at most n unit roundoffs (Higham, Accuracy and Stability of Numerical
            Algorithms, section 4.2). A root, a division and a product follow.
    """
    with judged() as findings:
        for number, run in enumerate(runs):
            kind = (2.0, 1.0, math.inf)[number % 3]
            replica = Replica(run, rank, findings, what=f"clip_grad_norm_ of order {kind:g}")
            shards = replica.shards(replica.next_batch())
            replica.backward(shards[rank.index])
            parts = replica.one.parts(shards)
            replica.judge_gradients(parts)
            norm = float(nn.utils.clip_grad_norm_(replica.module.parameters(), 1.0, norm_type=kind))
            _judge_clipped(replica, parts, kind, norm)


def _judge_clipped(replica: Replica, parts: list[Gradients], kind: float, norm: float) -> None:
    whole = {name: value for name, value in total(parts).items() if value is not None}
    flat = torch.cat([value.flatten() for value in whole.values()])
    exact = float(torch.linalg.vector_norm(flat, kind))
    # If the mean rounds, gradients are off by (ranks + 2) roundoffs of the summed magnitudes.
    magnitudes = float(
        torch.stack([torch.cat([v.flatten() for v in part.values() if v is not None]).abs() for part in parts]).sum()
    )
    size, eps = replica.place.size, torch.finfo(torch.float32).eps
    rounded = (size + 2) * eps * magnitudes if size & (size - 1) else 0.0
    bound = (len(flat) + 4) * eps * exact + rounded
    rank = replica.place.rank.index
    message = f"{replica.what}, rank {rank}: the norm is {norm:.9g}, expected {exact:.9g} ± {bound:.2g}"
    replica.findings.require(abs(norm - exact) <= bound, message, ranks=[rank])
    # torch divides by the norm plus 1e-6, and never scales up.
    scale = min(1.0, 1.0 / (exact + 1e-6))
    for name, parameter in replica.module.named_parameters():
        tolerance = ((bound / max(exact, 1.0)) + 8 * eps) * whole[name].abs() * scale + rounded * scale
        replica.judge_gradient(name, parameter, whole[name] * scale, tolerance, "clipped")
