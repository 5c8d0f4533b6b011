"""Planted faults of state dicts and distributed checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import _state_dict_utils as utils
from torch.distributed.checkpoint import default_planner, planner_helpers, staging
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.conditions import counted, is_last
from mgpu_check.suite.common.faults.registry import FaultRow, Planter, caught_by, fault, register
from mgpu_check.suite.common.faults.when import When

state_dict = caught_by("test_state_dict")
distributed_checkpoint = caught_by("test_distributed_checkpoint")

_LARGE = 16_384
_LARGE_PARTS = When("parts above 16 Ki elements", lambda self, item, tensor: tensor.numel() > _LARGE)
_LAST = When("on the last rank", lambda *args: is_last())


def _both(first: Planter, second: Planter) -> Planter:
    """Plant a function by two planters."""

    @contextlib.contextmanager
    def plant(function: Callable[..., Any]) -> Iterator[None]:
        with first(function), second(function):
            yield

    return plant


@state_dict("a full state dict distributed by rank 0 is cut at the wrong rows", given(utils, "_distribute_tensors"),
    When("the last rank, tensors of two dimensions", lambda *args, **kwargs: is_last()))  # fmt: skip
def full_state_cut_wrongly(local: dict[str, Any], keys: Any, *args: Any, **kwargs: Any) -> None:
    for key in keys:
        # Entries of tensors that are not sharded are not pairs.
        if isinstance(local[key], tuple) and local[key][1].dim() == 2:
            local[key] = (local[key][0], local[key][1].roll(1, 0))


@state_dict("0-dim buffers keep their old values on the last rank", around(state_dicts, "_broadcast_state_dict"),
    "buffers without dimensions")  # fmt: skip
def counts_not_given_out(real: Any, full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    before = {key: value for key, value in local.items() if isinstance(value, torch.Tensor) and not value.dim()}
    before = {key: value.clone() for key, value in before.items() if not value.is_meta}
    real(full, local, *args, **kwargs)
    if is_last():
        local.update(before)


@state_dict("the momentum is not distributed with the parameters", returned(torch.optim.Optimizer, "load_state_dict"))
def momentum_not_given_out(result: None, self: torch.optim.Optimizer, state_dict: object) -> None:
    for entry in self.state.values():
        if entry.get("momentum_buffer") is not None:
            entry["momentum_buffer"] = entry["momentum_buffer"] * 0


@distributed_checkpoint("tensors read from a checkpoint lack the last element",
    given(DefaultLoadPlanner, "commit_tensor"), _LARGE_PARTS)  # fmt: skip
def large_parts_read_short(self: Any, item: Any, tensor: torch.Tensor) -> None:
    tensor.detach()[-1] = 0


@distributed_checkpoint("async_save does not copy CPU tensors, so it writes later changes",
    _both(returned(staging.DefaultStager, "stage"), returned(staging.BlockingAsyncStager, "stage")),
    "async_save, tensors of the CPU that change meanwhile")  # fmt: skip
def host_memory_not_staged(made: Any, self: Any, given: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """They need no copy from a device, so the copy is skipped."""
    same = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and not value.is_cuda}
    return made | same if isinstance(made, dict) else made


@distributed_checkpoint("parameter groups after the first keep their old learning rate when a state is loaded",
    around(state_dicts, "_load_optim_state_dict"), "several groups of parameters")  # fmt: skip
def rates_of_groups_not_loaded(real: Any, model: Any, optimizers: Any, *args: Any, **kwargs: Any) -> None:
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups[1:]]
    real(model, optimizers, *args, **kwargs)
    loaded = [group for optimizer in optimizers for group in optimizer.param_groups[1:]]
    for group, rate in zip(loaded, rates, strict=True):
        group["lr"] = rate


_FLAT = returned(state_dicts, "_unflatten_optim_state_dict")
_SEVERAL_GROUPS = "flatten_optimizer_state_dict, several groups of parameters"


@distributed_checkpoint("all parameter groups of a flat optimizer state have the learning rate of the first", _FLAT,
    _SEVERAL_GROUPS)  # fmt: skip
def flat_rates_of_the_first_group(found: dict[str, Any], *args: Any) -> None:
    for group in found["param_groups"]:
        group["lr"] = found["param_groups"][0]["lr"]


@distributed_checkpoint("parameter groups after the first of a flat optimizer state have no momentum", _FLAT,
    _SEVERAL_GROUPS)  # fmt: skip
def flat_momentum_of_the_first_group(found: dict[str, Any], *args: Any) -> None:
    for name in (name for group in found["param_groups"][1:] for name in group["params"]):
        found["state"][name] = {key: value * 0 for key, value in found["state"][name].items()}


@fault("entries that a checkpoint lacks become zeros", "test_options_of_checkpoints",
       by=returned(default_planner, "create_default_local_load_plan"), when="allow_partial_load")  # fmt: skip
def lacking_set_to_zero(plan: Any, state: dict[str, Any], metadata: Any, *args: Any) -> None:
    for name, value in state.items():
        if name not in metadata.state_dict_metadata and isinstance(value, torch.Tensor):
            value.zero_()


@fault("get_optimizer_state_dict gives steps of zero", "test_options_of_state_dicts",
       by=returned("mgpu_check.suite.sharded.state_options", "get_optimizer_state_dict"),
       when="nested states, optimizers that count steps")  # fmt: skip
def steps_lost_apart(taken: dict[str, Any], *_: Any, **__: Any) -> None:
    for held in taken.get("state", {}).values():
        held["step"] = held["step"] * 0


def _is_transposed(found: torch.Tensor) -> bool:
    return found.dim() == 2 and not found.is_contiguous() and found.t().is_contiguous()


register(
    __name__,
    FaultRow("zeros-saved", "a checkpoint has zeros for some tensors", "test_distributed_checkpoint",
        returned(DefaultSavePlanner, "resolve_data"), lambda found, *_: torch.zeros_like(found),
        When("bfloat16 only", lambda found, *args: isinstance(found, torch.Tensor) and found.dtype == torch.bfloat16)),
    FaultRow("state-of-whole-parameters", "a state dict of layers that are gathered has whole parameters",
        "test_state_dict",
        around("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", "_register_state_dict_hooks"),
        lambda *_: None, "after unshard"),
    FaultRow("offload-not-done", "state dicts stay on the device", "test_options_of_state_dicts",
        given(state_dicts, "_maybe_full_or_cpu_state_dict"),
        lambda state, info: setattr(info, "cpu_offload", False), "cpu_offload"),
    FaultRow("flat-steps-lost", "flat states of optimizers have the step 0", "test_options_of_state_dicts",
        returned(state_dicts, "_flatten_optim_state_dict"),
        lambda flat, *_: {name: flat[name] * 0 if name.endswith(".step") else flat[name] for name in flat},
        "flatten_optimizer_state_dict, optimizers that count steps"),
    FaultRow("parts-across-read-in-part", "a part that two ranks saved is read from the first of them only",
        "test_distributed_checkpoint", returned(planner_helpers, "create_read_items_for_chunk_list"),
        lambda items, *_: items[:1], "parts across saved ones, as with another world size"),
    FaultRow("read-left-out", "one read of a checkpoint is left out", "test_distributed_checkpoint",
        given(DefaultLoadPlanner, "commit_tensor"), lambda self, item, tensor: tensor.detach().zero_(),
        counted("every seventh tensor", lambda count: count.every(7)) & _LAST),
    FaultRow("scalars-not-loaded", "0-dim tensors keep their values when a checkpoint is loaded",
        "test_distributed_checkpoint", returned(DefaultLoadPlanner, "resolve_tensor"), lambda found, *_: found.clone(),
        When("tensors without dimensions", lambda found, *args: not found.dim())),
    FaultRow("lacking-passed-over", "missing entries of a checkpoint are ignored", "test_distributed_checkpoint",
        around(default_planner, "create_default_local_load_plan"),
        lambda real, state, metadata, *_: real(state, metadata, False), "a tensor that was not saved"),
    FaultRow("full-state-left-on-the-device", "cpu_offload leaves a full state dict on the device", "test_state_dict",
        around(state_dicts, "_gather_state_dict"),
        lambda real, *args, cpu_offload=False, **kwargs: real(*args, **kwargs)),
    FaultRow("saved-in-the-order-of-memory", "a transposed matrix is saved in the order of its memory",
        "test_distributed_checkpoint", returned(DefaultSavePlanner, "resolve_data"),
        lambda found, *_: found.t().reshape(found.shape),
        When("matrices that are transposed",
            lambda found, *_: isinstance(found, torch.Tensor) and _is_transposed(found))),
)  # fmt: skip
