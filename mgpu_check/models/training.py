"""A training step of a model, on one device and on ranks, for the gate of steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
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
from mgpu_check.models.targets import build
from mgpu_check.models.training_options import Setting, autocast, optimizer_of, prepare, untie
from mgpu_check.models.traits import Traits, traits_of
from mgpu_check.models.ways import part_of, shard, way_of

_OF_REFERENCE = ("optimizer", "clipping", "frozen", "autocast", "tied weights")
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
            functools.partial(Step, self),
            functools.partial(_built, self),
            functools.partial(make_batch, self.recipe),
            functools.partial(Reference, self.reference),
            single_process=way_of(self.way).single_process,
            gate="mgpu-check model",
        )


def _built(training: Training) -> nn.Module:
    model = build(training.target)
    return untie(model) if "tied weights" in dict(training.setting) else model


def inspected(target: str, batch: str, loss: str) -> tuple[Recipe, Traits]:
    """Build the model in a rank, and return its inputs and its traits."""
    model = build(target)
    recipe = recipe_of(model, target, batch, loss)
    return recipe, traits_of(model)


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
        recipe, losses = self.training.recipe, []
        self.optimizer.zero_grad()
        count = 2 if "accumulation" in self.options else 1
        for number in range(count):
            micro_batch = pytree.tree_map_only(torch.Tensor, functools.partial(shard, part=(number, count)), rows)
            with autocast(device, self.options):
                loss = loss_of(recipe, call(self.called, micro_batch), micro_batch)
            (loss / count).backward()
            losses.append(loss.detach())
        if "clipping" in self.options:
            own = getattr(self.called, "clip_grad_norm_", None)  # of FullyShardedDataParallel
            own(0.1) if own else nn.utils.clip_grad_norm_(self.called.parameters(), 0.1, foreach=self.foreach)
        self.optimizer.step()
        self.steps += 1
        self.model.eval()
        self.called.eval()
        with torch.no_grad(), autocast(device, self.options):
            evaluation = loss_of(recipe, call(self.called, rows), rows)
        self.model.train()
        self.called.train()
        return {"loss": torch.stack(losses).mean(), "evaluation": evaluation.detach()}


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
        super().__init__(training, model, self.way.wrap(model, rank, options), foreach)

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


def _mean(loss: torch.Tensor) -> torch.Tensor:
    """Return the mean over all ranks; ranks with the same samples have the same loss."""
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()
