"""Take and set state dicts of a sharded model with each pair of values of StateDictOptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.asserts.findings import Findings
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.exact_training.cases import ExactTraining
from mgpu_check.suite.common.exact_training.reference import one_device, sgd
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.sharded.fully_sharded import sharded
from mgpu_check.suite.sharded.states import step_of
from mgpu_check.torch_hooks.tensors import copied

_FROZEN = "0.bias"
_STEPS = 3
_NONE = torch.zeros(0)
_WAYS = (False, True)
_OPTIONS: Mapping[str, Sequence[Any]] = {
    "full_state_dict": _WAYS,
    "cpu_offload": _WAYS,
    "ignore_frozen_params": _WAYS,
    "strict": (True, False),
    "flatten_optimizer_state_dict": _WAYS,
    "dsd_fqn_modifiers": ("_fqn_modifiers", "_no_modifiers"),
    "apart": (True, False),
}
"""Options of state dicts, the default first, and whether the optimizer has calls of its own."""


def _together(row: Mapping[str, Any]) -> bool:
    """Return whether each rank gets a state, and torch sets it."""
    if row.get("ignore_frozen_params") and row.get("strict", True):
        return False
    # Torch takes a full state that is flattened, and raises a KeyError when it is set.
    if row.get("flatten_optimizer_state_dict") and row.get("full_state_dict"):
        return False
    # The first rank alone gets a full state on the CPU: see `assert_state_dict_agrees`.
    return not (row.get("full_state_dict") and row.get("cpu_offload"))


def assert_state_options_agree(training: ExactTraining, rank: Rank, *, more: bool) -> None:
    """Assert that state dicts have the values of one device, and can be set again, with each pair. A collective.

    One parameter is frozen after the first step. The state is that of an Adam with the rate 0, which has counts of
    steps beside its tensors. Unless options are strict, an entry of the state is missing when it is set, and torch must
    name it.

    Args:
        more: whether to use all rows of options, or half of them, by the seed of the training.
    """
    expected = one_device(training)
    model = sharded(training, rank)
    step_of(training, 1, model, sgd(training, model), rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    for _ in range(_STEPS):
        optimizer.step()
    # Copies, because torch may keep the tensors of a state that is set.
    held = {name: _copies(optimizer.state[value]) for name, value in model.named_parameters()}
    model.get_parameter(_FROZEN).requires_grad_(False)
    with Findings() as findings:
        for row in drawn_rows(_OPTIONS, _together, seed=training.seed, more=more, share=2):
            what = f"state dict with {words_of(row, _OPTIONS)}, on {rank.device}, rank {rank.index}"
            options = StateDictOptions(**{name: value for name, value in row.items() if name != "apart"})
            parameters, moments = _taken(model, optimizer, options, apart=row["apart"])
            whole = {name: _whole(value) for name, value in parameters.items()}
            kept = [name for name in held if not (row["ignore_frozen_params"] and name == _FROZEN)]
            findings.require([*whole] == kept, f"{what}: has {[*whole]}, expected {kept}", ranks=[rank.index])
            for name, value in whole.items():
                right = same_bits(expected[f"step 1: {name}"].float(), value)
                findings.require(right, f"{what}: {name} is {value}, not the value after the step", ranks=[rank.index])
                place = "cpu" if row["cpu_offload"] else rank.device.type
                there = parameters[name].device.type == place
                findings.require(there, f"{what}: {name} is on {parameters[name].device}", ranks=[rank.index])
            fresh = sharded(replace(training, seed=training.seed + 1), rank)
            again = torch.optim.Adam(fresh.parameters(), lr=0.0)
            fresh.get_parameter(_FROZEN).requires_grad_(False)
            left = [] if row["strict"] else [kept[-1]]
            given = {name: value for name, value in parameters.items() if name not in left}
            if row["apart"]:
                found = set_model_state_dict(fresh, given, options=options)
                set_optimizer_state_dict(fresh, again, moments, options=options)
            else:
                found = set_state_dict(fresh, again, model_state_dict=given, optim_state_dict=moments, options=options)
            # Torch completes a full state by the model's own values.
            named = row["full_state_dict"] or {*found.missing_keys} - {_FROZEN} == {*left}
            findings.require(named, f"{what}: {found.missing_keys} are missing, expected {left}", ranks=[rank.index])
            for name, value in fresh.named_parameters():
                if name in whole and name not in left:
                    right = same_bits(whole[name], _whole(value))
                    findings.require(right, f"{what}, set again: {name} is another one", ranks=[rank.index])
                if value.requires_grad:  # torch sets no state of frozen parameters
                    state = _copies(again.state[value])
                    wrong = [key for key, one in held[name].items() if not same_bits(one, state.get(key, _NONE))]
                    message = f"{what}, set again: {', '.join(wrong)} of {name} is another one"
                    findings.require(not wrong, message, ranks=[rank.index])


def _taken(model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions, *, apart: bool) -> Any:
    """Return the state dicts of a model and its optimizer, by one call or by two."""
    if not apart:
        return get_state_dict(model, optimizer, options=options)
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)


def _copies(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies of the state of a parameter on this rank."""
    return {key: copied(one.to_local() if isinstance(one, DTensor) else one) for key, one in state.items()}


def _whole(value: Any) -> torch.Tensor:
    """Return all of a tensor on the CPU. A collective for DTensors of devices."""
    if isinstance(value, DTensor):
        moved: Any = value.to(value.device_mesh.device_type)
        value = moved.full_tensor()
    return copied(value)
