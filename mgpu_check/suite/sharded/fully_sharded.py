"""Compare models under `fully_shard` (FSDP2) with one device, bit for bit, on exact data."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.models import assert_gradients_agree, assert_same
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ShardError
from mgpu_check.numerics.steps import full_precision
from mgpu_check.suite.common.exact_training.cases import ExactTraining
from mgpu_check.suite.common.exact_training.reference import gathered, one_device, own_part, own_results, sgd
from mgpu_check.suite.common.meshes import near_square
from mgpu_check.suite.recipes import training_steps as recipe
from mgpu_check.suite.sharded.chunks import by_columns, chunks_are_right, fetch_ahead
from mgpu_check.torch_hooks.tensors import copied

_WAYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("resharding on", "set_requires_gradient_sync", {"reshard_after_forward": True}),
    ("resharding off, from DTensors", "set_requires_all_reduce", {"reshard_after_forward": False, "dtensors": True}),
    ("offloaded", "set_requires_all_reduce", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
)
"""Configurations: name, method that switches a reduction off until the last micro-batch, options of `fully_shard`."""


def sharded(
    training: ExactTraining,
    rank: Rank,
    mesh: DeviceMesh | None = None,
    *,
    memory_later: bool = False,
    together: bool = False,
    root: bool = True,
    dtensors: bool = False,
    ignored: Collection[str] = (),
    **options: Any,
) -> nn.Sequential:
    """Return the model of a training on the device of `rank`, with `fully_shard` on each linear layer and on the whole.

    Gradients are averaged if the world size is a power of two, so that no quotient rounds, and summed otherwise.

    Args:
        memory_later: shard the model on the meta device and allocate it afterwards, as for a model that is too large
            for one device; its values are undefined.
        together: shard the last two layers as one group.
        root: shard the rest of the model, too.
        dtensors: make each parameter a DTensor that all ranks hold whole, if this torch shards such DTensors, and each
            rank has samples in two micro-batches.
        ignored: names of parameters that stay whole.
    """
    model = training.model().to("meta" if memory_later else rank.device)
    mesh = init_device_mesh("cuda", (rank.size,)) if mesh is None else mesh
    if dtensors and training.batch >= 2 * rank.size and hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        options["dp_mesh_dims"] = _as_dtensors(model, mesh)
    layers: list[Any] = [layer for layer in model if isinstance(layer, nn.Linear)]
    if together and len(layers) > 1:
        layers[-2:] = [layers[-2:]]
    if ignored:
        options["ignored_params"] = {model.get_parameter(name) for name in ignored}
    for layer in (*layers, model) if root else layers:
        fully_shard(layer, mesh=mesh, **options)
    if memory_later:
        model.to_empty(device=rank.device)
    if scale_of(rank.size) == 1.0:
        add_up(model)
    return model


def _as_dtensors(model: nn.Module, mesh: DeviceMesh) -> Any:
    """Make parameters, and inputs within the model, DTensors; return the names of the dimensions of the mesh."""
    for layer in model.modules():
        for name, value in list(layer.named_parameters(recurse=False)):
            # `nn.Parameter` would detach it, and the cache of DTensor may return an equal mesh, which torch refuses.
            made: Any = DTensor.from_local(value.detach(), mesh).requires_grad_()
            made._is_param = True
            layer.register_parameter(name, made)
    model.register_forward_pre_hook(
        lambda _, inputs: tuple(DTensor.from_local(one, mesh, [Shard(0)] * mesh.ndim) for one in inputs)
    )
    model.register_forward_hook(lambda _, inputs, output: output.to_local().clone())
    *repeated, divided = mesh.mesh_dim_names or ()
    return torch.distributed.fsdp.DataParallelMeshDims(shard=divided, replicate=tuple(repeated) or None)


def add_up(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, FSDPModule):
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)


def mesh_of(rank: Rank, dimensions: int) -> DeviceMesh:
    """Return a mesh whose last dimension shards the model; the first of two replicates it."""
    shape, names = ((rank.size,), ("shard",)) if dimensions == 1 else (near_square(rank.size), ("repeat", "shard"))
    return init_device_mesh("cuda", shape, mesh_dim_names=names)


def scale_of(ranks: int) -> float:
    """Return the factor that a model of `sharded` applies to the sum of all ranks' gradients."""
    return 1.0 if ranks & (ranks - 1) else 1.0 / ranks


def assert_fully_sharded_agrees(training: ExactTraining, rank: Rank, *, dimensions: int) -> None:
    """Assert that a model under `fully_shard` trains as on one device, on a mesh of `dimensions`. A collective.

    Three configurations free parameters after the forward pass, keep them until the backward pass, or offload them to
    the CPU. The parameters of the second are DTensors before. The first step accumulates gradients over two
    micro-batches. The first configuration reduces them after the last one only. The others scatter after each, and sum
    over the replicating dimension of the mesh (HSDP) after the last one only.

    Freed parameters are prefetched explicitly. If more than two ranks divide them, and an even number, each pair of
    ranks keeps a whole copy after the forward pass. Kept weights are divided by columns if their number is a multiple
    of the parts. All other parameters are divided along the first dimension. Each rank must hold exactly its chunk
    before and after each step.

    The sum of gradients is also divided by numbers that are no power of two.
    """
    expected = one_device(training, scale=scale_of(rank.size))
    wanted = own_results(training, expected, rank)
    mesh = mesh_of(rank, dimensions)
    with Findings() as findings:
        for how, until_last, options in _WAYS:
            what = f"fully_shard over {tuple(mesh.shape)}, {how}, on {rank.device}"
            freed = options.get("reshard_after_forward")
            placed: dict[str, Any] = {"shard_placement_fn": by_columns(mesh.size(-1))} if freed is False else {}
            if freed and mesh.size(-1) > 2 and mesh.size(-1) % 2 == 0:
                placed = {"reshard_after_forward": 2}
            model = sharded(training, rank, mesh, together=freed is False, **(options | placed))
            if freed:
                fetch_ahead(model)
            optimizer = sgd(training, model)
            place = torch.device("cpu") if "offload_policy" in options else rank.device
            got: dict[str, torch.Tensor] = {}
            if not chunks_are_right(model, mesh, rank, place, what, findings):
                return
            for step, batch in enumerate(training.batches(), 1):
                windows = 2 if step == 1 else 1
                outputs = _step_of_windows(
                    model, optimizer, *own_part(batch, rank), windows=windows, until_last=until_last
                )
                if not chunks_are_right(model, mesh, rank, place, what, findings):
                    return
                got |= gathered(model, step) | {f"step {step}: outputs": copied(outputs)}
            with findings.collected():
                assert_same(got, wanted, what, rank.index)
            if findings.enough(rank):
                return
        _judge_divisors(mesh, rank, findings)


def _judge_divisors(mesh: DeviceMesh, rank: Rank, findings: Findings) -> None:
    """Require that gradients are divided by the given number. The float32 nearest to 1/3 or 1/6 times 72 is exact."""
    for divisor in (6.0, 3.0, 1.0):
        layer: Any = fully_shard(nn.Linear(4, 3, bias=False).to(rank.device), mesh=mesh)
        layer.set_gradient_divide_factor(divisor)
        layer(torch.full((1, 4), 72.0, device=rank.device)).sum().backward()
        right = 72.0 * rank.size / divisor
        own = copied(layer.weight.grad.to_local())
        what = f"fully_shard over {tuple(mesh.shape)}, gradient divide factor {divisor}, on {rank.device}"
        findings.require(
            bool((own == right).all()), f"{what}: the gradient is {own}, expected {right}", ranks=[rank.index]
        )


def _step_of_windows(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    windows: int,
    until_last: str,
) -> torch.Tensor:
    """Train for one step with gradients accumulated over `windows` micro-batches; return the outputs.

    Args:
        until_last: the method of the model that switches a reduction off until the last micro-batch.
    """
    optimizer.zero_grad()
    outputs: list[torch.Tensor] = []
    borders = [len(x) * number // windows for number in range(windows + 1)]
    with full_precision():
        for start, end in itertools.pairwise(borders):
            # Ranks without samples take part with an empty batch.
            getattr(model, until_last)(len(outputs) == windows - 1)
            outputs.append(model(x[start:end]))
            recipe.weighted(outputs[-1], y[start:end]).backward()
        optimizer.step()
    return torch.cat(outputs)


def assert_mixed_precision_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that mixed precision computes and reduces in its dtypes, and keeps float32 parameters. A collective.

    Gradients come from one micro-batch, or accumulate over two or three. Parameters are whole numbers plus a small
    fraction, which the low precision drops. So a result shows whether the fraction took part in the computation, or was
    lost from the parameters. Whole numbers stay small enough for bfloat16. If only the reduction is in low precision,
    it drops the fraction of the gradients. Inputs and outputs in containers must be cast too.
    """
    with Findings() as findings:
        for low, reduced, windows in _PRECISIONS:
            with findings.collected():
                _compare_precision(training, rank, low, reduced, windows)
        _compare_containers(training, rank, findings)


_PRECISIONS = (
    (torch.bfloat16, torch.float32, 1),
    (torch.bfloat16, torch.float32, 3),
    (torch.bfloat16, torch.bfloat16, 2),
    (torch.float16, torch.float32, 2),
    (None, torch.bfloat16, 1),
)
"""Dtype of the arithmetic (None: that of the parameters), dtype of the reduction, number of micro-batches.

The gradient of a single micro-batch is reduced directly. Several are accumulated in the dtype of the reduction.
"""


def _compare_precision(
    training: ExactTraining, rank: Rank, low: torch.dtype | None, reduced: torch.dtype, windows: int
) -> None:
    """Train for one step under a policy, and compare after the last collective."""
    what = f"fully_shard, {low} reduced in {reduced}, {windows} micro-batches, on {rank.device}"
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced, output_dtype=torch.float32)
    if low is None:
        training = replace(training, fine=0.0)
    model = sharded(training, rank, mp_policy=policy)
    add_up(model)
    optimizer = sgd(training, model)
    single = training.model()
    kept = {name: value.detach().clone() for name, value in single.named_parameters()}
    with torch.no_grad():
        for value in single.parameters():
            value.copy_(value.to(low))
    (inputs, factors), (x, y) = training.batches()[0], own_part(training.batches()[0], rank)
    # Make the gradients of rank 0's last micro-batch so large that only float32 can add the others to them.
    if reduced == torch.float32:
        first = len(recipe.split(factors, rank.size)[0])
        start = first * (windows - 1) // windows
        factors[start:first] *= 64
        if rank.index == 0:
            y[start:] *= 64
    if low is None:
        # Gradients exceed whole numbers by this fraction, until the reduction drops it.
        y *= 1 + 2.0**-12
    outputs = _step_of_windows(model, optimizer, x, y, windows=windows, until_last="set_requires_gradient_sync")
    got = gathered(model, 1)
    got["outputs"] = copied(outputs)
    dtypes = {value.dtype for value in got.values()}
    if dtypes != {torch.float32}:
        raise ShardError(
            f"{what}: outputs, gradients and parameters are {dtypes}, expected float32", ranks=[rank.index]
        )
    single.double()
    made = single(inputs.double())
    recipe.weighted(made, factors.double()).backward()
    expected = {"outputs": copied(recipe.split(made, rank.size)[rank.index])}
    for name, value in single.named_parameters():
        assert value.grad is not None
        expected[f"step 1: gradient of {name}"] = copied(value.grad)
        expected[f"step 1: {name}"] = kept[name].double() - training.rate * copied(value.grad)
    assert_same(got, expected, what, rank.index)


class _Pair(NamedTuple):
    values: torch.Tensor
    numbers: torch.Tensor


class _InContainers(nn.Module):
    """A module that takes inputs in containers, by keyword, and returns outputs in containers of other types."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *, given: Mapping[str, Any]) -> dict[str, Any]:
        x, rows = given["x"]
        y = self.layer(x)
        return {"list": [y, None], "pair": _Pair(y.double(), y.long()), "rows": (rows, x), "text": "a word"}


def _compare_containers(training: ExactTraining, rank: Rank, findings: Findings) -> None:
    """Compare outputs in containers, and the gradients of the one that the loss uses."""
    what = f"fully_shard, bfloat16, outputs in containers as float32, on {rank.device}, rank {rank.index}"
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model, exact = (_InContainers(training.layers()[0]) for _ in range(2))
    fully_shard(model.to(rank.device), mesh=init_device_mesh("cuda", (rank.size,)), mp_policy=policy)
    add_up(model)
    exact.to(torch.bfloat16).double()
    (inputs, _), (x, _) = training.batches()[0], own_part(training.batches()[0], rank)
    got = model(given={"x": [x, torch.arange(len(x))]})
    got["list"][0].sum().backward()
    gradients = gathered(model, 1)
    expected = exact(given={"x": [copied(x).double(), torch.arange(len(x))]})
    exact(given={"x": [inputs.double(), None]})["list"][0].sum().backward()
    leaves, form = pytree.tree_flatten_with_path(got)
    wanted, right = pytree.tree_flatten_with_path(expected)
    findings.require(form == right, f"{what}: outputs have the form {form}, expected {right}", ranks=[rank.index])
    pairs = zip(leaves, wanted, strict=False)  # the lengths are equal if the form is right
    results = [(f"output{pytree.keystr(path)}", leaf, should) for (path, leaf), (_, should) in pairs]
    for name, value in exact.named_parameters():
        results.append((f"the gradient of {name}", gradients.get(f"step 1: gradient of {name}"), value.grad))
    for name, leaf, should in results:
        if isinstance(should, torch.Tensor):
            # The reference is float64 with whole numbers, which float32, the dtype of the outputs, holds exactly.
            should = should.float() if should.is_floating_point() else should
            same = isinstance(leaf, torch.Tensor) and leaf.dtype == should.dtype and torch.equal(copied(leaf), should)
        else:
            same = leaf == should
        findings.require(same, f"{what}: {name} is {leaf}, expected {should}", ranks=[rank.index])


def assert_clipping_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that clipping under `fully_shard` uses the norm of all gradients, not of this rank's parts. A collective.

    Clips by the 1-norm, by the 2-norm, by the maximum norm, and by value. The maximum norm is left out if a rank has no
    part of some parameter.
    """
    exact = one_device(training, scale=scale_of(rank.size))
    x, y = own_part(training.batches()[0], rank)
    model = sharded(training, rank)
    with full_precision():
        recipe.weighted(model(x), y).backward()
    with Findings() as findings:
        for name, value in model.named_parameters():
            message = f"clipping on {rank.device}, rank {rank.index}: {name} has no gradient"
            findings.require(value.grad is not None, message, ranks=[rank.index])
        if findings.anywhere(rank):
            return  # a missing gradient cannot be gathered
    raw = {name: _grad(value).to_local().clone() for name, value in model.named_parameters()}
    gradients = {name: exact[f"step 1: gradient of {name}"].double() for name in raw}
    every = torch.cat([value.flatten() for value in gradients.values()])
    got: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    # Torch raises on a rank whose part is empty when it takes the maximum: pytorch#173238.
    empty = any(-(-len(value) // rank.size) * (rank.size - 1) >= len(value) for value in gradients.values())
    for kind in (1.0, 2.0) if empty else (1.0, 2.0, float("inf")):
        norm = torch.linalg.vector_norm(every, kind)
        most = float(norm) / 3
        total = nn.utils.clip_grad_norm_(model.parameters(), most, norm_type=kind)
        got[f"{kind:g}-norm"] = copied(total.full_tensor() if isinstance(total, DTensor) else total)
        expected[f"{kind:g}-norm"] = norm
        for name, value in model.named_parameters():
            got[f"{name}, clipped by its {kind:g}-norm"] = copied(_grad(value).full_tensor())
            expected[f"{name}, clipped by its {kind:g}-norm"] = gradients[name] * min(1.0, most / (float(norm) + 1e-6))
        _put_back(model, raw)
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    for name, value in model.named_parameters():
        got[f"{name}, clipped by value"] = copied(_grad(value).full_tensor())
        expected[f"{name}, clipped by value"] = gradients[name].clamp(-1.0, 1.0)
    # Squares of m terms, sums over tensors and ranks, a root and a quotient: m + 8 roundings of 2^-24 each.
    tolerance = {name: (every.numel() + 8) * 2.0**-24 * value.abs() for name, value in expected.items()}
    assert_gradients_agree(got, expected, tolerance=tolerance, rank=rank.index, what=f"clipping on {rank.device}")


def _grad(value: torch.Tensor) -> DTensor:
    assert isinstance(value.grad, DTensor), "the loss depends on each parameter, which is sharded"
    return value.grad


def _put_back(model: nn.Module, raw: Mapping[str, torch.Tensor]) -> None:
    for name, value in model.named_parameters():
        _grad(value).to_local().copy_(raw[name])
