"""Compare models in `FullyShardedDataParallel` (FSDP1) with one device, bit for bit, on exact data."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.models import assert_same
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import GradientMismatch, ShardError
from mgpu_check.numerics.steps import full_precision
from mgpu_check.suite.common.exact_training.cases import ExactTraining
from mgpu_check.suite.common.exact_training.reference import one_device, own_part, own_results, sgd
from mgpu_check.suite.common.meshes import near_square
from mgpu_check.suite.recipes import training_steps as recipe
from mgpu_check.suite.sharded.states import give_full_state, take_full_state
from mgpu_check.torch_hooks.tensors import copied

PREFIX = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class Way:
    """A configuration of `FullyShardedDataParallel`.

    Attributes:
        strategy: a member of `ShardingStrategy`.
        named: parameters keep their names and shapes (``use_orig_params``), so each has a gradient of its own.
        unsynchronized: the first micro-batch runs under ``no_sync``.
        ahead: the parameters of the next layer are fetched while a layer computes, in both passes.
    """

    strategy: str
    named: bool = True
    unsynchronized: bool = False
    ahead: bool = False

    def __str__(self) -> str:
        said = (self.strategy, "named" * self.named, "no_sync" * self.unsynchronized, "fetched ahead" * self.ahead)
        return "FullyShardedDataParallel, " + ", ".join(word for word in said if word)


_WAYS = (Way("FULL_SHARD", unsynchronized=True, ahead=True), Way("SHARD_GRAD_OP", named=False), Way("HYBRID_SHARD"))


def _wrapped(training: ExactTraining, rank: Rank, way: Way) -> FullyShardedDataParallel:
    """Return the model of a training on the device of `rank`, with each linear layer and the whole model wrapped."""
    options: dict[str, Any] = {"use_orig_params": way.named, "device_id": rank.device}
    if way.ahead:
        options |= {
            "forward_prefetch": True,
            "limit_all_gathers": False,
            "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        }
    if way.strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cuda", near_square(rank.size), mesh_dim_names=("repeat", "shard"))
    return FullyShardedDataParallel(
        training.model().to(rank.device),
        sharding_strategy=ShardingStrategy[way.strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        **options,
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warnings about worlds of one rank, where there is nothing to divide."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", message="(The|When using) `+NO_SHARD`")
        yield


def assert_flat_parameters_agree(training: ExactTraining, rank: Rank) -> None:
    """Assert that a model in `FullyShardedDataParallel` trains as on one device. A collective.

    The configurations free parameters after the forward pass, keep them until the backward pass, fetch them ahead, and
    repeat shards over one dimension of a mesh. The first step accumulates gradients over two micro-batches; one
    configuration skips the reduction after the first. FSDP divides gradients by the number of ranks, so the loss is
    multiplied by it. The norm from clipping must cover all gradients.
    """
    expected = one_device(training)
    wanted = own_results(training, expected, rank)
    with Findings() as findings, quiet():
        for way in _WAYS:
            what = f"{way}, on {rank.device}"
            model = _wrapped(training, rank, way)
            optimizer = sgd(training, model)
            got: dict[str, torch.Tensor] = {}
            for step, batch in enumerate(training.batches(), 1):
                outputs = step_of(
                    model, optimizer, own_part(batch, rank), rank.size, way, windows=2 if step == 1 else 1
                )
                got |= whole_of(model, step, way) | {f"step {step}: outputs": copied(outputs)}
            norm = float(model.clip_grad_norm_(1e30))
            with findings.collected():
                assert_same(got, {name: wanted[name] for name in got}, what, rank.index)
            with findings.collected():
                _judge_norm(norm, wanted, training.steps, what, rank)
            with findings.collected():
                _judge_parts(model, training, rank, way, what)


def step_of(
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    part: tuple[torch.Tensor, torch.Tensor],
    size: int,
    way: Way,
    windows: int,
) -> torch.Tensor:
    """Train for one step with gradients accumulated over `windows` micro-batches; return the outputs."""
    x, y = part
    optimizer.zero_grad()
    outputs: list[torch.Tensor] = []
    with full_precision():
        for rows in recipe.split(torch.arange(len(x), device=x.device), windows):
            last = len(outputs) == windows - 1
            with model.no_sync() if way.unsynchronized and not last else contextlib.nullcontext():
                outputs.append(model(x[rows]))
                (recipe.weighted(outputs[-1], y[rows]) * size).backward()
        optimizer.step()
    return torch.cat(outputs)


def whole_of(model: FullyShardedDataParallel, step: int, way: Way) -> dict[str, torch.Tensor]:
    """Gather parameters, and gradients if they have names, under the names of `checks.exact_training.seen`.

    A collective.
    """
    found = {}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=way.named):
        for name, value in model.named_parameters():
            plain = name.replace(PREFIX, "")
            found[f"step {step}: {plain}"] = copied(value)
            if way.named:
                assert value.grad is not None, "all parameters are used"
                found[f"step {step}: gradient of {plain}"] = copied(value.grad)
    return found


def _judge_norm(norm: float, wanted: Mapping[str, torch.Tensor], step: int, what: str, rank: Rank) -> None:
    gradients = [value.double() for name, value in wanted.items() if name.startswith(f"step {step}: gradient of ")]
    right = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
    # Squares, sums and roots in float32 round once each: see `mgpu_check.numerics.bounds`.
    most = right * 2.0**-23 * (sum(gradient.numel() for gradient in gradients) + 4)
    if not abs(norm - right) <= most:
        raise GradientMismatch(
            f"{what}, rank {rank.index}: clip_grad_norm_ gives a norm of {norm!r}, expected {right!r} ± {most:.2g}",
            ranks=[rank.index],
        )


def _judge_parts(model: FullyShardedDataParallel, training: ExactTraining, rank: Rank, way: Way, what: str) -> None:
    """Check how many elements of each layer's flat parameter this rank holds; torch pads the last parts."""
    if way.named:
        return
    got = [value.numel() for value in model.parameters()]
    whole = [sum(value.numel() for value in layer.parameters()) for layer in training.layers()]
    right = [-(-count // rank.size) for count in whole]
    if got != right:
        raise ShardError(
            f"{what}, rank {rank.index}: holds {got} elements of the layers, expected {right} of {whole}",
            ranks=[rank.index],
        )


def assert_flat_states_agree(training: ExactTraining, rank: Rank) -> None:
    """Assert that full state dicts under `FullyShardedDataParallel` equal those of one device. A collective.

    A model with another configuration loads the state dicts of model and optimizer, and must then train as on one
    device.
    """
    expected = one_device(training)
    before, after = _WAYS[0], _WAYS[1]
    what = f"full state dict of {before}, on {rank.device}"
    with Findings() as findings, quiet():
        model = _wrapped(training, rank, before)
        optimizer = sgd(training, model)
        step_of(model, optimizer, own_part(training.batches()[0], rank), rank.size, before, windows=1)
        state = take_full_state(training, model, optimizer, expected, findings, what, rank)
        if findings.anywhere(rank):
            return  # rank 0 would broadcast the wrong state, and all ranks would report it again
        fresh = _wrapped(replace(training, seed=training.seed + 1), rank, after)
        again = sgd(training, fresh)
        give_full_state(training, state, fresh, again)
        step_of(fresh, again, own_part(training.batches()[1], rank), rank.size, after, windows=1)
        got = whole_of(fresh, 2, after)
        with findings.collected():
            assert_same(got, {name: expected[name] for name in got}, f"{what}, loaded, then one step", rank.index)
