"""Clipping and optimizers over shards: plain, ZeRO by hand, and torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from programs.divided.collectives import Grid
from programs.divided.drawing import Draw
from programs.divided.hand import Hand, Owned

__all__ = ["Plain", "Zero", "ZeroOfTorch", "groups_of", "made", "rate_of", "steps_here"]

COMBINED = ("tp", "pp", "ep")


def groups_of(program: Draw, named: Iterable[tuple[str, nn.Parameter]], lost: bool = False) -> list[dict[str, Any]]:
    """Parameter groups: weights of layers decay, biases, norms and positions do not."""
    every, how = list(named), program.optimizer
    if not how.groups or lost:
        return [{"params": [one for _, one in every], "weight_decay": how.decay}]
    spared = [name.endswith("bias") or "norm" in name or "positions" in name for name, _ in every]
    return [
        {"params": [one for (_, one), no in zip(every, spared, strict=True) if not no], "weight_decay": how.decay},
        {"params": [one for (_, one), no in zip(every, spared, strict=True) if no], "weight_decay": 0.0},
    ]


def rate_of(program: Draw, grid: Grid) -> float:
    plant, rate = program.plant, program.optimizer.rate
    if plant is not None and plant.name == "another learning rate" and grid.is_last(plant.axis):
        return 1.5 * rate
    return rate


def loses_groups(program: Draw, grid: Grid) -> bool:
    plant = program.plant
    return plant is not None and plant.name == "parameter groups lost" and grid.is_last(plant.axis)


def steps_here(program: Draw, grid: Grid) -> bool:
    plant = program.plant
    return plant is None or plant.name not in ("never steps", "stale replica") or not grid.is_last(plant.axis)


def kind_of(program: Draw, rate: float) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    how = program.optimizer
    if how.name == "SGD":
        return torch.optim.SGD, {"lr": rate, "momentum": how.momentum}
    return getattr(torch.optim, how.name), {"lr": rate}


def made(program: Draw, groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    kind, options = kind_of(program, rate)
    if program.way in ("dtensor", "fsdp2"):
        options["foreach"] = False  # which takes no plain tensors beside DTensors
    return kind([group for group in groups if group["params"]], **options)


class Plain:
    """Each rank steps what it has."""

    def __init__(self, hand: Hand) -> None:
        self.hand, self.program, self.grid = hand, hand.program, hand.grid
        groups = groups_of(
            self.program, ((one.name, one.parameter) for one in hand.owned), loses_groups(self.program, self.grid)
        )
        self.optimizer = made(self.program, groups, rate_of(self.program, self.grid))

    def zero_grad(self) -> None:
        for one in self.hand.owned:
            one.parameter.grad = None

    def step(self) -> None:
        self.hand.reduce_gradients()
        damage(self.hand, [(one, one.parameter.grad) for one in self.hand.owned])
        clip(self.hand, [(one.parameter.grad, 1 / self.hand.replicas(one, COMBINED)) for one in self.hand.owned])
        if steps_here(self.program, self.grid):
            self.optimizer.step()


class ZeroOfTorch(Plain):
    """An optimizer of torch that shards its own state over dp."""

    def __init__(self, hand: Hand) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.hand, self.program, self.grid = hand, hand.program, hand.grid
        kind, options = kind_of(self.program, rate_of(self.program, self.grid))
        groups = groups_of(
            self.program, ((one.name, one.parameter) for one in hand.owned), loses_groups(self.program, self.grid)
        )
        self.optimizer = ZeroRedundancyOptimizer(
            [group for group in groups if group["params"]],
            optimizer_class=kind,
            process_group=self.grid.group("dp"),
            **options,
        )

    def step(self) -> None:
        self.hand.reduce_gradients()
        damage(self.hand, [(one, one.parameter.grad) for one in self.hand.owned])
        clip(self.hand, [(one.parameter.grad, 1 / self.hand.replicas(one, COMBINED)) for one in self.hand.owned])
        before = [one.parameter.detach().clone() for one in self.hand.owned]
        self.optimizer.step()
        if not steps_here(self.program, self.grid):
            with torch.no_grad():
                for one, value in zip(self.hand.owned, before, strict=True):
                    one.parameter.copy_(value)


class Zero:
    """Each rank of dp has a part of each group in a flat buffer, and steps that; then all parts are gathered.

    Level 2 leaves no gradients but those of the parts.
    """

    def __init__(self, hand: Hand, level: int) -> None:
        self.hand, self.program, self.grid, self.level = hand, hand.program, hand.grid, level
        by_id = {id(one.parameter): one for one in hand.owned}
        groups = groups_of(
            self.program, ((one.name, one.parameter) for one in hand.owned), loses_groups(self.program, self.grid)
        )
        self.groups: list[list[Owned]] = [[by_id[id(one)] for one in group["params"]] for group in groups]
        self.groups = [group for group in self.groups if group]
        self.parts = [nn.Parameter(self._part(self._flat(group, "value"))) for group in self.groups]
        self.weights = [self._part(self._flat(group, "weight")) for group in self.groups]
        sharded = [
            {"params": [part], "weight_decay": group["weight_decay"]}
            for part, group in zip(self.parts, [group for group in groups if group["params"]], strict=True)
        ]
        self.optimizer = made(self.program, sharded, rate_of(self.program, self.grid))

    def _flat(self, group: Sequence[Owned], what: str) -> torch.Tensor:
        values = []
        for one in group:
            value = one.parameter.detach()
            if what == "gradient":
                value = one.parameter.grad
            elif what == "weight":
                value = torch.full_like(value, 1 / self.hand.replicas(one, COMBINED))
            values.append(value.flatten())
        flat = torch.cat(values)
        return nn.functional.pad(flat, (0, -len(flat) % self.grid.sizes["dp"]))

    def _part(self, flat: torch.Tensor) -> torch.Tensor:
        return self.grid.parts_of(flat, "dp", 0).clone()

    def zero_grad(self) -> None:
        for one in self.hand.owned:
            one.parameter.grad = None

    def step(self) -> None:
        hand, grid = self.hand, self.grid
        hand.reduce_gradients(without="dp" if self.level == 2 else "")
        if self.level == 1:
            damage(hand, [(one, one.parameter.grad) for one in hand.owned], but="dp")
        for group, part in zip(self.groups, self.parts, strict=True):
            flat = self._flat(group, "gradient")
            if self.level == 2 and grid.sizes["dp"] > 1:
                part.grad = torch.empty_like(part)
                dist.reduce_scatter_tensor(part.grad, flat, group=grid.group("dp"))
            else:
                part.grad = self._part(flat)
        parts = [(Owned("part", part, frozenset({"dp"})), part.grad) for part in self.parts]
        damage(hand, parts, only="dp" if self.level == 1 else "")
        clip(
            hand,
            [(part.grad, weight) for part, weight in zip(self.parts, self.weights, strict=True)],
            (*COMBINED, "dp"),
        )
        if self.level == 2:
            self.zero_grad()
        self.optimizer.step()
        if not steps_here(self.program, grid):
            for part in self.parts:
                grid.gathered(part.detach(), "dp", 0)
            return
        for group, part in zip(self.groups, self.parts, strict=True):
            flat = grid.gathered(part.detach(), "dp", 0)
            with torch.no_grad():
                for one in group:
                    count = one.parameter.numel()
                    one.parameter.copy_(flat[:count].view_as(one.parameter))
                    flat = flat[count:]


def damage(hand: Hand, gradients: Sequence[tuple[Owned, torch.Tensor]], only: str = "", but: str = "") -> None:
    """Do what is planted in gradients that are reduced.

    Args:
        only: mistakes of this axis are planted here; by default those of all axes except `but`.
    """
    plant, grid = hand.program.plant, hand.grid
    if plant is None or (only and plant.axis != only) or plant.axis == but:
        return
    if plant.name == "slice scaled" and grid.is_last(plant.axis):
        cut = [value for one, value in gradients if plant.axis in one.cut or plant.axis == "pp"]
        cut[int(plant.choice * len(cut))].mul_(plant.factor)
    elif plant.name == "scaled by the size of an axis":
        for _, value in gradients:
            value.mul_(float(grid.sizes[plant.axis]) ** (1 if plant.factor > 1 else -1))
    elif plant.name == "gradients of experts divided":
        for one, value in gradients:
            if "ep" in one.cut:
                value.div_(grid.sizes["ep"])


def clip(hand: Hand, gradients: Sequence[tuple[torch.Tensor, Any]], axes: tuple[str, ...] = COMBINED) -> None:
    """Clip by the norm of all shards.

    Args:
        gradients: each with its weight, which is below 1 if other ranks have it, too.
        axes: the axes along which ranks have other shards, or copies.
    """
    how, plant, grid = hand.program.optimizer, hand.program.plant, hand.grid
    if how.clip is None:
        return
    local = plant is not None and plant.name == "norm of the shards of one rank"
    together = [axis for axis in axes if not (local and plant.axis == axis)]
    total = sum((value.square() * share).sum() for value, share in gradients)
    norm = grid.summed(torch.as_tensor(total, device=grid.device).clone(), together).sqrt()
    factor = (how.clip / (norm + 1e-6)).clamp(max=1.0)
    for value, _ in gradients:
        value.mul_(factor)
