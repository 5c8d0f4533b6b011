"""A training step of a model, on one device and on ranks, for the gate of steps."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario, mesh_of
from mgpu_check.models.inputs import Recipe, call, loss_of, make_batch, recipe_of
from mgpu_check.models.targets import build, parallelism_of
from mgpu_check.models.training_options import PARTS, Setting, adapt, autocast, optimizer_of, prepare, untie
from mgpu_check.models.traits import Traits, traits_of
from mgpu_check.models.ways import MICRO_BATCHES, context_of, divide, part_of, shard, way_of

_OF_REFERENCE = ("optimizer", "clipping", "frozen", "adapters", "autocast", "tied weights", "batch norm statistics")
"""Options that change what one device computes."""


@dataclass(frozen=True)
class Training:
    """A model, its inputs, and the way and options to train it. It travels to the ranks.

    Attributes:
        evaluates: whether a step returns the loss after it, too. If gradients differ, this loss is a consequence,
            which no rule of the diagnosis explains.
    """

    target: str
    recipe: Recipe
    way: str
    setting: Setting = ()
    evaluates: bool = True

    @property
    def reference(self) -> Training:
        """The training on one device: options that must not change a result are left out."""
        return replace(self, way="", setting=tuple(pair for pair in self.setting if pair[0] in _OF_REFERENCE))

    @property
    def program(self) -> Program:
        return Program(
            functools.partial({"pp": PipelineStep, "own": OwnStep, "cp": ContextStep}.get(self.way, Step), self),
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
        loss = self.update(rows, device)
        if not self.training.evaluates:
            return {"loss": loss}
        self.model.eval()
        self.called.eval()
        with torch.no_grad():
            evaluation = self.evaluate(rows, device)
        self.model.train()
        self.called.train()
        return {"loss": loss, "evaluation": evaluation.detach()}

    def update(self, rows: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        """Change the parameters by a step of the optimizer; return the mean loss before it."""
        self.optimizer.zero_grad()
        loss = self.backward(rows, device)
        if "clipping" in self.options:
            own = getattr(self.called, "clip_grad_norm_", None)  # of FullyShardedDataParallel
            own(0.1) if own else nn.utils.clip_grad_norm_(self.called.parameters(), 0.1, foreach=self.foreach)
        self.optimizer.step()
        self.steps += 1
        return loss

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
        losses = self.train(self.rows(batch, rank), rank.device)
        return losses if self.way.single_process else {name: _mean(loss) for name, loss in losses.items()}

    def rows(self, batch: Any, rank: Rank) -> Any:
        """Return the samples of this rank, on its device."""
        part = part_of(self.way, rank)
        return pytree.tree_map_only(torch.Tensor, lambda value: shard(value, part).to(rank.device), batch)

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


class ContextStep(Step):
    """The step on a rank that has a part of each sequence, as the Trainer of transformers does it."""

    def rows(self, batch: Any, rank: Rank) -> Any:
        inputs = {name: value.to(rank.device) for name, value in batch["inputs"].items()}
        labels = inputs["labels"]
        if "attention_mask" in inputs:
            raise ValueError("torch's ring attention takes no attention_mask")
        inputs["position_ids"] = torch.arange(labels.shape[1], device=rank.device).repeat(len(labels), 1)
        # The next token may be that of another rank.
        targets = inputs["shift_labels"] = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        return {"inputs": inputs | {"num_items_in_batch": int((targets != -100).sum()) / rank.size}}

    def backward(self, rows: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        with context_of(rows["inputs"]):
            return super().backward(rows, device)

    def evaluate(self, rows: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        with context_of(rows["inputs"]):
            return super().evaluate(rows, device)


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


class _Traffic(TorchDispatchMode):
    """Adds up the bytes of collectives, also of those that torch calls in C++, such as the reducer of DDP."""

    SEND_NOTHING = ("wait_tensor", "recv_", "recv_any_source_", "barrier")

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in self.SEND_NOTHING:
            leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            self.sent += max((leaf.numel() * leaf.element_size() for leaf in leaves), default=0)
        return result


def costs_of(program: Program, scenario: Scenario, rank: Rank) -> tuple[int, int]:
    """Train in a rank, and return the bytes that the second step takes: memory, and collectives.

    The memory is the highest peak of a device of this rank. A collective counts by its larger side, input or output.
    """
    if program.single_process:
        rank = replace(rank, size=scenario.world_size)
    if scenario.mesh:
        rank = replace(rank, mesh=mesh_of(rank, scenario.mesh))
    devices = range(rank.size) if program.single_process else (rank.device,)
    gc.collect()  # results of earlier calls
    before = max(map(torch.cuda.memory_allocated, devices))
    model = program.build()
    step = program.step(model, rank)
    rows = step.rows(make_batch(step.training.recipe, scenario.samples), rank)
    step.update(rows, rank.device)  # makes the state of the optimizer, and the buckets of DDP
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    with _Traffic() as traffic:
        step.update(rows, rank.device)
    return max(map(torch.cuda.max_memory_allocated, devices)) - before, traffic.sent


def _mean(loss: torch.Tensor) -> torch.Tensor:
    """Return the mean over all ranks; ranks with the same samples have the same loss."""
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()
