"""Check that SyncBatchNorm normalises by the statistics of all ranks' samples, as BatchNorm on one device does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.models import assert_gradients_agree, gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.steps import full_precision, measure_step
from mgpu_check.torch_hooks.tensors import name_of

_EPS = 1e-3
_CHANNELS = 3
_STEPS = (1, 2)
_KEPT = "what the conversion keeps"


def assert_sync_batchnorm_agrees(rank: Rank, seed: int) -> None:
    """Assert that `convert_sync_batchnorm` gives the outputs, gradients and statistics of one device. A collective.

    The conversion must also keep the mode of the layer and its frozen parameters. Each case trains two steps and then
    evaluates by the running statistics. Ranks have different numbers of samples. The tolerance is measured.
    """
    everybody = list(range(rank.size))
    # With more than two ranks, the last one has a group of its own.
    memberships = [everybody[:-1], everybody[-1:]] if rank.size > 2 else [everybody]
    groups = [dist.new_group(members) if len(memberships) > 1 else None for members in memberships]
    group_index = next(number for number, members in enumerate(memberships) if rank.index in members)
    cases = [
        _BatchNormCase(torch.float32, 0.25, (4,), everybody, None, empty=True),
        _BatchNormCase(torch.float64, None, (2, 3), everybody, None),
        _BatchNormCase(torch.float64, 0.5, (), memberships[group_index], groups[group_index]),
    ]
    with Findings() as findings:
        for number, case in enumerate(cases):
            with findings.collected():
                _compare(case, rank, seed + number)
        if (own := groups[group_index]) is not None:
            dist.destroy_process_group(own)


@dataclass(frozen=True)
class _BatchNormCase:
    """A layer, and the `ranks` of a group that share it; None for the cumulative average, or for all ranks. `rest` has
    the sizes of the dimensions after samples and channels. The first of more than two ranks may be `empty`."""

    dtype: torch.dtype
    momentum: float | None
    rest: tuple[int, ...]
    ranks: list[int]
    group: dist.ProcessGroup | None
    empty: bool = False

    @property
    def counts(self) -> list[int]:
        counts = [2 + rank % 3 for rank in self.ranks]
        counts[-1] = 1
        counts[max(0, len(self.ranks) - 2)] += 5
        if self.empty and len(self.ranks) > 2:
            counts[0] = 0
        return counts

    def own(self, rank: Rank) -> slice:
        """Return the samples of a rank, as a slice of all."""
        position = self.ranks.index(rank.index)
        start = sum(self.counts[:position])
        return slice(start, start + self.counts[position])

    def inputs(self, seed: int) -> dict[str, torch.Tensor]:
        """Return all ranks' samples of two steps, the gradients of their outputs, and the layer's initial state."""
        generator = torch.Generator().manual_seed(seed)
        shape = (sum(self.counts), _CHANNELS, *self.rest)
        offset = torch.arange(float(_CHANNELS)).reshape(1, -1, *(1 for _ in self.rest))
        tensors = {f"x{step}": torch.randn(shape, generator=generator) * 2 + offset for step in _STEPS}
        tensors |= {f"dy{step}": torch.randn(shape, generator=generator) for step in _STEPS}
        names = ("weight", "bias", "mean", "var")
        return tensors | {name: torch.rand(_CHANNELS, generator=generator) + 0.5 for name in names}


def _compare(case: _BatchNormCase, rank: Rank, seed: int) -> None:
    inputs, own = case.inputs(seed), case.own(rank)
    plain = _batchnorm(case, inputs)
    kept = {_KEPT: _flags(plain)}
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(plain, case.group).to(rank.device)
    got = {_KEPT: _flags(layer)} | _on_this_rank(case, layer.requires_grad_(True).train(), inputs, own, rank.device)
    measured = measure_step(lambda tensors: _on_one_device(case, tensors, own), inputs, pairs=2)
    # Rounding errors are proportional to the unit roundoff; in float64 the reference has them too.
    finer = 1.0 if case.dtype == torch.float32 else 2.0 * 2.0**-53 / 2.0**-24
    tolerance = {name: value * finer for name, value in measured.tolerance.items()}
    tolerance[_KEPT] = torch.zeros_like(kept[_KEPT])
    configuration = f"SyncBatchNorm in {name_of(case.dtype)}, momentum {case.momentum}, {case.counts} samples"
    subject = f"{configuration}, on {rank.device}"
    assert_gradients_agree(got, measured.reference | kept, tolerance=tolerance, rank=rank.index, what=subject)


def _batchnorm(case: _BatchNormCase, inputs: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the layer to convert: in evaluation mode, with a frozen weight."""
    layer_type = nn.BatchNorm2d if len(case.rest) == 2 else nn.BatchNorm1d
    plain = layer_type(_CHANNELS, eps=_EPS, momentum=case.momentum, dtype=case.dtype)
    state = {"running_mean": inputs["mean"], "running_var": inputs["var"], "num_batches_tracked": torch.tensor(0)}
    plain.load_state_dict({"weight": inputs["weight"], "bias": inputs["bias"], **state})
    plain.weight.requires_grad_(False)
    return plain.eval()


def _on_this_rank(
    case: _BatchNormCase, layer: nn.Module, inputs: Mapping[str, torch.Tensor], own: slice, device: torch.device
) -> dict[str, torch.Tensor]:
    got: dict[str, torch.Tensor] = {}
    with full_precision():
        for step in _STEPS:
            layer.zero_grad()
            x = inputs[f"x{step}"][own].to(device, case.dtype)
            if len(case.rest) == 2:
                x = x.to(memory_format=torch.channels_last)
            x.requires_grad_()
            y = layer(x)
            y.backward(inputs[f"dy{step}"][own].to(device, case.dtype))
            # A rank without samples has no gradients.
            values = (x, layer.get_parameter("weight"), layer.get_parameter("bias"))
            statistics = (layer.get_buffer("running_mean").clone(), layer.get_buffer("running_var").clone())
            got |= _named(step, y.detach(), *map(gradient_or_zeros, values), *statistics)
        got["evaluation: outputs"] = layer.eval()(inputs["x1"][own].to(device, case.dtype)).detach()
    return got


def _named(step: int, *results: torch.Tensor) -> dict[str, torch.Tensor]:
    names = ("outputs", *(f"gradient of {name}" for name in ("inputs", "weight", "bias")), "running mean")
    return {f"step {step}: {name}": own for name, own in zip((*names, "running variance"), results, strict=True)}


def _on_one_device(case: _BatchNormCase, inputs: Mapping[str, torch.Tensor], own: slice) -> dict[str, torch.Tensor]:
    """Compute the right results for the rank with the samples `own`, from the samples of all ranks."""
    results: dict[str, torch.Tensor] = {}
    weight, bias = inputs["weight"], inputs["bias"]
    mean, variance = inputs["mean"].clone(), inputs["var"].clone()
    view = (1, -1, *(1 for _ in case.rest))
    for step in _STEPS:
        x = inputs[f"x{step}"].clone().requires_grad_()
        momentum = case.momentum if case.momentum is not None else 1 / step
        # A rank's gradients of the parameters are sums over its own samples only, so these need copies.
        own_weight, own_bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        y = F.batch_norm(x, None, None, weight, bias, True, 0.0, _EPS)
        normed = F.batch_norm(x.detach(), None, None, None, None, True, 0.0, _EPS)
        mine = normed[own] * own_weight.view(view) + own_bias.view(view)
        mine.backward(inputs[f"dy{step}"][own])
        y.backward(inputs[f"dy{step}"])
        dims = [dim for dim in range(x.dim()) if dim != 1]
        mean = (1 - momentum) * mean + momentum * x.detach().mean(dims)
        variance = (1 - momentum) * variance + momentum * x.detach().var(dims, unbiased=True)
        gradients = gradient_or_zeros(x)[own], gradient_or_zeros(own_weight), gradient_or_zeros(own_bias)
        results |= _named(step, y.detach()[own], *gradients, mean, variance)
    results["evaluation: outputs"] = F.batch_norm(inputs["x1"][own], mean, variance, weight, bias, False, 0.0, _EPS)
    return results


def _flags(layer: nn.Module) -> torch.Tensor:
    return torch.tensor([float(value.requires_grad) for value in layer.parameters()] + [float(layer.training)])
