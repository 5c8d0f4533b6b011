"""A training step of a model, on one device and on ranks, for the gate of steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils import _pytree as pytree

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.models.inputs import Recipe, call, loss_of, make_batch, recipe_of
from mgpu_check.models.targets import build, parallelism_of
from mgpu_check.models.training_options import PARTS, Setting, adapt, autocast, optimizer_of, prepare, untie
from mgpu_check.models.traits import Traits, traits_of
from mgpu_check.models.ways import MICRO_BATCHES, divide, part_of, shard, way_of

_OF_REFERENCE = ("optimizer", "clipping", "frozen", "adapters", "autocast", "tied weights")
"""Options that change what one device computes."""


@dataclass(frozen=True)
class Training:
    """A model, its inputs, and the way and options to train it. It travels to the ranks."""

    target: str
    recipe: Recipe
    way: str
    setting: Setting = ()

    @property
    def reference(self) -> Training:
        """The training on one device: options that must not change a result are left out."""
        return replace(self, way="", setting=tuple(pair for pair in self.setting if pair[0] in _OF_REFERENCE))

    @property
    def program(self) -> Program:
        return Program(
            functools.partial({"pp": PipelineStep, "own": OwnStep}.get(self.way, Step), self),
            functools.partial(_built, self),
            functools.partial(make_batch, self.recipe),
            functools.partial(Reference, self.reference),
            single_process=way_of(self.way).single_process,
            gate="mgpu-check model",
        )


def _built(training: Training) -> nn.Module:
    model, options = build(training.target), dict(training.setting)
    model = untie(model) if "tied weights" in options else model
    return adapt(model) if "adapters" in options else model


def inspected(target: str, batch: str, loss: str) -> tuple[Recipe, Traits]:
    """Build the model in a rank, and return its inputs and its traits."""
    model = build(target)
    recipe = recipe_of(model, target, batch, loss)
    return recipe, traits_of(model, parallelism_of(target)[1])


class _Trainer:
    """The steps that one device and ranks have in common."""

    def __init__(self, training: Training, model: nn.Module, called: Any, foreach: bool | None = None) -> None:
        self.training, self.options, self.foreach = training, dict(training.setting), foreach
        self.model, self.called, self.steps = model, called, 0
        self.optimizer = optimizer_of(called.parameters(), self.options, foreach)
        if "compile" in self.options:
            self.called = torch.compile(called, backend="aot_eager")

    def train(self, rows: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
        """Train on the rows of this rank; return the mean loss before and after the step."""
        self.optimizer.zero_grad()
        loss = self.backward(rows, device)
        if "clipping" in self.options:
            own = getattr(self.called, "clip_grad_norm_", None)  # of FullyShardedDataParallel
            own(0.1) if own else nn.utils.clip_grad_norm_(self.called.parameters(), 0.1, foreach=self.foreach)
        self.optimizer.step()
        self.steps += 1
        self.model.eval()
        self.called.eval()
        with torch.no_grad():
            evaluation = self.evaluate(rows, device)
        self.model.train()
        self.called.train()
        return {"loss": loss, "evaluation": evaluation.detach()}

    def evaluate(self, rows: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        with autocast(device, self.options):
            return loss_of(self.training.recipe, call(self.called, rows), rows)

    def backward(self, rows: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        """Make the gradients; return the mean loss."""
        losses = []
        for share, micro_batch in _divided(rows, PARTS.get(self.options.get("accumulation", ""), (1,))):
            with autocast(device, self.options):
                loss = loss_of(self.training.recipe, call(self.called, micro_batch), micro_batch) * share
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def _divided(rows: Mapping[str, Any], shares: Sequence[int]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Yield micro-batches of samples, each with its share of them."""
    count = next(len(leaf) for leaf in pytree.tree_leaves(rows) if isinstance(leaf, torch.Tensor))
    sizes = [count * share // sum(shares) for share in shares]
    leaves, spec = pytree.tree_flatten(rows)
    parts = [leaf.split(sizes) if isinstance(leaf, torch.Tensor) else [leaf] * len(sizes) for leaf in leaves]
    for size, *own in zip(sizes, *parts, strict=True):
        yield size / count, pytree.tree_unflatten(own, spec)


class Reference(_Trainer):
    """The step on one device."""

    def __init__(self, training: Training, model: nn.Module) -> None:
        prepare(model, dict(training.setting))
        super().__init__(training, model.train(), model)

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        device = next(model.parameters()).device
        return self.train(pytree.tree_map_only(torch.Tensor, lambda value: value.to(device), batch), device)


class Step(_Trainer):
    """The step on a rank."""

    def __init__(self, training: Training, model: nn.Module, rank: Rank) -> None:
        self.way, options = way_of(training.way), dict(training.setting)
        model.to(rank.device).train()
        prepare(model, options)
        foreach = False if self.way.divides_parameters else None
        super().__init__(training, model, self.wrapped(training, model, rank), foreach)

    def wrapped(self, training: Training, model: nn.Module, rank: Rank) -> Any:
        """Divide the model, and return what is called in its place."""
        return self.way.wrap(model, rank, dict(training.setting))

    def __call__(self, model: nn.Module, batch: Any, rank: Rank) -> dict[str, torch.Tensor]:
        if self.steps == 1 and "state" in self.options:
            self._reload()
        part = part_of(self.way, rank)
        rows = pytree.tree_map_only(torch.Tensor, lambda value: shard(value, part).to(rank.device), batch)
        losses = self.train(rows, rank.device)
        return losses if self.way.single_process else {name: _mean(loss) for name, loss in losses.items()}

    def _reload(self) -> None:
        """Save the whole state, overwrite parameters and moments, and load it again."""
        whole = StateDictOptions(full_state_dict=True)
        state, moments = get_state_dict(self.called, self.optimizer, options=whole)
        state, moments = pytree.tree_map_only(torch.Tensor, torch.clone, (state, moments))
        with torch.no_grad():
            for parameter in self.called.parameters():
                parameter.zero_()
        set_state_dict(self.called, self.optimizer, model_state_dict=state, optim_state_dict=moments, options=whole)


class OwnStep(Step):
    """The step on a rank whose model the function of the user divides."""

    def wrapped(self, training: Training, model: nn.Module, rank: Rank) -> Any:
        parallelize, _ = parallelism_of(training.target)
        assert parallelize is not None
        called = parallelize(model, rank.mesh)
        return model if called is None else called


class PipelineStep(Step):
    """The step on a rank that has a stage of a pipeline."""

    def wrapped(self, training: Training, model: nn.Module, rank: Rank) -> Any:
        def loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
            return loss_of(training.recipe, call(model, batch), batch)

        batch = make_batch(training.recipe, 2 * MICRO_BATCHES)
        batch = pytree.tree_map_only(torch.Tensor, lambda value: value.to(rank.device), batch)
        self.schedule = divide(model, loss, batch, rank, dict(training.setting).get("schedule", "GPipe"))
        self.is_last, self.last = rank.index == rank.size - 1, rank.size - 1
        return model

    def backward(self, rows: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        return self._scheduled(self.schedule.step, rows, device)

    def evaluate(self, rows: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        return self._scheduled(self.schedule.eval, rows, device)

    def _scheduled(self, step: Any, rows: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        """Run all micro-batches; return their mean loss, which the last stage knows and sends to all."""
        losses: list[torch.Tensor] = []
        with autocast(device, self.options):
            # The schedule divides what it calls the target, too; the batch has the target of the model.
            ends = {"target": torch.zeros(MICRO_BATCHES, device=device), "losses": losses} if self.is_last else {}
            step(batch=rows, **ends)
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=device)
        dist.broadcast(loss, self.last)
        return loss


def _mean(loss: torch.Tensor) -> torch.Tensor:
    """Return the mean over all ranks; ranks with the same samples have the same loss."""
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()
