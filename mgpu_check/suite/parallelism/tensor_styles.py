"""Check styles of `torch.distributed.tensor.parallel` for sequences, for inputs and outputs, and for losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from mgpu_check.asserts.findings import Findings, on_any_rank, run_all
from mgpu_check.asserts.gradients import assert_gradients_agree, assert_same
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.exact_training.reference import gathered, seen
from mgpu_check.suite.recipes.training import weighted
from mgpu_check.torch_hooks.tensors import copied

_FEATURES = 4
_ROUNDOFF = 2.0**-24


class _RMSNorm(nn.Module):
    """An RMSNorm written in Python, which `SequenceParallel` documents as supported."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_FEATURES, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def _norm(kind: str) -> nn.Module:
    norm: nn.Module = _RMSNorm() if kind == "RMSNorm" else nn.LayerNorm(_FEATURES, device="cpu")
    with torch.no_grad():
        for start, value in enumerate(norm.parameters(), 1):
            value.copy_(torch.arange(start, start + _FEATURES))
    return norm


def _numbers(*shape: int, seed: int) -> torch.Tensor:
    """Return whole numbers from -5 to 5 that differ from their neighbours."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, device="cpu") * 7 + seed) % 11 - 5.0).reshape(shape)


def assert_styles_agree(rank: Rank, seed: int) -> None:
    """Assert that all these styles agree with one device. A collective."""
    checks = (assert_sequence_parallel_agrees, assert_prepared_modules_agree, assert_losses_in_parallel_agree)
    run_all((partial(check, rank, seed) for check in checks), rank)


def assert_sequence_parallel_agrees(rank: Rank, seed: int = 0) -> None:
    """Assert that norms under `SequenceParallel` give the outputs and gradients of one device. A collective.

    A LayerNorm gets and returns this rank's part along the second dimension. An RMSNorm gets a replicated DTensor, to
    be divided along the first dimension.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh = init_device_mesh("cuda", (rank.size,))
    inputs, factors = (_numbers(2 * rank.size, 2 * rank.size, _FEATURES, seed=seed + i) for i in (0, 1))
    with Findings() as findings:
        for kind, dim in (("LayerNorm", 1), ("RMSNorm", 0)):
            style = SequenceParallel(sequence_dim=dim, use_local_output=dim == 1)
            norm = parallelize_module(_norm(kind).to(rank.device), mesh, style)
            if dim == 1:
                x = inputs.chunk(rank.size, dim)[rank.index].to(rank.device).requires_grad_()
            else:
                whole = DTensor.from_local(inputs.to(rank.device), mesh, [Replicate()], run_check=False)
                x = whole.detach().requires_grad_()
            outputs = norm(x)
            if dim == 1:
                outputs = DTensor.from_local(outputs, mesh, [Shard(1)])
            what = f"SequenceParallel of dimension {dim}, {kind}, on {rank.device}"
            divided = outputs.placements == (Shard(dim),) and outputs.shape == inputs.shape
            findings.require(divided, f"{what}: the outputs are not divided along dimension {dim}", ranks=(rank.index,))
            if findings.anywhere(rank):
                return
            everything = outputs.full_tensor()
            weighted(everything, factors.to(rank.device)).backward()
            got = {"outputs": copied(everything), **gathered(norm, 1)}
            if x.grad is not None:
                given = DTensor.from_local(x.grad, mesh, [Shard(1)]) if dim == 1 else x.grad
                assert isinstance(given, DTensor)
                got["gradient of inputs"] = copied(given.full_tensor())
            right = _norm_of_one_device(kind, inputs, factors)
            with findings.collected():
                assert_gradients_agree(got, right, tolerance=_of_norms(right, inputs), rank=rank.index, what=what)


def _norm_of_one_device(kind: str, inputs: torch.Tensor, factors: torch.Tensor) -> dict[str, torch.Tensor]:
    norm, x = _norm(kind).double(), inputs.double().requires_grad_()
    outputs = norm(x)
    weighted(outputs, factors.double()).backward()
    assert x.grad is not None
    return {"outputs": outputs.detach(), "gradient of inputs": x.grad, **seen(norm, 1)}


def _of_norms(right: dict[str, torch.Tensor], inputs: torch.Tensor) -> dict[str, float]:
    """Return the tolerance of each result for float32.

    An element of a norm is below 64 and rounds up to 32 times. The gradient of a parameter also sums over the rows,
    whose terms are at most 16.
    """
    rows = inputs.numel() // _FEATURES
    summed = (rows + 32) * rows * 16 * _ROUNDOFF
    return {name: summed if name.startswith("step 1: gradient") else 32 * 64 * _ROUNDOFF for name in right}


def _own(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, and any other tensor unchanged."""
    from torch.distributed.tensor import DTensor

    return x.to_local() if isinstance(x, DTensor) else x


class _Told(nn.Module):
    """A module that records its arguments: a tensor that it needs whole, a word, and its part of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, word: str, *, y: torch.Tensor) -> tuple[torch.Tensor, str, torch.Tensor]:
        self.given = {"x": copied(_own(x)), "y": copied(_own(y))}
        return x * x, word, y * 3


def assert_prepared_modules_agree(rank: Rank, seed: int = 0) -> None:
    """Assert that `PrepareModuleInput`, `PrepareModuleOutput` and their combination redistribute right. A collective.

    The module must get its arguments, and the caller its outputs, in the desired layouts; gradients must be those of
    one device. With an odd seed both get DTensors.
    """
    mesh = init_device_mesh("cuda", (rank.size,))
    x, y = _numbers(2 * rank.size, 3, seed=seed), _numbers(2, 3 * rank.size, seed=seed + 1)
    factors = _numbers(2 * rank.size, 3, seed=seed + 2), _numbers(2, 3 * rank.size, seed=seed + 3)

    def mine(whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.chunk(rank.size, dim)[rank.index]

    right = {
        "x that the module is given": x,
        "y that the module is given": mine(y, 1),
        "outputs of x": mine(x * x, 0),
        "outputs of y": y * 3,
        "gradient of x": mine(2 * x * factors[0], 0),
        "gradient of y": 3 * factors[1],
    }
    with Findings() as findings:
        local = seed % 2 == 0
        for how, module in _prepared(mesh, local=local).items():
            own, other = (tensor.to(rank.device).requires_grad_() for tensor in (mine(x, 0), y))
            first, word, second = module(own, "word", y=other)
            first, second = _own(first), _own(second)
            parts = mine(factors[0], 0).to(rank.device), factors[1].to(rank.device)
            # With a wrong shape on any rank, no rank runs backward, because its collectives could hang.
            if not on_any_rank(rank, (first.shape, second.shape) != (parts[0].shape, parts[1].shape)):
                (weighted(first, parts[0]) + weighted(second, parts[1])).backward()
            got = {f"{name} that the module is given": value for name, value in module.given.items()}
            got |= {"outputs of x": copied(first), "outputs of y": copied(second)}
            got |= {
                f"gradient of {name}": copied(one.grad)
                for name, one in (("x", own), ("y", other))
                if one.grad is not None
            }
            with findings.collected():
                assert_same(got, right, f"{how}, on {rank.device}", rank.index)
            findings.require(word == "word", f"{how}: a word came back as {word!r}", ranks=(rank.index,))


def _prepared(mesh: DeviceMesh, *, local: bool) -> dict[str, Any]:
    """Return modules that gather `x`, given by rows, and divide `y`, given whole, by columns; outputs are moved
    back.

    Args:
        local: modules and callers get the parts of this rank, else DTensors.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        parallelize_module,
    )

    inputs: dict[str, Any] = {
        "input_layouts": (Shard(0), None),
        "desired_input_layouts": (Replicate(), None),
        "input_kwarg_layouts": {"y": Replicate()},
        "desired_input_kwarg_layouts": {"y": Shard(1)},
    }
    outputs: dict[str, Any] = {
        "output_layouts": (Replicate(), None, Shard(1)),
        "desired_output_layouts": (Shard(0), None, Replicate()),
    }
    apart = parallelize_module(_Told(), mesh, PrepareModuleInput(**inputs, use_local_output=local))
    parallelize_module(apart, mesh, PrepareModuleOutput(**outputs, use_local_output=local))
    both = PrepareModuleInputOutput(**inputs, **outputs, use_local_input=local, use_local_output=local)
    return {
        "PrepareModuleInput and PrepareModuleOutput": apart,
        "PrepareModuleInputOutput": parallelize_module(_Told(), mesh, both),
    }


_NO_CLASS = -100
"""The default of `ignore_index`."""

_LOSSES: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "mean", "ignore_index": 0, "weight": True},
    {"reduction": "sum", "ignore_index": 1, "weight": True},
    {"reduction": "none", "ignore_index": 1},
)
"""Options of `cross_entropy`; "weight" gives each class a weight."""


def assert_losses_in_parallel_agree(rank: Rank, seed: int = 0) -> None:
    """Assert that `cross_entropy` within `loss_parallel` gives the loss and gradients of one device. A collective.

    The logits are divided among ranks by classes. Afterwards log_softmax accepts logits on all ranks again.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cuda", (rank.size,))
    rows, classes = 6, 3 * rank.size
    logits = _numbers(rows, classes, seed=seed) / 2
    target = (torch.arange(rows, device="cpu") * 5 + seed) % classes
    target[:2] = torch.arange(2, device="cpu")  # the classes that some losses ignore
    without_class = target.clone()
    without_class[2] = _NO_CLASS
    factors = torch.arange(1.0, rows + 1, device="cpu")
    weight = torch.arange(1, classes + 1, device="cpu") % 5 + 0.5
    # Each row is a logarithm of a sum of `classes` exponentials, below 8, times the factor of the row.
    tolerance = (classes + 32) * 8 * rows * rows * _ROUNDOFF

    def loss_of(x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        held = {**options, "weight": weight.to(x.device, x.dtype)} if "weight" in options else options
        # With weights, torch's gradient looks up the weight of the ignored index too, so it must be a class.
        given = target if "ignore_index" in options or "weight" in options else without_class
        return F.cross_entropy(x, given.to(x.device), **held)

    with Findings() as findings:
        for options in _LOSSES:
            single = logits.double().requires_grad_()
            expected = loss_of(single, options)
            weighted(expected, factors[: expected.numel()].view_as(expected).double()).backward()
            assert single.grad is not None
            right = {"loss": expected.detach(), "gradient of logits": single.grad}
            divided = distribute_tensor(logits.to(rank.device), mesh, [Shard(1)]).requires_grad_()
            with loss_parallel():
                loss = loss_of(divided, options)
                assert isinstance(loss, DTensor)
                whole = loss.full_tensor()
                weighted(whole, factors[: whole.numel()].view_as(whole).to(rank.device)).backward()
            got = {"loss": copied(whole)}
            if divided.grad is not None:
                assert isinstance(divided.grad, DTensor)
                got["gradient of logits"] = copied(divided.grad.full_tensor())
            named = ", ".join(f"{name}={value}" for name, value in options.items()) or "as it is"
            with findings.collected():
                assert_gradients_agree(
                    got,
                    right,
                    tolerance=dict.fromkeys(right, tolerance),
                    rank=rank.index,
                    what=f"cross_entropy within loss_parallel, {named}, on {rank.device}",
                )
        replicated: Any = distribute_tensor(logits.to(rank.device), mesh, [Replicate()])
        what = f"log_softmax after loss_parallel, on {rank.device}"
        try:
            again: Any = F.log_softmax(replicated, 1)
        except ValueError as refused:  # loss_parallel refuses logits that are not divided by classes
            findings.require(False, f"{what}, rank {rank.index}: {refused}", ranks=[rank.index])
        else:
            whole = copied(again.full_tensor() if isinstance(again, DTensor) else torch.zeros(0))
            right = {"result": F.log_softmax(logits.double(), 1)}
            with findings.collected():
                assert_gradients_agree(
                    {"result": whole}, right, tolerance={"result": tolerance}, rank=rank.index, what=what
                )
