"""Compare models in `FullyShardedDataParallel` (FSDP1) with one device, bit for bit, on exact data.

Each pair of values of its options is tried.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.models import assert_same
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import GradientMismatch, ShardError
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.oracles.training.reference_training import Rows, one_device, own_part, own_results, sgd
from mgpu_check.suite.common.pairs import drawn_rows, near_square, words_of
from mgpu_check.suite.sharded.checkpoints import give_full_state, take_full_state
from mgpu_check.suite.sharded.fully_sharded import cast_by_hand, stepped
from mgpu_check.torch_hooks.tensors import copied

PREFIX = "_fsdp_wrapped_module."


_Row = Mapping[str, Any]
_DOUBLE = torch.float64
_DTYPES: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "float64": {"param_dtype": _DOUBLE, "reduce_dtype": _DOUBLE, "buffer_dtype": _DOUBLE},
    "reduced in float64": {"reduce_dtype": _DOUBLE, "cast_forward_inputs": True},
    "inputs not cast": {"param_dtype": _DOUBLE, "cast_root_forward_inputs": False},
    "gradients not cast": {"keep_low_precision_grads": True},
}
"""Policies of mixed precision. Float64 holds each value of float32, so results must have the bits of one device."""
_OPTIONS: Mapping[str, Sequence[Any]] = {
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
    "named": (True, False),
    "unsynchronized": (False, True),
    "ahead": (False, True),
    "dtypes": tuple(_DTYPES),
    "start": ("the same", "sync_module_states", "param_init_fn"),
    "process_group": (None, "world"),
    "ignored": (False, True),
    "hook": (False, True),
}
"""Options of FullyShardedDataParallel, the default first.

`start` is how ranks get the parameters: all build them, the first broadcasts them, or a function fills those of 'meta'.
`ignored` excludes the first layer, whose gradients the check reduces by itself.
"""
_AHEAD = {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_POST}
_WAYS: tuple[dict[str, Any], ...] = tuple(
    {**{name: values[0] for name, values in _OPTIONS.items()}, **chosen}
    for chosen in (
        {"unsynchronized": True, "ahead": "without limit"},
        {"strategy": "SHARD_GRAD_OP", "named": False},
        {"strategy": "HYBRID_SHARD"},
    )
)
"""Rows of options that are always tried."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warnings about worlds of one rank, where there is nothing to divide.
    Torch then takes another strategy: torch/distributed/fsdp/_init_utils.py, torch 2.13."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", message="(The|When using) `+NO_SHARD`")
        yield


def assert_flat_parameters_agree(training: ExactTraining, rank: Rank) -> None:
    """Assert that a model in `FullyShardedDataParallel` trains as on one device. A collective.

    The first step accumulates gradients over two micro-batches; one configuration skips the reduction after the first.
    FSDP divides gradients by the number of ranks, so the loss is multiplied by it. The norm from clipping must cover
    all gradients.
    """
    wanted = own_results(training, one_device(training), rank)
    with Findings() as findings, quiet():
        for row in _WAYS:
            subject = f"FullyShardedDataParallel with {words_of(row, _OPTIONS)}, on {rank.device}"
            model = _wrapped(training, rank, row)
            got = _trained(training, model, sgd(training, model), rank, row)
            norm = float(model.clip_grad_norm_(1e30))
            with findings.collected():
                assert_same(got, {name: wanted[name] for name in got}, subject, rank.index)
            with findings.collected():
                _judge_norm(norm, wanted, training.steps, subject, rank)
            with findings.collected():
                _judge_parts(model, training, rank, row, subject)


def _trained(
    training: ExactTraining, model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, rank: Rank, row: _Row
) -> dict[str, torch.Tensor]:
    got: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(training.batches(), 1):
        outputs = _step_of(model, optimizer, batch, rank, row, windows=2 if step == 1 else 1)
        got |= _whole_of(model, step, row) | {f"step {step}: outputs": copied(outputs)}
    return got


def _step_of(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, batch: Rows, rank: Rank, row: _Row, windows: int
) -> torch.Tensor:
    with contextlib.ExitStack() as held:

        def prepare(last: bool) -> None:
            if last:
                held.close()
            elif row["unsynchronized"]:
                held.enter_context(model.no_sync())

        return stepped(optimizer, model, own_part(batch, rank), windows, prepare, factor=rank.size)


def _whole_of(model: FullyShardedDataParallel, step: int, row: _Row) -> dict[str, torch.Tensor]:
    """Gather parameters, and gradients if they have names, as `reference_training.seen` names them. A collective."""
    tensors = {}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=row["named"]):
        for name, value in model.named_parameters():
            plain = name.replace(PREFIX, "")
            tensors[f"step {step}: {plain}"] = copied(value)
            if row["named"]:
                assert value.grad is not None, "all parameters are used"
                tensors[f"step {step}: gradient of {plain}"] = copied(value.grad)
    return tensors


def _judge_norm(norm: float, wanted: Mapping[str, torch.Tensor], step: int, subject: str, rank: Rank) -> None:
    gradients = [value.double() for name, value in wanted.items() if name.startswith(f"step {step}: gradient of ")]
    expected = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
    # Squares, sums and roots in float32 round once each: see `mgpu_check.numerics.reduction`.
    most = expected * 2.0**-23 * (sum(gradient.numel() for gradient in gradients) + 4)
    if not abs(norm - expected) <= most:
        text = f"clip_grad_norm_ gives a norm of {norm!r}, expected {expected!r} ± {most:.2g}"
        raise GradientMismatch(f"{subject}, rank {rank.index}: {text}", ranks=[rank.index])


def _judge_parts(model: FullyShardedDataParallel, training: ExactTraining, rank: Rank, row: _Row, subject: str) -> None:
    """Check how many elements of each layer's flat parameter this rank holds; torch pads the last parts."""
    if row["named"]:
        return
    got = [value.numel() for value in model.parameters()]
    totals = [sum(value.numel() for value in layer.parameters()) for layer in training.layers()]
    expected = [-(-count // rank.size) for count in totals]
    if got != expected:
        text = f"holds {got} elements of the layers, expected {expected} of {totals}"
        raise ShardError(f"{subject}, rank {rank.index}: {text}", ranks=[rank.index])


def assert_flat_states_agree(training: ExactTraining, rank: Rank) -> None:
    """Assert that full state dicts under `FullyShardedDataParallel` equal those of one device. A collective.
    A model with another configuration loads them, and must then train as on one device."""
    expected = one_device(training)
    before, after = _WAYS[0], _WAYS[1]
    subject = f"full state dict of FullyShardedDataParallel with {words_of(before, _OPTIONS)}, on {rank.device}"
    with Findings() as findings, quiet():
        model = _wrapped(training, rank, before)
        optimizer = sgd(training, model)
        _step_of(model, optimizer, training.batches()[0], rank, before, windows=1)
        state = take_full_state(training, model, optimizer, expected, findings, subject, rank)
        if findings.anywhere(rank):
            return  # rank 0 would broadcast the wrong state, and all ranks would report it again
        fresh = _wrapped(replace(training, seed=training.seed + 1), rank, after)
        fresh_optimizer = sgd(training, fresh)
        give_full_state(training, state, fresh, fresh_optimizer)
        _step_of(fresh, fresh_optimizer, training.batches()[1], rank, after, windows=1)
        got = _whole_of(fresh, 2, after)
        with findings.collected():
            assert_same(got, {name: expected[name] for name in got}, f"{subject}, loaded, then one step", rank.index)


def _together(row: _Row) -> bool:
    if row.get("ignored") and (
        row.get("dtypes") in ("float64", "inputs not cast") or row.get("start", "the same") != "the same"
    ):
        return False  # torch neither casts nor sends what it ignores
    if row.get("ignored") and row.get("hook"):
        return False
    # A world of one rank has no shards, and then torch does not cast gradients for a hook.
    return not (row.get("hook") and row.get("dtypes") in ("float64", "reduced in float64", "inputs not cast"))


def assert_flat_options_agree(training: ExactTraining, rank: Rank, *, more: bool) -> None:
    """Assert that a model in `FullyShardedDataParallel` trains as on one device with each pair of options.
    With `more` all rows of options are tried, else a sixth of them, by the seed of the training. A collective."""
    wanted = own_results(training, one_device(training), rank)
    with Findings() as findings, quiet():
        reached = rank.size == 1  # one rank has no shards to summon
        for row in drawn_rows(_OPTIONS, _together, seed=training.seed, more=more, share=6):
            subject = f"FullyShardedDataParallel with {words_of(row, _OPTIONS)}, on {rank.device}"
            model = _wrapped(training, rank, row)
            optimizer = sgd(training, model)
            if row["dtypes"] == "inputs not cast":
                cast_by_hand(model.module, optimizer, rank, subject, findings)
            before = optimizer.register_step_pre_hook(partial(_reduce_ignored, model, row, rank))
            got = _trained(training, model, optimizer, rank, row)
            got |= {name: value.float() for name, value in got.items() if name.endswith(": outputs")}
            before.remove()
            with findings.collected():
                assert_same(got, {name: wanted[name] for name in got}, subject, rank.index)
            if not reached and row["strategy"] != "NO_SHARD" and not row["ignored"]:
                reached = True
                _judge_access(model, optimizer, got, training, subject, findings, rank)
            if findings.enough(rank):
                break


def _wrapped(training: ExactTraining, rank: Rank, row: _Row) -> FullyShardedDataParallel:
    source, model = training.model(), training.model()
    options: dict[str, Any] = {"use_orig_params": row["named"], "device_id": rank.device}
    if row["strategy"] == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cuda", near_square(rank.size), mesh_dim_names=("repeat", "shard"))
    if row["ahead"] == "without limit":
        options["limit_all_gathers"] = False
    if row["start"] == "param_init_fn":
        values = dict(zip(map(id, model.modules()), source.modules(), strict=True))
        model = model.to("meta")
        options["param_init_fn"] = partial(_fill, values, rank.device)
    else:
        if row["start"] == "sync_module_states":
            options["sync_module_states"] = True
            with torch.no_grad():
                for value in model.parameters():
                    value.add_(rank.index)
        model = model.to(rank.device)
    if row["ahead"]:
        options |= _AHEAD
    if row["ignored"]:
        options["ignored_modules"] = [model[0]]
    wrapped = FullyShardedDataParallel(
        model,
        process_group=rank.group if row["process_group"] else None,
        sharding_strategy=ShardingStrategy[row["strategy"]],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=MixedPrecision(**_DTYPES[row["dtypes"]]) if _DTYPES[row["dtypes"]] else None,
        **options,
    )
    if row["hook"]:
        wrapped.register_comm_hook(rank, _mean)
    return wrapped


def _fill(values: Mapping[int, nn.Module], device: torch.device, module: nn.Module) -> None:
    """Give a module of 'meta' memory, and the values of its twin."""
    twin = values[id(module)]
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        for name, value in module.named_parameters(recurse=False):
            value.copy_(twin.get_parameter(name))


@torch.no_grad()
def _mean(rank: Rank, gradient: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """Average the gradients over the ranks: a communication hook, which gets `shard` if it is to divide the mean."""
    if shard is None:
        dist.all_reduce(gradient)
        gradient.div_(rank.size)
        return
    dist.reduce_scatter(shard, list(gradient.chunk(rank.size)))
    shard.div_(rank.size)


def _reduce_ignored(model: nn.Module, row: _Row, rank: Rank, *_: object) -> None:
    """Average the gradients of the first layer if the model ignores it, and it is not done."""
    if row["ignored"]:
        for name, value in model.named_parameters():
            if name.rpartition(".")[0].endswith("module.0") or name.startswith("0."):
                assert value.grad is not None, "each rank takes part in each micro-batch"
                dist.all_reduce(value.grad)
                value.grad.div_(rank.size)


def _judge_access(
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    got: Mapping[str, torch.Tensor],
    training: ExactTraining,
    subject: str,
    findings: Findings,
    rank: Rank,
) -> None:
    """Check the ways to reach parameters, norms and state of the trained model. A collective."""
    last = f"step {training.steps}: "
    expected = {name.removeprefix(last): value for name, value in got.items() if name.startswith(last)}

    def check(holds: bool, text: str) -> None:
        with findings.collected():
            if not holds:
                raise ShardError(f"{subject}, rank {rank.index}: {text}", ranks=[rank.index])

    modules: list[nn.Module] = []
    model.apply(modules.append)
    check(len(modules) == len(list(model.modules())), f"apply reached {len(modules)} modules")
    check(model.check_is_root(), "it says that it is not the root")
    check(FullyShardedDataParallel.fsdp_modules(model, root_only=True) == [model], "root_only finds other modules")
    gradients = [value for name, value in expected.items() if name.startswith("gradient of ")]
    for order in (1.0, float("inf")):
        norm = float(model.clip_grad_norm_(1e30, order))
        exact = torch.cat([value.double().reshape(-1) for value in gradients]).norm(order) if gradients else norm
        check(abs(norm - float(exact)) <= 1e-4 * float(exact), f"the {order}-norm is {norm}, expected {float(exact)}")
    summon = FullyShardedDataParallel.summon_full_params
    with torch.no_grad(), summon(model, rank0_only=True, offload_to_cpu=True, writeback=False):
        for name, value in model.named_parameters():
            name = name.replace(PREFIX, "")
            if rank.index == 0 and name in expected:
                same = value.is_cpu and torch.equal(copied(value), expected[name].float())
                check(same, f"{name} is summoned as {value}")
    for layer in FullyShardedDataParallel.fsdp_modules(model)[1:]:
        with summon(layer, recurse=False, writeback=True):
            for value in layer.parameters():
                value.detach().add_(1)
    for text in ("lost what was written to it", "kept what was written with writeback=False"):
        with summon(model, writeback=False):
            for name, value in model.named_parameters():
                name = name.replace(PREFIX, "")
                if name in expected:
                    check(torch.equal(copied(value), expected[name].float() + 1), f"{name} {text}")
                value.detach().add_(2)
    if training.momentum:
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        for entry in optimizer.state.values():
            entry["momentum_buffer"] = torch.zeros_like(entry["momentum_buffer"])
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
        loaded_state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        for name, entry in state["state"].items():
            same = torch.equal(copied(loaded_state[name]["momentum_buffer"]), copied(entry["momentum_buffer"]))
            check(same, f"the momentum of {name} was not loaded")
