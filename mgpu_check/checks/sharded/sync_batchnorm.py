"""SyncBatchNorm: the ranks normalise by the statistics of all samples, as BatchNorm on one device does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check.checks.findings import Findings
from mgpu_check.checks.gradients import assert_gradients_agree
from mgpu_check.numerics.steps import full_precision, measure_step
from mgpu_check.rank_side.rank import Rank
from mgpu_check.torch_hooks.tensors import name_of

__all__ = ["assert_sync_batchnorm_agrees"]

_EPS = 1e-3
_CHANNELS = 3


def assert_sync_batchnorm_agrees(rank: Rank, seed: int) -> None:
    """Assert that what `convert_sync_batchnorm` makes of BatchNorm keeps what is frozen and its mode, and gives outputs, gradients
    and running statistics of BatchNorm on one device. A collective.

    Ranks have different numbers of samples: the last one a single one, the second but one many. In float32 and float64,
    with a momentum and with the cumulative average, over two steps; of images in channels_last, too; in a group of all but the
    last rank; and in evaluation, by the statistics so far. The tolerance is measured: see `mgpu_check.numerics.steps`.

    Raises:
        GradientMismatch: on this rank a result is off by more than the tolerance.
    """
    __tracebackhide__ = True
    everybody = list(range(rank.size))
    # The last rank has a group of its own, where there are ranks enough.
    parts = [everybody[:-1], everybody[-1:]] if rank.size > 2 else [everybody]
    groups = [dist.new_group(members) if len(parts) > 1 else None for members in parts]
    place = next(number for number, members in enumerate(parts) if rank.index in members)
    cases: list[tuple[torch.dtype, float | None, tuple[int, ...], list[int], dist.ProcessGroup | None]] = [
        (torch.float32, 0.25, (4,), everybody, None),
        (torch.float64, None, (2, 3), everybody, None),
        (torch.float64, 0.5, (), parts[place], groups[place]),
    ]
    with Findings() as findings:
        for number, (dtype, momentum, rest, ranks, group) in enumerate(cases):
            with findings.collected():
                _compare(rank, seed + number, dtype, momentum, rest, ranks, group)
        if (own := groups[place]) is not None:
            dist.destroy_process_group(own)


def _compare(
    rank: Rank,
    seed: int,
    dtype: torch.dtype,
    momentum: float | None,
    rest: tuple[int, ...],
    ranks: list[int],
    group: dist.ProcessGroup | None,
) -> None:
    __tracebackhide__ = True
    counts = [2 + other % 3 for other in ranks]
    counts[-1] = 1
    counts[max(0, len(ranks) - 2)] += 5
    place = ranks.index(rank.index)
    start = sum(counts[:place])
    own = slice(start, start + counts[place])
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(counts), _CHANNELS, *rest)
    offset = torch.arange(float(_CHANNELS)).reshape(1, -1, *(1 for _ in rest))
    inputs = {f"x{step}": torch.randn(shape, generator=generator, dtype=torch.float32) * 2 + offset for step in (1, 2)}
    inputs |= {f"dy{step}": torch.randn(shape, generator=generator) for step in (1, 2)}
    inputs |= {name: torch.rand(_CHANNELS, generator=generator) + 0.5 for name in ("weight", "bias", "mean", "var")}

    of_images = len(rest) == 2
    plain = (nn.BatchNorm2d if of_images else nn.BatchNorm1d)(_CHANNELS, eps=_EPS, momentum=momentum, dtype=dtype)
    plain.load_state_dict(
        {
            "weight": inputs["weight"],
            "bias": inputs["bias"],
            "running_mean": inputs["mean"],
            "running_var": inputs["var"],
            "num_batches_tracked": torch.tensor(0),
        }
    )
    plain.weight.requires_grad_(False)
    kept = _flags(plain.eval())
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(plain, group).to(rank.device)
    got = {"what the conversion keeps": _flags(layer)}
    layer.requires_grad_(True).train()
    with full_precision():
        for step in (1, 2):
            layer.zero_grad()
            x = inputs[f"x{step}"][own].to(rank.device, dtype)
            if of_images:
                x = x.to(memory_format=torch.channels_last)
            x.requires_grad_()
            y = layer(x)
            y.backward(inputs[f"dy{step}"][own].to(rank.device, dtype))
            got |= {f"step {step}: outputs": y.detach(), f"step {step}: gradient of inputs": _of(x)}
            got[f"step {step}: gradient of weight"] = _of(layer.weight)
            got[f"step {step}: gradient of bias"] = _of(layer.bias)
            got[f"step {step}: running mean"] = layer.get_buffer("running_mean").clone()
            got[f"step {step}: running variance"] = layer.get_buffer("running_var").clone()
        got["evaluation: outputs"] = layer.eval()(inputs["x1"][own].to(rank.device, dtype)).detach()

    def step_on_one_device(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        weight, bias = given["weight"], given["bias"]
        mean, variance = given["mean"].clone(), given["var"].clone()
        for step in (1, 2):
            x = given[f"x{step}"].clone().requires_grad_()
            part = momentum if momentum is not None else 1 / step
            # Of one rank the gradients of the parameters are sums over its own samples: a copy of them for these.
            own_weight, own_bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
            y = F.batch_norm(x, None, None, weight, bias, True, 0.0, _EPS)
            normed = F.batch_norm(x.detach(), None, None, None, None, True, 0.0, _EPS)
            view = (1, -1, *(1 for _ in rest))
            mine = normed[own] * own_weight.view(view) + own_bias.view(view)
            mine.backward(given[f"dy{step}"][own])
            y.backward(given[f"dy{step}"])
            dims = [dim for dim in range(x.dim()) if dim != 1]
            mean = (1 - part) * mean + part * x.detach().mean(dims)
            variance = (1 - part) * variance + part * x.detach().var(dims, unbiased=True)
            found |= {f"step {step}: outputs": y.detach()[own], f"step {step}: gradient of inputs": _of(x)[own]}
            found[f"step {step}: gradient of weight"] = _of(own_weight)
            found[f"step {step}: gradient of bias"] = _of(own_bias)
            found[f"step {step}: running mean"] = mean
            found[f"step {step}: running variance"] = variance
        found["evaluation: outputs"] = F.batch_norm(given["x1"][own], mean, variance, weight, bias, False, 0.0, _EPS)
        return found

    measured = measure_step(step_on_one_device, inputs, pairs=2)
    reference = measured.reference | {"what the conversion keeps": kept}
    # Rounding errors are proportional to the unit roundoff; in float64 the reference has them, too.
    finer = 1.0 if dtype == torch.float32 else 2.0 * 2.0**-53 / 2.0**-24
    tolerance = {name: value * finer for name, value in measured.tolerance.items()}
    tolerance["what the conversion keeps"] = torch.zeros(3)
    kind = f"SyncBatchNorm in {name_of(dtype)}, momentum {momentum}, {counts} samples"
    what = f"{kind}, on {rank.device}"
    assert_gradients_agree(got, reference, tolerance=tolerance, rank=rank.index, what=what)


def _flags(layer: nn.Module) -> torch.Tensor:
    """Return whether the weight and the bias need gradients, and whether the layer trains."""
    return torch.tensor([float(value.requires_grad) for value in layer.parameters()] + [float(layer.training)])


def _of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None, "the outputs depend on it"
    return tensor.grad
