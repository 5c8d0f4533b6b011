"""Compare models under `fully_shard` (FSDP2) with one device, bit for bit, on exact data.

Each pair of values of its options is tried, and the parts of the parameters that each rank holds are checked.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as communication
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from mgpu_check.asserts.findings import Findings, on_any_rank, require
from mgpu_check.asserts.known_defects import left_out
from mgpu_check.asserts.models import assert_gradients_agree, assert_same
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ShardError
from mgpu_check.numerics.steps import full_precision
from mgpu_check.oracles.pairs import drawn_rows, near_square, words_of
from mgpu_check.oracles.training import training_steps as recipe
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.oracles.training.reference_training import gathered, one_device, own_part, own_results, sgd
from mgpu_check.torch_hooks.tensors import copied, name_of


def cast_by_hand(
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, subject: str, findings: Findings
) -> None:
    """Cast the inputs of a module to float64, and require before each step that they arrived in float32."""
    arrived: set[str] = set()

    def cast(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (x,) = arguments
        arrived.add(name_of(x.dtype))
        return x.double()

    def judge(*_: object) -> None:
        text = f"inputs of float32 arrived as {', '.join(sorted(arrived))}" if arrived else "its module was not called"
        require(findings, rank, arrived == {"float32"}, subject, text)
        arrived.clear()

    module.register_forward_pre_hook(cast)
    optimizer.register_step_pre_hook(judge)


def fetch_ahead(model: nn.Sequential) -> None:
    """Make each sharded layer prefetch the parameters of the next one, and in the backward pass of the previous one."""
    layers = [layer for layer in model if isinstance(layer, FSDPModule)]
    for before, after in itertools.pairwise(layers):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def _wrong_chunks(model: nn.Module, mesh: DeviceMesh, device: torch.device, unsharded: Collection[str]) -> str | None:
    """Describe the first parameter whose local part is not this rank's chunk; None if all are right."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "all ranks are in the mesh"
    for name, value in model.named_parameters():
        if name in unsharded:
            continue
        assert isinstance(value, DTensor), "a sharded parameter is a DTensor"
        divided = value.placements[-1]
        dim = divided.dim if isinstance(divided, Shard) else 0
        size = -(-value.shape[dim] // mesh.size(-1))
        length = max(0, min(size, value.shape[dim] - size * coordinate[-1]))
        wanted = (*value.shape[:dim], length, *value.shape[dim + 1 :])
        local = value.to_local()
        if local.shape != wanted:
            return f"{name} has a part of {tuple(local.shape)} here, expected {wanted}"
        if local.device != device:
            return f"the part of {name} is on {local.device}"
    return None


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
        memory_later: shard the model on the meta device and allocate it afterwards; its values are undefined.
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
            dtensor: Any = DTensor.from_local(value.detach(), mesh).requires_grad_()
            dtensor._is_param = True
            layer.register_parameter(name, dtensor)
    model.register_forward_pre_hook(
        lambda _, inputs: tuple(DTensor.from_local(tensor, mesh, [Shard(0)] * mesh.ndim) for tensor in inputs)
    )
    model.register_forward_hook(lambda _, inputs, output: output.to_local().clone())
    *repeated, divided = mesh.mesh_dim_names or ()
    return torch.distributed.fsdp.DataParallelMeshDims(shard=divided, replicate=tuple(repeated) or None)


def add_up(model: nn.Module) -> None:
    for layer in _sharded_modules(model):
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def mesh_of(rank: Rank, dimensions: int) -> DeviceMesh:
    """Return a mesh whose last dimension shards the model; the first of two replicates it."""
    shape, axis_names = ((rank.size,), ("shard",)) if dimensions == 1 else (near_square(rank.size), ("repeat", "shard"))
    return init_device_mesh("cuda", shape, mesh_dim_names=axis_names)


def scale_of(ranks: int) -> float:
    """Return the factor that a model of `sharded` applies to the sum of all ranks' gradients."""
    return 1.0 if ranks & (ranks - 1) else 1.0 / ranks


def assert_fully_sharded_agrees(training: ExactTraining, rank: Rank, *, dimensions: int) -> None:
    """Assert that a model under `fully_shard` trains as on one device, on a mesh of `dimensions`. A collective.

    The first step accumulates gradients over two micro-batches. The first configuration reduces them after the last one
    only. The others scatter after each, and sum over the replicating dimension of the mesh (HSDP) after the last only.
    If more than two ranks divide freed parameters, and an even number, each pair of ranks keeps a whole copy after the
    forward pass. Each rank must hold exactly its chunk before and after each step.
    """
    wanted = own_results(training, one_device(training, scale=scale_of(rank.size)), rank)
    mesh = mesh_of(rank, dimensions)
    with Findings() as findings:
        for how, chosen in _WAYS.items():
            row = {**_DEFAULTS, "dimensions": dimensions, **chosen}
            subject = f"fully_shard over {tuple(mesh.shape)}, {how}, on {rank.device}"
            got = _trained(training, rank, mesh, row, subject, findings, later=1)
            if got is None:
                return
            with findings.collected():
                assert_same(got, wanted, subject, rank.index)
            if findings.enough(rank):
                return
        _judge_divisors(mesh, rank, findings)


def _judge_divisors(mesh: DeviceMesh, rank: Rank, findings: Findings) -> None:
    """Require that gradients are divided by the given number: in float64 by two others, before and after their sum. The
    float nearest to 1/3 or 1/6 times 72 is exact."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    if mesh.size(-1) == 1:
        # foreach_reduce in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.11 to 2.14
        left_out("a divide factor of float64 gradients on one rank", "torch divides by it twice")
        dtypes = dtypes[:1]
    for divisor, dtype in itertools.product((6.0, 3.0, 1.0), dtypes):
        layer: Any = fully_shard(nn.Linear(4, 3, bias=False, dtype=dtype).to(rank.device), mesh=mesh)
        layer.set_gradient_divide_factor(divisor)
        layer(torch.full((1, 4), 72.0, device=rank.device, dtype=dtype)).sum().backward()
        expected = 72.0 * rank.size / divisor
        own = copied(layer.weight.grad.to_local())
        divided = f"gradient divide factor {divisor}, {name_of(dtype)}"
        subject = f"fully_shard over {tuple(mesh.shape)}, {divided}, on {rank.device}"
        message = f"{subject}: the gradient is {own}, expected {expected}"
        findings.require(bool((own == expected).all()), message, ranks=[rank.index])


def stepped(
    optimizer: torch.optim.Optimizer,
    forward: Callable[[torch.Tensor], torch.Tensor],
    samples: tuple[torch.Tensor, torch.Tensor],
    windows: int,
    prepare: Callable[[bool], object],
    before_step: Callable[[], object] = bool,
    factor: float = 1.0,
) -> torch.Tensor:
    """Train for one step of micro-batches with the loss times `factor`, and return the outputs. Call `prepare` before
    each micro-batch with whether it is the last."""
    x, y = samples
    optimizer.zero_grad()
    outputs: list[torch.Tensor] = []
    borders = [len(x) * number // windows for number in range(windows + 1)]
    with full_precision():
        for start, end in itertools.pairwise(borders):
            # Ranks without samples take part with an empty batch.
            prepare(len(outputs) == windows - 1)
            outputs.append(forward(x[start:end]))
            (recipe.weighted(outputs[-1], y[start:end]) * factor).backward()
        before_step()
        optimizer.step()
    return torch.cat(outputs)


def assert_mixed_precision_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that mixed precision computes and reduces in its dtypes, and keeps float32 parameters. A collective.

    Parameters are whole numbers plus a small fraction, which the low precision drops. So a result shows whether the
    fraction took part in the computation, or was lost from the parameters. If only the reduction is in low precision,
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
    subject = f"fully_shard, {low} reduced in {reduced}, {windows} micro-batches, on {rank.device}"
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
        head_length = len(recipe.split(factors, rank.size)[0])
        start = head_length * (windows - 1) // windows
        factors[start:head_length] *= 64
        if rank.index == 0:
            y[start:] *= 64
    if low is None:
        # Gradients exceed whole numbers by this fraction, until the reduction drops it.
        y *= 1 + 2.0**-12
    fsdp_model: Any = model
    outputs = stepped(optimizer, model, (x, y), windows, fsdp_model.set_requires_gradient_sync)
    got = gathered(model, 1)
    got["outputs"] = copied(outputs)
    if (dtypes := {value.dtype for value in got.values()}) != {torch.float32}:
        message = f"{subject}: outputs, gradients and parameters are {dtypes}, expected float32"
        raise ShardError(message, ranks=[rank.index])
    single.double()
    reference_outputs = single(inputs.double())
    recipe.weighted(reference_outputs, factors.double()).backward()
    expected = {"outputs": copied(recipe.split(reference_outputs, rank.size)[rank.index])}
    for name, value in single.named_parameters():
        assert value.grad is not None
        expected[f"step 1: gradient of {name}"] = copied(value.grad)
        expected[f"step 1: {name}"] = kept[name].double() - training.rate * copied(value.grad)
    assert_same(got, expected, subject, rank.index)


class _Pair(NamedTuple):
    values: torch.Tensor
    numbers: torch.Tensor


class _InContainers(nn.Module):
    """A module that takes inputs in containers, by keyword, and returns outputs in containers of other types."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *, containers: Mapping[str, Any]) -> dict[str, Any]:
        x, rows = containers["x"]
        y = self.layer(x)
        return {"list": [y, None], "pair": _Pair(y.double(), y.long()), "rows": (rows, x), "text": "a word"}


def _compare_containers(training: ExactTraining, rank: Rank, findings: Findings) -> None:
    subject = f"fully_shard, bfloat16, outputs in containers as float32, on {rank.device}"
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model, exact = (_InContainers(training.layers()[0]) for _ in range(2))
    fully_shard(model.to(rank.device), mesh=init_device_mesh("cuda", (rank.size,)), mp_policy=policy)
    add_up(model)
    exact.to(torch.bfloat16).double()
    (inputs, _), (x, _) = training.batches()[0], own_part(training.batches()[0], rank)
    got = model(containers={"x": [x, torch.arange(len(x))]})
    got["list"][0].sum().backward()
    gradients = gathered(model, 1)
    expected = exact(containers={"x": [copied(x).double(), torch.arange(len(x))]})
    exact(containers={"x": [inputs.double(), None]})["list"][0].sum().backward()
    leaves, form = pytree.tree_flatten_with_path(got)
    wanted, expected_form = pytree.tree_flatten_with_path(expected)
    require(findings, rank, form == expected_form, subject, f"outputs have the form {form}, expected {expected_form}")
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
        require(findings, rank, same, subject, f"{name} is {leaf}, expected {should}")


def assert_clipping_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that clipping under `fully_shard` uses the norm of all gradients, not of this rank's parts. A collective.
    The maximum norm is left out if a rank has no part of some parameter."""
    exact = one_device(training, scale=scale_of(rank.size))
    x, y = own_part(training.batches()[0], rank)
    model = sharded(training, rank)
    with full_precision():
        recipe.weighted(model(x), y).backward()
    with Findings() as findings:
        for name, value in model.named_parameters():
            require(findings, rank, value.grad is not None, f"clipping on {rank.device}", f"{name} has no gradient")
        if findings.anywhere(rank):
            return  # a missing gradient cannot be gathered
    raw = {name: _grad(value).to_local().clone() for name, value in model.named_parameters()}
    gradients = {name: exact[f"step 1: gradient of {name}"].double() for name in raw}
    every = torch.cat([value.flatten() for value in gradients.values()])
    got: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    # Torch raises on a rank whose part is empty when it takes the maximum: pytorch#173238.
    empty = any(-(-len(value) // rank.size) * (rank.size - 1) >= len(value) for value in gradients.values())
    for order in (1.0, 2.0) if empty else (1.0, 2.0, float("inf")):
        norm = torch.linalg.vector_norm(every, order)
        most = float(norm) / 3
        total = nn.utils.clip_grad_norm_(model.parameters(), most, norm_type=order)
        got[f"{order:g}-norm"] = copied(total.full_tensor() if isinstance(total, DTensor) else total)
        expected[f"{order:g}-norm"] = norm
        for name, value in model.named_parameters():
            got[f"{name}, clipped by its {order:g}-norm"] = copied(_grad(value).full_tensor())
            expected[f"{name}, clipped by its {order:g}-norm"] = gradients[name] * min(1.0, most / (float(norm) + 1e-6))
        for name, value in model.named_parameters():
            _grad(value).to_local().copy_(raw[name])
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


_OFFLOADED: Mapping[str, Callable[[], OffloadPolicy]] = {
    "no": OffloadPolicy,
    "yes": lambda: CPUOffloadPolicy(pin_memory=False),
    "pinned": lambda: CPUOffloadPolicy(pin_memory=True),
}
_DOUBLE, _SINGLE = torch.float64, torch.float32
_DTYPES: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "float64": {"param_dtype": _DOUBLE, "reduce_dtype": _DOUBLE, "output_dtype": _SINGLE},
    "reduced in float64": {"reduce_dtype": _DOUBLE},
    "inputs not cast": {"param_dtype": _DOUBLE, "cast_forward_inputs": False},
}
"""Policies of mixed precision. Float64 holds each value of float32, so results must have the bits of one device."""
_OPTIONS: Mapping[str, Sequence[Any]] = {
    "dimensions": (1, 2),
    "reshard_after_forward": (None, True, False, 2),
    "offloaded": tuple(_OFFLOADED),
    "dtypes": tuple(_DTYPES),
    "columns": (False, True),
    "together": (False, True),
    "ahead": ("", "in order", "unshard", "unshard async"),
    "until_last": ("set_requires_gradient_sync", "set_requires_all_reduce", ""),
    "recurse": (True, False),
    "windows": (2, 1, 3),
    "ignored": (False, True),
    "communication": ("default", "custom", "sums"),
    "kept_between": (False, True),
    "unneeded_in_backward": (False, True),
    "doubled_by_hook": (False, True),
    "root": (True, False),
    "more": ("", "event", "buffers", "unused", "method", "interrupted", "reshard later", "last backward"),
}
"""Options of `fully_shard`, of its modules and of the step, the default first.

`together` shards the last two layers as one group. `until_last` is the method that switches a reduction off until the
last of the `windows`, which are micro-batches. `ignored` excludes a parameter, which the check reduces by itself.
`kept_between` keeps the parameters after the backward pass of other micro-batches than the last. Without a `root`,
each layer is a root of its own, and shares its streams with the others.
"""
_DEFAULTS = {name: values[0] for name, values in _OPTIONS.items()}
_WAYS: Mapping[str, dict[str, Any]] = {
    "resharding on": {"reshard_after_forward": 2, "ahead": "in order"},
    "resharding off, from DTensors": {"reshard_after_forward": False, "dtensors": True}
    | {"columns": True, "together": True, "until_last": "set_requires_all_reduce"},
    "offloaded": {"offloaded": "yes", "until_last": "set_requires_all_reduce"},
}
"""Options that are always tried, by name."""
_NEEDS = {
    "buffers": "set_reduce_scatter_max_input_buffers",
    "unused": "set_reduce_scatter_unused_params",
    "interrupted": "reset_iter_state",
}
"""Values of options -> the method of newer versions of torch that they need."""


def _together(row: Mapping[str, Any]) -> bool:
    first_in_group = row.get("together") or row.get("ahead") == "in order"
    if row.get("unneeded_in_backward") and first_in_group:
        return False
    needs_root = row.get("more") in ("event", "method", "interrupted", "last backward", "reshard later")
    if row.get("root") is False and (needs_root or first_in_group):
        return False
    if row.get("ignored") and row.get("dtypes") in ("float64", "inputs not cast"):
        return False  # an ignored parameter is not cast
    if row.get("columns") and row.get("reshard_after_forward") == 2:
        return False  # torch divides the columns again as rows, and raises
    if row.get("more") == "interrupted" and str(row.get("ahead")).startswith("unshard"):
        return False
    method = _NEEDS.get(str(row.get("more")))
    return method is None or hasattr(FSDPModule, method)


def assert_options_agree(training: ExactTraining, rank: Rank, *, more: bool) -> None:
    """Assert that a model under `fully_shard` trains as on one device with each pair of options. A collective.
    With `more` all rows of options are tried, else some of them, by the seed of the training; always the three options
    that together add up micro-batches before replicas."""
    wanted = own_results(training, one_device(training, scale=scale_of(rank.size)), rank)
    with Findings() as findings:
        summed_late = {**_DEFAULTS, "dimensions": 2, "until_last": "set_requires_all_reduce", "windows": 4}
        for row in (summed_late, *drawn_rows(_OPTIONS, _together, seed=training.seed, more=more, share=8)):
            subject = f"fully_shard with {words_of(row, _OPTIONS)}, on {rank.device}"
            mesh = mesh_of(rank, row["dimensions"])
            got = _trained(training, rank, mesh, row, subject, findings)
            if got is None:
                return  # others could wait for the parts that this rank lacks
            with findings.collected():
                assert_same(got, wanted, subject, rank.index)
            if findings.enough(rank):
                break


def _trained(
    training: ExactTraining,
    rank: Rank,
    mesh: DeviceMesh,
    row: Mapping[str, Any],
    subject: str,
    findings: Findings,
    later: int | None = None,
) -> dict[str, torch.Tensor] | None:
    """Return the results of a training with a row of options, with `later` micro-batches from the second step on; None
    if a rank lacks a part that others could wait for. A collective."""
    unsharded = ("0.bias",) if row["ignored"] else ()
    model = _sharded(training, rank, mesh, row, unsharded)
    layers = _sharded_modules(model)
    optimizer = sgd(training, model)
    if row["dtypes"] == "inputs not cast":
        cast_by_hand(model[0], optimizer, rank, subject, findings)
    if unsharded:
        optimizer.param_groups[0]["foreach"] = False  # a list cannot have DTensors and other tensors
    device = rank.device if row["offloaded"] == "no" else torch.device("cpu")
    prepare, reduce = functools.partial(_prepare, layers, row), functools.partial(_reduce_ignored, model, rank, row)
    forward, factor = getattr(model, "computed", model), 0.5 if row["doubled_by_hook"] else 1.0
    got: dict[str, torch.Tensor] = {}

    def chunks_are_right() -> bool:
        message = _wrong_chunks(model, mesh, device, unsharded)
        with findings.collected():
            if message:
                raise ShardError(f"{subject}, rank {rank.index}: {message}", ranks=[rank.index])
        return not on_any_rank(rank, bool(message))

    if not chunks_are_right():
        return None
    for step, batch in enumerate(training.batches(), 1):
        samples = own_part(batch, rank)
        if row["more"] == "interrupted":
            _interrupt(model, layers[0], samples[0])
        windows = row["windows"] if later is None or step == 1 else later
        outputs = stepped(optimizer, forward, samples, windows, prepare, reduce, factor)
        if row["more"] == "event":
            event = torch.cuda.Event()
            event.record()
            layers[0].set_post_optim_event(event)
        if not chunks_are_right():
            return None
        got |= gathered(model, step, unsharded) | {f"step {step}: outputs": copied(outputs).float()}
        for name in unsharded:
            value = model.get_parameter(name)
            assert value.grad is not None
            got |= {f"step {step}: {name}": copied(value), f"step {step}: gradient of {name}": copied(value.grad)}
    return got


def _sharded(
    training: ExactTraining, rank: Rank, mesh: DeviceMesh, row: Mapping[str, Any], unsharded: Collection[str]
) -> nn.Sequential:
    options: dict[str, Any] = {
        "dtensors": row.get("dtensors", False),
        "offload_policy": _OFFLOADED[row["offloaded"]](),
        "mp_policy": MixedPrecisionPolicy(**_DTYPES[row["dtypes"]]),
    }
    after = row["reshard_after_forward"]
    if after is not None:
        even = mesh.size(-1) > 2 and mesh.size(-1) % 2 == 0
        options["reshard_after_forward"] = after if isinstance(after, bool) or even else True
    if row["columns"]:
        # By columns if they divide evenly, as torch requires, else None for rows.
        options["shard_placement_fn"] = lambda value: (
            Shard(1) if value.dim() > 1 and value.shape[1] % mesh.size(-1) == 0 else None
        )
    model = sharded(training, rank, mesh, together=row["together"], root=row["root"], ignored=unsharded, **options)
    roots = [layer for layer in model if isinstance(layer, FSDPModule)]
    if not row["root"] and (share := getattr(torch.distributed.fsdp, "share_comm_ctx", None)):
        share(roots)
    if row["ahead"] == "in order":
        fetch_ahead(model)
    _configure(model, _sharded_modules(model), row)
    if row["unneeded_in_backward"]:
        # The gradient of the first weight needs the inputs alone.
        for value in (True, False):
            roots[0].set_unshard_in_backward(value)
    return model


def _configure(model: nn.Sequential, layers: Sequence[FSDPModule], row: Mapping[str, Any]) -> None:
    for layer in layers:
        if row["communication"] == "custom":
            layer.set_custom_all_gather(communication.DefaultAllGather())
            layer.set_custom_reduce_scatter(communication.DefaultReduceScatter())
        if row["communication"] == "sums":
            for enable in (False, True):
                layer.set_force_sum_reduction_for_comms(enable)
        if row["doubled_by_hook"]:
            layer.set_all_reduce_hook(_double, stream=torch.cuda.Stream() if row["dimensions"] == 1 else None)
    if row["more"] == "buffers":
        layers[0].set_reduce_scatter_max_input_buffers(2, recurse=row["recurse"])
    elif row["more"] == "method":
        vars(model)["computed"] = functools.partial(nn.Sequential.forward, model)
        register_fsdp_forward_method(model, "computed")
    elif row["more"] in ("unused", "reshard later"):
        method = "set_reduce_scatter_unused_params" if row["more"] == "unused" else "set_reshard_after_forward"
        for value in (False, True):
            getattr(layers[0], method)(value, recurse=row["recurse"])


def _double(reduced: torch.Tensor) -> None:
    reduced.mul_(2)


def _prepare(layers: Sequence[FSDPModule], row: Mapping[str, Any], last: bool) -> None:
    """Switch reductions for a micro-batch, and fetch parameters."""
    called = layers if not row["recurse"] or not row["root"] else layers[:1]
    for layer in called:
        if row["until_last"]:
            getattr(layer, row["until_last"])(last, recurse=row["recurse"])
        if row["kept_between"]:
            layer.set_reshard_after_backward(last, recurse=row["recurse"])
    if row["more"] == "last backward":
        layers[0].set_is_last_backward(last)
    if row["ahead"].startswith("unshard"):
        handles = [layer.unshard(async_op=row["ahead"] == "unshard async") for layer in layers]
        if handles[-1] is not None:
            handles[-1].wait()


def _interrupt(model: nn.Sequential, root: FSDPModule, x: torch.Tensor) -> None:
    """Raise in the last layer of a forward pass, and make the model forget that pass."""

    def fail(*_: object) -> None:
        raise InterruptedError

    handle = model[-1].register_forward_pre_hook(fail)
    with contextlib.suppress(InterruptedError):
        model(x)
    root.reset_iter_state()
    handle.remove()


def _reduce_ignored(model: nn.Module, rank: Rank, row: Mapping[str, Any]) -> None:
    if row["ignored"]:
        gradient = model.get_parameter("0.bias").grad
        assert gradient is not None, "each rank takes part in each micro-batch"
        dist.all_reduce(gradient)
        gradient.mul_(scale_of(rank.size) * (2 if row["doubled_by_hook"] else 1))
