"""Take and set state dicts, and save and load checkpoints, with each pair of values of their options.

The options are those of `StateDictOptions` and of `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.asserts.findings import Findings
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ShardError
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.oracles.training.reference_training import one_device, sgd
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.sharded.checkpoints import shared_directory, step_of
from mgpu_check.suite.sharded.fully_sharded import require, sharded
from mgpu_check.suite.sharded.redistribution import placed
from mgpu_check.torch_hooks.tensors import copied

_FROZEN = "0.bias"
_STEPS = 3
_NONE = torch.zeros(0)
_WAYS = (False, True)
_STATE_OPTIONS: Mapping[str, Sequence[Any]] = {
    "full_state_dict": _WAYS,
    "cpu_offload": _WAYS,
    "ignore_frozen_params": _WAYS,
    "strict": (True, False),
    "flatten_optimizer_state_dict": _WAYS,
    "dsd_fqn_modifiers": ("_fqn_modifiers", "_no_modifiers"),
    "apart": (True, False),
}
"""Options of state dicts, the default first, and whether the optimizer has calls of its own."""


def _state_options_together(row: Mapping[str, Any]) -> bool:
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
    name it. With `more` all rows of options are tried, else half of them, by the seed of the training.
    """
    expected = one_device(training)
    model = sharded(training, rank)
    step_of(training, 1, model, sgd(training, model), rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    for _ in range(_STEPS):
        optimizer.step()
    # Copies, because torch may keep the tensors of a state that is set.
    states = {name: _copies(optimizer.state[value]) for name, value in model.named_parameters()}
    model.get_parameter(_FROZEN).requires_grad_(False)
    with Findings() as findings:
        for row in drawn_rows(_STATE_OPTIONS, _state_options_together, seed=training.seed, more=more, share=2):
            subject = f"state dict with {words_of(row, _STATE_OPTIONS)}, on {rank.device}"
            options = StateDictOptions(**{name: value for name, value in row.items() if name != "apart"})
            parameters: Any
            moments: Any
            if row["apart"]:
                parameters = get_model_state_dict(model, options=options)
                moments = get_optimizer_state_dict(model, optimizer, options=options)
            else:
                parameters, moments = get_state_dict(model, optimizer, options=options)
            full_tensors = {name: _whole(value) for name, value in parameters.items()}
            kept = [name for name in states if not (row["ignore_frozen_params"] and name == _FROZEN)]
            judge, again = partial(require, findings, rank), f"{subject}, rank {rank.index}, set again"
            judge([*full_tensors] == kept, subject, f"has {[*full_tensors]}, expected {kept}")
            for name, value in full_tensors.items():
                same = same_bits(expected[f"step 1: {name}"].float(), value)
                judge(same, subject, f"{name} is {value}, not the value after the step")
                device_type = "cpu" if row["cpu_offload"] else rank.device.type
                on_device = parameters[name].device.type == device_type
                judge(on_device, subject, f"{name} is on {parameters[name].device}")
            fresh = sharded(replace(training, seed=training.seed + 1), rank)
            fresh_optimizer = torch.optim.Adam(fresh.parameters(), lr=0.0)
            fresh.get_parameter(_FROZEN).requires_grad_(False)
            omitted = [] if row["strict"] else [kept[-1]]
            inputs = {name: value for name, value in parameters.items() if name not in omitted}
            if row["apart"]:
                incompatible_keys = set_model_state_dict(fresh, inputs, options=options)
                set_optimizer_state_dict(fresh, fresh_optimizer, moments, options=options)
            else:
                incompatible_keys = set_state_dict(
                    fresh, fresh_optimizer, model_state_dict=inputs, optim_state_dict=moments, options=options
                )
            # Torch completes a full state by the model's own values.
            named = row["full_state_dict"] or {*incompatible_keys.missing_keys} - {_FROZEN} == {*omitted}
            judge(named, subject, f"{incompatible_keys.missing_keys} are missing, expected {omitted}")
            for name, value in fresh.named_parameters():
                if name in full_tensors and name not in omitted:
                    same = same_bits(full_tensors[name], _whole(value))
                    findings.require(same, f"{again}: {name} is another one", ranks=[rank.index])
                if value.requires_grad:  # torch sets no state of frozen parameters
                    state = _copies(fresh_optimizer.state[value])
                    wrong = [key for key, own in states[name].items() if not same_bits(own, state.get(key, _NONE))]
                    message = f"{again}: {', '.join(wrong)} of {name} is another one"
                    findings.require(not wrong, message, ranks=[rank.index])


def _copies(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies of the state of a parameter on this rank."""
    return {key: copied(tensor.to_local() if isinstance(tensor, DTensor) else tensor) for key, tensor in state.items()}


def _whole(value: Any) -> torch.Tensor:
    """Return all of a tensor on the CPU. A collective for DTensors of devices."""
    if isinstance(value, DTensor):
        moved: Any = value.to(value.device_mesh.device_type)
        value = moved.full_tensor()
    return copied(value)


_SAVED: Mapping[str, Sequence[Any]] = {
    "flatten_state_dict": (True, False),
    "flatten_sharded_tensors": (True, False),
    "dedup_replicated_tensors": (None, False, True),
    "dedup_save_to_lowest_rank": _WAYS,
    "enable_plan_caching": _WAYS,
}
"""Options of DefaultSavePlanner, the default first."""
_WRITTEN: Mapping[str, Sequence[Any]] = {
    "single_file_per_rank": (True, False),
    "sync_files": (True, False),
    "thread_count": (1, 3),
    "per_thread_copy_ahead": (10_000_000, 1),
    "cache_staged_state_dict": _WAYS,
    "overwrite": (True, False),
}
"""Options of FileSystemWriter, the default first."""
_CHECKPOINT_OPTIONS: Mapping[str, Sequence[Any]] = {
    **_SAVED,
    **_WRITTEN,
    "process_group": (None, "world"),
    "use_collectives": (True, False),
    "no_dist": _WAYS,
    "asynchronous": ("", "by its own stager", "by another stager"),
    "allow_partial_load": _WAYS,
}
"""Options of saving and loading, the default first. With `no_dist` each rank has a checkpoint of its own."""


def _checkpoint_options_together(row: Mapping[str, Any]) -> bool:
    """Return whether torch takes these options together."""
    if row.get("no_dist") and (row.get("process_group") or row.get("use_collectives") is False):
        return False
    if row.get("overwrite") is False and row.get("use_collectives") is False:
        return False  # a rank that comes late finds the checkpoint of the others
    # Plans are cached for the class of the planner, for any number of ranks, and sent to the coordinator. The
    # second save goes to the same directory.
    caching = row.get("enable_plan_caching")
    alone = row.get("no_dist") or row.get("use_collectives") is False
    return not (caching and (alone or row.get("overwrite") is False))


def assert_checkpoint_options_agree(rank: Rank, seed: int, *, more: bool) -> None:
    """Assert that each tensor is loaded as it was saved, with each pair of options. A collective.

    With `more` all rows of options are tried, else an eighth of them, by the seed.
    """
    directory = shared_directory(rank)
    with Findings() as findings:
        try:
            rows = drawn_rows(_CHECKPOINT_OPTIONS, _checkpoint_options_together, seed=seed, more=more, share=8)
            for number, row in enumerate(rows):
                subject = f"checkpoint with {words_of(row, _CHECKPOINT_OPTIONS)}, on {rank.device}, rank {rank.index}"
                path = Path(directory) / str(number) / (str(rank.index) if row["no_dist"] else "")
                with findings.collected():
                    _judge(_saved_and_loaded(path, row, rank, seed), _state(row, rank, seed, 1), subject, rank)
            dist.barrier(device_ids=[rank.device.index] if rank.device.type == "cuda" else None)
        finally:
            if rank.index == 0:
                shutil.rmtree(directory, ignore_errors=True)


def _state(row: Mapping[str, Any], rank: Rank, seed: int, factor: int) -> dict[str, Any]:
    """Return the values of a checkpoint times `factor`; with 0 they are the target of loading."""

    def numbers(*shape: int, start: int = 0) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return ((torch.arange(count) + seed + start).reshape(shape) % 97 + 1.0) * factor

    state: dict[str, Any] = {"own": numbers(5, start=7).to(rank.device)}
    if row["flatten_state_dict"]:  # only then torch changes numbers, and what is nested
        state |= {"number": 12 * factor, "nested": {"inner": {"values": numbers(4, start=3).to(rank.device)}}}
        state["nested"]["list"] = [numbers(2), 3 * factor]
    if row["no_dist"]:
        state["own"] += rank.index * factor
        return state
    line = init_device_mesh("cuda", (rank.size,))
    for name, shape, placement in (("by rows", (7, 3), Shard(0)), ("by columns", (2, 5), Shard(1))):
        state[name] = placed(numbers(*shape), [placement], line)
    state["on all"] = placed(numbers(3), [Replicate()], line)
    return state


def _saved_and_loaded(path: Path, row: Mapping[str, Any], rank: Rank, seed: int) -> dict[str, Any]:
    group = rank.group if row["process_group"] else None
    state = _state(row, rank, seed, 1)
    for _ in range(2 if row["enable_plan_caching"] else 1):
        options: dict[str, Any] = {
            "planner": DefaultSavePlanner(**{name: row[name] for name in _SAVED}),
            "storage_writer": FileSystemWriter(path, **{name: row[name] for name in _WRITTEN}),
            "process_group": group,
            "no_dist": row["no_dist"],
            "use_collectives": row["use_collectives"],
        }
        if not row["asynchronous"]:
            state_dict_saver.save(state, **options)
            continue
        if row["asynchronous"] == "by another stager":
            options["async_stager"] = BlockingAsyncStager()
        done: Any = state_dict_saver.async_save(state, **options)
        getattr(done, "upload_completion", done).result()
    loaded = _state(row, rank, seed, 0)
    if row["allow_partial_load"]:
        loaded["not saved"] = torch.ones(2, device=rank.device)
    planner = DefaultLoadPlanner(row["flatten_state_dict"], row["flatten_sharded_tensors"], row["allow_partial_load"])
    reader = FileSystemReader(path)
    state_dict_loader.load(loaded, storage_reader=reader, planner=planner, process_group=group, no_dist=row["no_dist"])
    if row["allow_partial_load"] and not bool((loaded.pop("not saved") == 1).all()):
        raise ShardError(f"{path.name}: an entry that was not saved was changed by loading", ranks=[rank.index])
    return loaded


def _judge(got: Any, expected: Any, subject: str, rank: Rank) -> None:
    if isinstance(expected, (dict, list)):
        if isinstance(expected, dict) and got.keys() != expected.keys():
            raise ShardError(f"{subject}: has the entries {[*got]}, expected {[*expected]}", ranks=[rank.index])
        for name, value in expected.items() if isinstance(expected, dict) else enumerate(expected):
            _judge(got[name], value, f"{subject}: {name}", rank)
        return
    if isinstance(expected, DTensor):
        got, expected = got.to_local(), expected.to_local()
    same = same_bits(expected.cpu(), got.cpu()) if isinstance(expected, torch.Tensor) else got == expected
    if not same:
        raise ShardError(f"{subject} is {got}, {expected} was saved", ranks=[rank.index])
