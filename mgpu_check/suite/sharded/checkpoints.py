"""Check that state dicts and checkpoints of sharded models are whole, bit for bit, at each world size.

They are taken and set with each pair of values of the options of `StateDictOptions`.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.asserts.findings import Findings, require
from mgpu_check.asserts.models import assert_same
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ShardError
from mgpu_check.numerics.steps import full_precision
from mgpu_check.oracles.pairs import drawn_rows, near_square, words_of
from mgpu_check.oracles.training import training_steps as recipe
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.oracles.training.reference_training import gathered, one_device, own_part, sgd
from mgpu_check.suite.sharded.fully_sharded import scale_of, sharded
from mgpu_check.suite.sharded.redistribution import placed
from mgpu_check.torch_hooks.tensors import copied, name_of, plain

_NUMBER = 12_345
_MEANWHILE = "meanwhile"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def step_of(
    training: ExactTraining, number: int, model: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank
) -> None:
    """Train for one step with the sum of all ranks' gradients; the loss cancels the factor of `scale_of`."""
    x, y = own_part(training.batches()[number - 1], rank)
    optimizer.zero_grad()
    with full_precision():
        (recipe.weighted(model(x), y) / scale_of(rank.size)).backward()
    optimizer.step()


def assert_state_dict_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that full state dicts of a sharded model and its optimizer equal those of one device. A collective.
    Rank 0 then broadcasts them to a fresh model, which must train on as one device does."""
    subject = f"full state dict on {rank.device}"
    model = sharded(training, rank)
    buffers = _with_buffers(model, rank, 1)
    optimizer = sgd(training, model)
    step_of(training, 1, model, optimizer, rank)
    expected = one_device(training)
    with Findings() as findings:
        for layer in model.modules():
            if isinstance(layer, FSDPModule):
                layer.unshard()  # as between a forward and a backward pass
        _require_places(model, findings, subject, rank)
        expected_state = expected | {f"step 1: {name}": value for name, value in buffers.items()}
        state = take_full_state(training, model, optimizer, expected_state, findings, subject, rank)
        if findings.anywhere(rank):
            return  # rank 0 would broadcast the wrong state, and all ranks would report it again
        fresh = sharded(replace(training, seed=training.seed + 1), rank, memory_later=True)
        _with_buffers(fresh, rank, 0)
        fresh_optimizer = sgd(training, fresh)
        give_full_state(training, state, fresh, fresh_optimizer)
        loaded_buffers = {name: copied(value) for name, value in fresh.named_buffers()}
        step_of(training, 2, fresh, fresh_optimizer, rank)
        got = gathered(fresh, 2)
    assert_same(loaded_buffers | got, buffers | _after(expected, 2), f"{subject}, set again, then one step", rank.index)


def _require_places(model: nn.Module, findings: Findings, subject: str, rank: Rank) -> None:
    """Require that state dicts are on the documented device, that rank 0 alone has those that are whole and on the
    host, and that the others are sharded. A collective."""
    for full, offload in itertools.product((False, True), repeat=2):
        state_options = StateDictOptions(full_state_dict=full, cpu_offload=offload)
        state: dict[str, Any] = state_dicts.get_model_state_dict(model, options=state_options)
        device_type = "cpu" if offload else rank.device.type
        tensors = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
        elsewhere = sorted(name for name, value in tensors.items() if value.device.type != device_type)
        judge = partial(require, findings, rank)
        options = f"with full_state_dict={full} and cpu_offload={offload}"
        judge(not elsewhere, subject, f"{options} {', '.join(elsewhere)} are not on the {device_type} device")
        unsharded = [name for name, _ in model.named_parameters() if not full and not isinstance(state[name], DTensor)]
        judge(not unsharded, subject, f"{options} {', '.join(unsharded)} are not sharded")
        kept = not (full and offload) or rank.index == 0
        text = f"the state dict has {len(state)} entries, expected {'all' if kept else 'them on rank 0 only'}"
        judge(bool(state) == kept, subject, f"{options} {text}")


def _with_buffers(model: nn.Sequential, rank: Rank, factor: int) -> dict[str, torch.Tensor]:
    """Register buffers of several dtypes and shapes, times `factor`, on the last layer; return copies by name."""
    for dtype, shape in ((torch.float32, (7,)), (torch.bfloat16, (3, 5)), (torch.int64, ()), (torch.bool, (4,))):
        values = (torch.arange(1, torch.Size(shape).numel() + 1) % 3 * factor).to(dtype).reshape(shape)
        model[-1].register_buffer(f"held_{len(shape)}_{name_of(dtype)}", values.to(rank.device))
    return {name: copied(value) for name, value in model.named_buffers()}


FullState = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Full state dicts of a model and its optimizer; empty on all ranks but 0."""


def take_full_state(
    training: ExactTraining,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    expected: Mapping[str, torch.Tensor],
    findings: Findings,
    subject: str,
    rank: Rank,
) -> FullState:
    """Return the full state dicts after the first step; rank 0 compares them with `expected`. A collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = state_dicts.get_model_state_dict(model, options=options)
    moments: dict[str, Any] = dict(state_dicts.get_optimizer_state_dict(model, optimizer, options=options))
    if rank.index:
        return {}, {}
    got = {f"step 1: {name}": copied(value) for name, value in state.items()}
    wanted = _after(expected, 1)
    if training.momentum:
        # The momentum of the first step is its gradient.
        momentum = {name: entry["momentum_buffer"] for name, entry in moments["state"].items()}
        got |= {f"step 1: gradient of {name}": copied(value) for name, value in momentum.items()}
    else:
        wanted = {name: value for name, value in wanted.items() if "gradient of" not in name}
    with findings.collected():
        assert_same(got, wanted, subject, 0)
    return state, moments


def give_full_state(
    training: ExactTraining, state: FullState, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load the full state dicts of rank 0 into a model and its optimizer on all ranks. A collective."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    parameters, moments = state
    state_dicts.set_model_state_dict(model, dict(parameters), options=options)
    if training.momentum:
        state_dicts.set_optimizer_state_dict(model, optimizer, dict(moments), options=options)


def _after(expected: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    names = [name for name in expected if name.startswith(f"step {step}: ") and "outputs" not in name]
    return {name: expected[name] for name in names}


def shared_directory(rank: Rank) -> str:
    """Make a temporary directory on rank 0, and return it on all ranks."""
    box: list[Any] = [tempfile.mkdtemp(prefix="mgpu_check_") if rank.index == 0 else None]
    dist.broadcast_object_list(box, src=0, device=rank.device)
    return str(box[0])


def saved_checkpoint(training: ExactTraining, rank: Rank) -> str:
    """Train for a step and save model and optimizer by `torch.distributed.checkpoint`. A collective.

    The state of the optimizer is saved twice: nested, and flattened after each group of parameters got its own rate.
    `async_save` saves other tensors while they change. The result is the directory of the checkpoint.
    """
    directory = shared_directory(rank)
    model = sharded(training, rank)
    optimizer = _in_groups(model, training, training.rate)
    step_of(training, 1, model, optimizer, rank)
    try:
        parameters, moments = state_dicts.get_state_dict(model, optimizer)
        _set_rates(optimizer, training.rate)
        flat = state_dicts.get_optimizer_state_dict(model, optimizer, options=_FLAT)
        state = {"model": parameters, "optimizer": moments, "flat": flat, **_others(rank, 1)}
        state_dict_saver.save(state, checkpoint_id=directory)
        meanwhile = _meanwhile(rank, 1)
        done = state_dict_saver.async_save(meanwhile, checkpoint_id=Path(directory) / _MEANWHILE)
        for value in meanwhile.values():
            value.fill_(-1)
        assert isinstance(done, Future), "async_save was given no stager of its own"
        done.result()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory


def _meanwhile(rank: Rank, factor: int) -> dict[str, torch.Tensor]:
    """Return tensors that only this rank has, times `factor`."""
    return {
        f"{label} of rank {rank.index}": torch.arange(1.0, 6.0, device=device) * (factor * (rank.index + 1))
        for label, device in (("device", rank.device), ("CPU", "cpu"))
    }


def _in_groups(model: nn.Module, training: ExactTraining, rate: float) -> torch.optim.SGD:
    values = list(model.parameters())
    groups = [{"params": [value for value in values if (value.dim() > 1) is is_weight]} for is_weight in (True, False)]
    return torch.optim.SGD(groups, lr=rate, momentum=training.momentum)


def _set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = rate / 2**number


def assert_checkpoint_continues(training: ExactTraining, directory: str, rank: Rank, saved_by: int) -> None:
    """Assert that a checkpoint of `saved_checkpoint` is whole at this world size, and training continues. A collective.

    The next step must give the results of one device, and the groups of parameters must have their saved rates. The
    directory is removed.
    """
    subject = f"checkpoint of {saved_by} ranks, loaded by {rank.size}, on {rank.device}"
    model = sharded(replace(training, seed=training.seed + 1), rank)
    # Loading works in place, so each state needs an optimizer of its own.
    optimizer, another = (_in_groups(model, training, 2 * training.rate) for _ in range(2))
    try:
        parameters, moments = state_dicts.get_state_dict(model, optimizer)
        flat = state_dicts.get_optimizer_state_dict(model, another, options=_FLAT)
        state: dict[str, Any] = {"model": parameters, "optimizer": moments, "flat": flat, **_others(rank, 0)}
        state_dict_loader.load(state, checkpoint_id=directory)
        # Each saving rank had its own tensors, and there may be more ranks now.
        meanwhile = _meanwhile(rank, 0) if rank.index < saved_by else {}
        state_dict_loader.load(meanwhile, checkpoint_id=Path(directory) / _MEANWHILE)
        refused = _refuses_what_was_not_saved(directory)
        dist.barrier(device_ids=[rank.device.index] if rank.device.type == "cuda" else None)
    finally:
        if rank.index == 0:
            shutil.rmtree(Path(directory), ignore_errors=True)
    state_dicts.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    expected = one_device(training)
    loaded = {}
    for name, value in model.named_parameters():
        assert isinstance(value, DTensor), "a sharded parameter is a DTensor"
        loaded[f"step 1: {name}"] = copied(value.full_tensor())
    with Findings() as findings:
        with findings.collected():
            assert_same(loaded, {name: expected[name] for name in loaded}, subject, rank.index)
        text = "a tensor that was not saved was loaded, expected an error that names it"
        findings.require(refused, f"{subject}, rank {rank.index}: {text}", ranks=[rank.index])
        others = _others(rank, 1)
        with findings.collected():
            _compare_others(state, others, subject, rank)
        with findings.collected():
            saved = _meanwhile(rank, 1) if meanwhile else {}
            assert_same(meanwhile, saved, f"{subject}, saved by async_save", rank.index)
        with findings.collected():
            state_dicts.set_optimizer_state_dict(model, another, state["flat"], options=_FLAT)
            _compare_flat(training, model, another, optimizer, subject, rank)
        step_of(training, 2, model, optimizer, rank)
        stepped = gathered(model, 2)
        with findings.collected():
            assert_same(stepped, _after(expected, 2), f"{subject}, then one step", rank.index)


def _compare_flat(
    training: ExactTraining,
    model: nn.Module,
    got: torch.optim.Optimizer,
    reference: torch.optim.Optimizer,
    subject: str,
    rank: Rank,
) -> None:
    """Compare rates and momentum of `got`, loaded from the flattened state, with the saved rates and `reference`."""
    prefix = f"{subject}, rank {rank.index}, flat state of the optimizer"
    like = _in_groups(model, training, training.rate)
    _set_rates(like, training.rate)
    rates, wanted = ([group["lr"] for group in optimizer.param_groups] for optimizer in (got, like))
    if rates != wanted:
        raise ShardError(f"{prefix}: groups have the rates {rates}, {wanted} were saved", ranks=[rank.index])
    for name, value in model.named_parameters():
        both = [optimizer.state[value].get("momentum_buffer") for optimizer in (got, reference)]
        own, should = (plain(each.to_local()) if isinstance(each, DTensor) else torch.zeros(0) for each in both)
        if not same_bits(should, own):
            text = f"the momentum of {name} differs from that of the nested state"
            raise ShardError(f"{prefix}: {text}", ranks=[rank.index])


def _refuses_what_was_not_saved(directory: str) -> bool:
    try:
        state_dict_loader.load({"not saved": torch.zeros(2)}, checkpoint_id=directory)
    except CheckpointException as refusal:
        return "not saved" in str(refusal)
    return False


def _compare_others(state: Mapping[str, Any], others: Mapping[str, Any], subject: str, rank: Rank) -> None:
    for name, wanted in others.items():
        got = state[name]
        if isinstance(wanted, torch.Tensor):
            own, should = (plain(value.to_local() if isinstance(value, DTensor) else value) for value in (got, wanted))
            differs = not same_bits(should, own)
            got, wanted = f"{own.flatten()[:4].tolist()}…", f"{should.flatten()[:4].tolist()}…"
        else:
            differs = got != wanted
        if differs:
            raise ShardError(f"{subject}, rank {rank.index}: {name} is {got}, {wanted} was saved", ranks=[rank.index])


def _others(rank: Rank, factor: int) -> dict[str, Any]:
    """Return the other values of the checkpoint, times `factor`; with 0 they are the target of loading."""
    line = init_device_mesh("cuda", (rank.size,))
    plane = init_device_mesh("cuda", near_square(rank.size))
    entries: dict[str, Any] = {"number": _NUMBER * factor, "text": "saved" * factor}
    entries["without dimensions"] = torch.tensor(1.0 * factor, dtype=torch.float64, device=rank.device)
    entries["held by all"] = (torch.arange(7.0) * factor).to(rank.device)
    grid = torch.arange(20.0, device=rank.device).mul(factor).view(4, 5)
    for name, view in (("saved", bool(factor)), ("loaded", not factor)):
        entries[f"transposed where it is {name}"] = grid.t() if view else grid.t().contiguous()
        entries[f"with gaps where it is {name}"] = grid.clone()[1:, ::2] if view else grid[1:, ::2].contiguous()
    for name, shape, dtype, mesh, placements in (
        ("int64 by rows", (11, 3), torch.int64, line, [Shard(0)]),
        ("int64 by few rows", (5, 3), torch.int64, line, [Shard(0)]),  # for pairs of parts that share one row
        ("bfloat16 by columns", (3, 13), torch.bfloat16, line, [Shard(1)]),
        ("float32 by both", (7, 9), torch.float32, plane, [Shard(0), Shard(1)]),
        ("float64 on all", (5, 2), torch.float64, line, [Replicate()]),
        ("uint8, large, by rows", (257, 256), torch.uint8, line, [Shard(0)]),
    ):
        values = ((torch.arange(torch.Size(shape).numel()).reshape(shape) * 5 + 1) % 113 * factor).to(dtype)
        entries[name] = placed(values, placements, mesh)
    return entries


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
                parameters = state_dicts.get_model_state_dict(model, options=options)
                moments = state_dicts.get_optimizer_state_dict(model, optimizer, options=options)
            else:
                parameters, moments = state_dicts.get_state_dict(model, optimizer, options=options)
            full_tensors = {name: _whole(value) for name, value in parameters.items()}
            kept = [name for name in states if not (row["ignore_frozen_params"] and name == _FROZEN)]
            judge, again = partial(require, findings, rank), f"{subject}, rank {rank.index}, set again"
            judge([*full_tensors] == kept, subject, f"has {[*full_tensors]}, expected {kept}")
            for name, value in full_tensors.items():
                same = same_bits(expected[f"step 1: {name}"].float(), value)
                judge(same, subject, f"{name} is {value}, not the value after the step")
                device_type = "cpu" if row["cpu_offload"] else rank.device.type
                judge(parameters[name].device.type == device_type, subject, f"{name} is on {parameters[name].device}")
            fresh = sharded(replace(training, seed=training.seed + 1), rank)
            fresh_optimizer = torch.optim.Adam(fresh.parameters(), lr=0.0)
            fresh.get_parameter(_FROZEN).requires_grad_(False)
            omitted = [] if row["strict"] else [kept[-1]]
            inputs = {name: value for name, value in parameters.items() if name not in omitted}
            if row["apart"]:
                incompatible_keys = state_dicts.set_model_state_dict(fresh, inputs, options=options)
                state_dicts.set_optimizer_state_dict(fresh, fresh_optimizer, moments, options=options)
            else:
                incompatible_keys = state_dicts.set_state_dict(
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
    return {key: copied(tensor.to_local() if isinstance(tensor, DTensor) else tensor) for key, tensor in state.items()}


def _whole(value: Any) -> torch.Tensor:
    """Return all of a tensor on the CPU. A collective for DTensors of devices."""
    if isinstance(value, DTensor):
        moved: Any = value.to(value.device_mesh.device_type)
        value = moved.full_tensor()
    return copied(value)
