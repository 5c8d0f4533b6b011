"""Planted faults of state dicts and distributed checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import _state_dict_utils as utils
from torch.distributed.checkpoint import default_planner, planner_helpers, staging, state_dict

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.conditions import Count, is_last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

_LARGE = 16_384


@fault(
    "a full state dict distributed by rank 0 is cut at the wrong rows",
    "test_state_dict",
    condition="the last rank, tensors of two dimensions",
)
def full_state_cut_wrongly() -> Iterator[None]:
    real = utils._distribute_tensors

    def distribute(local_state_dict: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if is_last():
            for key in keys:
                held = local_state_dict[key]
                # Entries of tensors that are not sharded are not pairs.
                if isinstance(held, tuple) and held[1].dim() == 2:
                    local_state_dict[key] = (held[0], held[1].roll(1, 0))
        return real(local_state_dict, keys, *args, **kwargs)

    with replaced(utils, "_distribute_tensors", distribute):
        yield


@fault(
    "0-dim buffers keep their old values on the last rank", "test_state_dict", condition="buffers without dimensions"
)
def counts_not_given_out() -> Iterator[None]:
    real = utils._broadcast_state_dict

    def broadcast(full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        before = {key: value for key, value in local.items() if isinstance(value, torch.Tensor) and not value.dim()}
        before = {key: value.clone() for key, value in before.items() if not value.is_meta}
        real(full, local, *args, **kwargs)
        if is_last():
            local.update(before)

    with replaced(state_dict, "_broadcast_state_dict", broadcast):
        yield


@fault("the momentum is not distributed with the parameters", "test_state_dict")
def momentum_not_given_out() -> Iterator[None]:
    real = torch.optim.Optimizer.load_state_dict

    def load(self: torch.optim.Optimizer, state_dict: Any) -> None:
        real(self, state_dict)
        for entry in self.state.values():
            if entry.get("momentum_buffer") is not None:
                entry["momentum_buffer"] = entry["momentum_buffer"] * 0

    with replaced(torch.optim.Optimizer, "load_state_dict", load):
        yield


@fault("a checkpoint has zeros for some tensors", "test_distributed_checkpoint", condition="bfloat16 only")
def zeros_saved() -> Iterator[None]:
    real = default_planner.DefaultSavePlanner.resolve_data

    def resolve(self: Any, item: Any) -> Any:
        found = real(self, item)
        if isinstance(found, torch.Tensor) and found.dtype == torch.bfloat16:
            return torch.zeros_like(found)
        return found

    with replaced(default_planner.DefaultSavePlanner, "resolve_data", resolve):
        yield


@fault(
    "tensors read from a checkpoint lack the last element",
    "test_distributed_checkpoint",
    condition="parts above 16 Ki elements",
)
def large_parts_read_short() -> Iterator[None]:
    real = default_planner.DefaultLoadPlanner.commit_tensor

    def commit(self: Any, item: Any, tensor: torch.Tensor) -> None:
        if tensor.numel() > _LARGE:
            tensor.detach()[-1] = 0
        real(self, item, tensor)

    with replaced(default_planner.DefaultLoadPlanner, "commit_tensor", commit):
        yield


@fault(
    "a part that two ranks saved is read from the first of them only",
    "test_distributed_checkpoint",
    condition="parts across saved ones, as with another world size",
)
def parts_across_read_in_part() -> Iterator[None]:
    real = planner_helpers.create_read_items_for_chunk_list

    def create(fqn: str, *args: Any) -> Any:
        return real(fqn, *args)[:1]

    with replaced(planner_helpers, "create_read_items_for_chunk_list", create):
        yield


@fault(
    "one read of a checkpoint is left out",
    "test_distributed_checkpoint",
    condition="every seventh tensor, on the last rank",
)
def read_left_out() -> Iterator[None]:
    real, count = default_planner.DefaultLoadPlanner.commit_tensor, Count()

    def commit(self: Any, item: Any, tensor: torch.Tensor) -> None:
        if is_last() and count.every(7):
            tensor.detach().zero_()
        real(self, item, tensor)

    with replaced(default_planner.DefaultLoadPlanner, "commit_tensor", commit):
        yield


@fault(
    "parameter groups after the first keep their old learning rate when a state is loaded",
    "test_distributed_checkpoint",
    condition="several groups of parameters",
)
def rates_of_groups_not_loaded() -> Iterator[None]:
    real = state_dict._load_optim_state_dict

    def load(model: Any, optimizers: Any, *args: Any, **kwargs: Any) -> None:
        others = [group for optimizer in optimizers for group in optimizer.param_groups[1:]]
        rates = [group["lr"] for group in others]
        real(model, optimizers, *args, **kwargs)
        others = [group for optimizer in optimizers for group in optimizer.param_groups[1:]]
        for group, rate in zip(others, rates, strict=True):
            group["lr"] = rate

    with replaced(state_dict, "_load_optim_state_dict", load):
        yield


def _unflattened(change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Change the state made from a flat optimizer state before it is loaded."""
    real: Any = state_dict._unflatten_optim_state_dict

    def unflatten(*args: Any) -> Any:
        found = real(*args)
        change(found)
        return found

    with replaced(state_dict, "_unflatten_optim_state_dict", unflatten):
        yield


@fault(
    "all parameter groups of a flat optimizer state have the learning rate of the first",
    "test_distributed_checkpoint",
    condition="flatten_optimizer_state_dict, several groups of parameters",
)
def flat_rates_of_the_first_group() -> Iterator[None]:
    def change(found: dict[str, Any]) -> None:
        for group in found["param_groups"]:
            group["lr"] = found["param_groups"][0]["lr"]

    yield from _unflattened(change)


@fault(
    "parameter groups after the first of a flat optimizer state have no momentum",
    "test_distributed_checkpoint",
    condition="flatten_optimizer_state_dict, several groups of parameters",
)
def flat_momentum_of_the_first_group() -> Iterator[None]:
    def change(found: dict[str, Any]) -> None:
        for group in found["param_groups"][1:]:
            for name in group["params"]:
                found["state"][name] = {key: value * 0 for key, value in found["state"][name].items()}

    yield from _unflattened(change)


@fault(
    "async_save does not copy CPU tensors, so it writes later changes",
    "test_distributed_checkpoint",
    condition="async_save, tensors of the CPU that change meanwhile",
)
def host_memory_not_staged() -> Iterator[None]:
    """They need no copy from a device, so the copy is skipped."""

    def staged(real: Any, self: Any, given: dict[str, Any], *rest: Any, **named: Any) -> Any:
        made = real(self, given, *rest, **named)
        same = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and not value.is_cuda}
        return made | same if isinstance(made, dict) else made

    with (
        replaced_method(staging.DefaultStager, "stage", staged),
        replaced_method(staging.BlockingAsyncStager, "stage", staged),
    ):
        yield
