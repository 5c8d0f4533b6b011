"""Perturbed numbers: their operators, devices and tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mgpu_check import simulated_node
from mgpu_check.numerics.perturbation import _COMPOSED, Perturbed


def test_distributed_tensors_are_perturbed(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]  # torch's list of names lacks it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.full((4, 4), 1.1), init_device_mesh("cpu", (1,)), [Shard(0)])
        with Perturbed(100.0, torch.Generator().manual_seed(0), 2.0**-24):
            product = weight * 3
        whole = product.full_tensor()  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
    moved = (whole / (weight.full_tensor() * 3) - 1).abs() / 2.0**-24
    assert bool(((moved > 90) & (moved < 110)).all())


def test_numbers_of_a_simulated_device_are_perturbed_as_those_of_the_cpu():
    def computed(device: str) -> list[torch.Tensor]:
        x = torch.linspace(-2, 3, 24, device=device).view(4, 6).requires_grad_()
        with Perturbed(100.0, torch.Generator().manual_seed(0), 2.0**-24, counts=True):
            y = (x.view(6, 4).tanh() @ x).softmax(1)
            z = y.clone().mul_(3)
            z.square().sum().backward()
        assert x.grad is not None
        return [value.detach().cpu() for value in (y, z, x.grad)]

    with simulated_node(1):
        assert all(map(torch.equal, computed("cuda:0"), computed("cpu")))


def _operators() -> list[Any]:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    pairs = [name.removeprefix("aten::").partition(".") for name in names if not name.endswith("out")]
    return [getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in pairs]


# Backward passes that subtract means or sums within: of what torch does with a float64 tensor on CPUs and on GPUs.
NEARLY_CANCEL = re.compile(r"(softmax|batch_norm|group_norm|layer_norm|rms_norm)\w*backward")
OF_OTHERS = {
    "aten::_batch_norm_impl_index_backward": "calls the others",
    "aten::_masked_softmax_backward": "of a fast path for inference",
    "aten::_sparse_softmax_backward_data": "of sparse tensors",
    "aten::_sparse_log_softmax_backward_data": "of sparse tensors",
    "aten::batch_norm_backward_elemt": "of SyncBatchNorm, whose sums are operators of their own",
    "aten::batch_norm_backward_reduce": "of SyncBatchNorm, whose sums are operators of their own",
}


def test_all_operators_that_nearly_cancel_are_taken_apart():
    found = {op for op in _operators() if NEARLY_CANCEL.search(op._schema.name)}
    assert {"aten::cudnn_batch_norm_backward", "aten::miopen_batch_norm_backward"} < {op._schema.name for op in found}
    assert {op._schema.name for op in found - set(_COMPOSED)} <= set(OF_OTHERS)


def test_batches_are_normalized_alike_by_every_library():
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 8, 3, 4, 4, dtype=torch.float64).unbind()
    weight = torch.rand(3, dtype=torch.float64)
    mean, scale = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    none = torch.empty(0)
    aten = torch.ops.aten

    def moved(call: Callable[[], tuple[torch.Tensor, ...]]) -> torch.Tensor:
        with Perturbed(1e4, torch.Generator().manual_seed(1), 2.0**-24):
            return call()[0]

    native = (gradient, x, weight, None, None, mean, scale, True, 1e-5, [True, True, True])
    exact = aten.native_batch_norm_backward(*native)[0]
    expected = moved(lambda: aten.native_batch_norm_backward(*native))
    others = (x, gradient, weight, None, None, mean, scale, 1e-5)
    assert not torch.equal(expected, exact)
    assert torch.equal(expected, moved(lambda: aten.cudnn_batch_norm_backward(*others, none)))
    assert torch.equal(expected, moved(lambda: aten.miopen_batch_norm_backward(*others)))


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_optimizers_of_one_operator_are_perturbed(kind, how):
    def stepped(spread: float) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.full((64,), 1.5)) for _ in range(2)]
        optimizer = kind(parameters, lr=0.1, **how)
        for parameter in parameters:
            parameter.grad = torch.full((64,), 0.3)
        with Perturbed(spread, torch.Generator().manual_seed(0), 2.0**-24):
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    for still, moved in zip(stepped(0.0), stepped(100.0), strict=True):
        assert float((still != moved).float().mean()) > 0.5


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_large_tensors_are_perturbed_in_both_directions_at_random(layout, dtype):
    x = torch.linspace(1.1, 1.9, 3 * 8 * 100 * 100).view(3, 8, 100, 100).to(dtype)
    if layout == "transposed":
        x = x.transpose(0, 3)
    elif layout == "channels last":
        x = x.to(memory_format=torch.channels_last)
    roundoff = {torch.float32: 2.0**-24, torch.float64: 2.0**-24, torch.bfloat16: 2.0**-8}[dtype]
    moved = []
    for direction in (1, -1):
        with Perturbed(direction * 8.0, torch.Generator().manual_seed(0), 2.0**-24):
            y = x.neg()
        assert y.stride() == x.stride()
        moved.append((y.double() / -x.double() - 1) / roundoff)
    assert bool(((moved[0].abs() > 6) & (moved[0].abs() < 10)).all())
    assert bool((moved[0].sign() == -moved[1].sign()).all())
    signs = moved[0].sign().flatten()
    assert abs(float(signs.mean())) < 0.02
    for lag in (1, 2, 100, 1 << 15, 1 << 16):  # neighbours, and what is worked on at once
        assert abs(float((signs[lag:] * signs[:-lag]).mean())) < 0.02


def test_counts_in_large_tensors_are_left_alone():
    x = torch.rand(50_000) * 3
    x[::1000] = torch.arange(50.0)
    x[1::2] = 0
    with Perturbed(8.0, torch.Generator().manual_seed(0), 2.0**-24, counts=True):
        y = x * 1
    whole = x == x.round()
    assert torch.equal(x[whole], y[whole])
    assert bool((x[~whole] != y[~whole]).all())
