"""Train under `fully_shard` (FSDP2) with each pair of values of its options, next to one device, bit for bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as communication

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.models import assert_same
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.steps import full_precision
from mgpu_check.suite.common.exact_training.cases import ExactTraining
from mgpu_check.suite.common.exact_training.reference import gathered, one_device, own_part, own_results, sgd
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.recipes import training_steps as recipe
from mgpu_check.suite.sharded.casting import cast_by_hand
from mgpu_check.suite.sharded.chunks import by_columns, chunks_are_right, fetch_ahead
from mgpu_check.suite.sharded.fully_sharded import mesh_of, scale_of, sharded
from mgpu_check.torch_hooks.tensors import copied

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
_NEEDS = {
    "buffers": "set_reduce_scatter_max_input_buffers",
    "unused": "set_reduce_scatter_unused_params",
    "interrupted": "reset_iter_state",
}
"""Values of options -> the method of newer versions of torch that they need."""


def _together(row: Mapping[str, Any]) -> bool:
    """Return whether `fully_shard` takes these options together."""
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

    Args:
        more: whether to train with all rows of options, or with an eighth of them, by the seed of the training.
    """
    expected = one_device(training, scale=scale_of(rank.size))
    wanted = own_results(training, expected, rank)
    with Findings() as findings:
        for row in drawn_rows(_OPTIONS, _together, seed=training.seed, more=more, share=8):
            what = f"fully_shard with {words_of(row, _OPTIONS)}, on {rank.device}"
            got = _trained(training, rank, row, what, findings)
            if got is None:
                return  # others could wait for the parts that this rank lacks
            with findings.collected():
                assert_same(got, wanted, what, rank.index)
            if findings.enough(rank):
                break


def _trained(
    training: ExactTraining, rank: Rank, row: Mapping[str, Any], what: str, findings: Findings
) -> dict[str, torch.Tensor] | None:
    """Return outputs, gradients and parameters after each step; None if a rank does not hold its parts."""
    mesh = mesh_of(rank, row["dimensions"])
    model = _sharded(training, rank, mesh, row)
    layers = [layer for layer in model.modules() if isinstance(layer, FSDPModule)]
    optimizer = sgd(training, model)
    if row["dtypes"] == "inputs not cast":
        cast_by_hand(model[0], optimizer, rank, what, findings)
    whole = _whole(row)
    if whole:
        optimizer.param_groups[0]["foreach"] = False  # a list cannot have DTensors and other tensors
    place = rank.device if row["offloaded"] == "no" else torch.device("cpu")
    got: dict[str, torch.Tensor] = {}
    if not chunks_are_right(model, mesh, rank, place, what, findings, whole):
        return None
    for step, batch in enumerate(training.batches(), 1):
        outputs = _step(model, layers, optimizer, own_part(batch, rank), rank, row)
        if row["more"] == "event":
            event = torch.cuda.Event()
            event.record()
            layers[0].set_post_optim_event(event)
        if not chunks_are_right(model, mesh, rank, place, what, findings, whole):
            return None
        got |= gathered(model, step, whole) | {f"step {step}: outputs": copied(outputs).float()}
        for name in whole:
            value = model.get_parameter(name)
            assert value.grad is not None
            got |= {f"step {step}: {name}": copied(value), f"step {step}: gradient of {name}": copied(value.grad)}
    return got


def _whole(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the parameters that are not sharded."""
    return ("0.bias",) if row["ignored"] else ()


def _sharded(training: ExactTraining, rank: Rank, mesh: DeviceMesh, row: Mapping[str, Any]) -> nn.Sequential:
    options: dict[str, Any] = {
        "offload_policy": _OFFLOADED[row["offloaded"]](),
        "mp_policy": MixedPrecisionPolicy(**_DTYPES[row["dtypes"]]),
    }
    after = row["reshard_after_forward"]
    if after is not None:
        even = mesh.size(-1) > 2 and mesh.size(-1) % 2 == 0
        options["reshard_after_forward"] = after if isinstance(after, bool) or even else True
    if row["columns"]:
        options["shard_placement_fn"] = by_columns(mesh.size(-1))
    model = sharded(training, rank, mesh, together=row["together"], root=row["root"], ignored=_whole(row), **options)
    roots = [layer for layer in model if isinstance(layer, FSDPModule)]
    if not row["root"]:
        _share_streams(roots)
    if row["ahead"] == "in order":
        fetch_ahead(model)
    _configure(model, [one for one in model.modules() if isinstance(one, FSDPModule)], row)
    if row["unneeded_in_backward"]:
        # The gradient of the first weight needs the inputs alone.
        for value in (True, False):
            roots[0].set_unshard_in_backward(value)
    return model


def _share_streams(roots: Sequence[FSDPModule]) -> None:
    share = getattr(torch.distributed.fsdp, "share_comm_ctx", None)
    if share:
        share(roots)


def _configure(model: nn.Sequential, layers: Sequence[FSDPModule], row: Mapping[str, Any]) -> None:
    """Set the options that are methods of sharded modules."""
    for layer in layers:
        if row["communication"] == "custom":
            layer.set_custom_all_gather(communication.DefaultAllGather())
            layer.set_custom_reduce_scatter(communication.DefaultReduceScatter())
        if row["communication"] == "sums":
            for enable in (False, True):
                layer.set_force_sum_reduction_for_comms(enable)
        if row["doubled_by_hook"]:
            layer.set_all_reduce_hook(_double, stream=torch.cuda.Stream() if row["dimensions"] == 1 else None)
    _configure_more(model, layers[0], row)


def _configure_more(model: nn.Sequential, first: FSDPModule, row: Mapping[str, Any]) -> None:
    if row["more"] == "buffers":
        first.set_reduce_scatter_max_input_buffers(2, recurse=row["recurse"])
    elif row["more"] == "unused":
        for value in (False, True):
            first.set_reduce_scatter_unused_params(value, recurse=row["recurse"])
    elif row["more"] == "method":
        vars(model)["computed"] = functools.partial(nn.Sequential.forward, model)
        register_fsdp_forward_method(model, "computed")
    elif row["more"] == "reshard later":
        for value in (False, True):
            first.set_reshard_after_forward(value, recurse=row["recurse"])


def _double(reduced: torch.Tensor) -> None:
    reduced.mul_(2)


def _step(
    model: nn.Sequential,
    layers: Sequence[FSDPModule],
    optimizer: torch.optim.Optimizer,
    part: tuple[torch.Tensor, torch.Tensor],
    rank: Rank,
    row: Mapping[str, Any],
) -> torch.Tensor:
    """Train for one step, and return the outputs."""
    x, y = part
    forward: Callable[[torch.Tensor], torch.Tensor] = getattr(model, "computed", model)
    optimizer.zero_grad()
    if row["more"] == "interrupted":
        _interrupt(model, layers[0], x)
    outputs: list[torch.Tensor] = []
    borders = [len(x) * number // row["windows"] for number in range(row["windows"] + 1)]
    with full_precision():
        for start, end in itertools.pairwise(borders):
            _prepare(layers, row, last=len(outputs) == row["windows"] - 1)
            outputs.append(forward(x[start:end]))
            loss = recipe.weighted(outputs[-1], y[start:end])
            (loss / 2 if row["doubled_by_hook"] else loss).backward()
        _reduce_ignored(model, rank, row)
        optimizer.step()
    return torch.cat(outputs)


def _prepare(layers: Sequence[FSDPModule], row: Mapping[str, Any], *, last: bool) -> None:
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
    try:
        model(x)
    except InterruptedError:
        root.reset_iter_state()
    finally:
        handle.remove()


def _reduce_ignored(model: nn.Module, rank: Rank, row: Mapping[str, Any]) -> None:
    if row["ignored"]:
        gradient = model.get_parameter("0.bias").grad
        assert gradient is not None, "each rank takes part in each micro-batch"
        dist.all_reduce(gradient)
        gradient.mul_(scale_of(rank.size) * (2 if row["doubled_by_hook"] else 1))
