"""The steps of drawn programs, as `assert_step_scales` takes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from programs.divided.collectives import Grid
from programs.divided.drawing import LIBRARIES, Draw
from programs.divided.hand import MICRO_BATCHES, Hand
from programs.divided.layers import Transformer, batch_of, loss_of, token_losses
from programs.divided.libraries import Library
from programs.divided.optimizers import Plain, Zero, ZeroOfTorch, groups_of, made

__all__ = ["arguments_of"]


class ByHand:
    def __init__(self, program: Draw, model: Transformer, rank: Any) -> None:
        model.to(rank.device)
        if program.style == "rebuilt":
            model = copy.deepcopy(model)
        self.program, self.rank = program, rank
        self.grid = Grid(rank, program.mesh[0][0])
        self.hand = Hand(model, self.grid, program)
        kinds: dict[str, Callable[[Hand], Any]] = {
            "zero1": lambda hand: Zero(hand, 1),
            "zero2": lambda hand: Zero(hand, 2),
            "ZeroRedundancyOptimizer": ZeroOfTorch,
        }
        self.optimizer = kinds.get(program.way, Plain)(self.hand)

    def __call__(self, batch: Any) -> dict[str, torch.Tensor] | None:
        grid, hand = self.grid, self.hand
        tokens = batch[0].shape[0] * batch[0].shape[1]
        parts = []
        for part in batch:
            place, count = grid.places["dp"] * grid.sizes["ep"] + grid.places["ep"], grid.sizes["dp"] * grid.sizes["ep"]
            part = part.tensor_split(count)[place]
            parts.append(grid.parts_of(part, "cp", 1).to(self.rank.device))
        self.optimizer.zero_grad()
        loss = hand.train(*parts, tokens)
        self.optimizer.step()
        loss = grid.summed(loss.clone(), hand.loss_axes)
        if "returns on last" in self.program.options and grid.sizes["pp"] > 1:
            return {"loss": loss} if hand.last else None
        return {"loss": grid.summed(loss, ["pp"])}


class Alone:
    """Plain code for one device, without anything of what divides it."""

    def __init__(self, program: Draw, model: Transformer) -> None:
        self.program, self.model = program, model
        groups = groups_of(program, model.named_parameters())
        self.optimizer = made(program, groups, program.optimizer.rate)

    def __call__(self, model: Transformer, batch: Any) -> dict[str, torch.Tensor] | None:
        inputs, labels = batch
        tokens = inputs.shape[0] * inputs.shape[1]
        self.optimizer.zero_grad()
        loss_of(model, inputs, labels, tokens).backward()
        for parameter in model.parameters():  # of experts that no token has chosen
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.program.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.program.optimizer.clip)
        with torch.no_grad():
            loss = token_losses(model(inputs), labels) / tokens
        self.optimizer.step()
        return {"loss": loss} if self.program.returns_loss else None


def arguments_of(program: Draw) -> dict[str, Any]:
    """Return the arguments for `assert_step_scales`."""
    divided = Library if program.way in LIBRARIES else ByHand

    class Step:
        def __init__(self, model: Transformer, rank: Any) -> None:
            self.step = divided(program, model, rank)

        def __call__(self, model: Transformer, batch: Any, rank: Any) -> Any:
            return self.step(batch)

    class Reference:
        def __init__(self, model: Transformer) -> None:
            self.step = Alone(program, model)

        def __call__(self, model: Transformer, batch: Any) -> Any:
            return self.step(model, batch)

    def build() -> Transformer:
        return Transformer(program.shape)

    def batch(n: int) -> Any:
        return batch_of(program.shape, n)

    arguments: dict[str, Any] = {
        "step": Step,
        "build": build,
        "batch": batch,
        "sizes": None if "uneven" in program.options else sizes_of(program),
        "max_examples": program.examples,
    }
    if program.reference:
        arguments["reference"] = Reference
    if program.as_world:
        arguments["world_sizes"] = sorted({2, program.mesh[0][1]})
    else:
        arguments["meshes"] = [dict(program.mesh)]
    if program.size("pp") > 1 and "returns on last" in program.options:
        arguments["returned_by"] = "last"
    return arguments


def sizes_of(program: Draw) -> Any:
    """Samples that all ranks, and all micro-batches, can divide among themselves."""
    least = MICRO_BATCHES if program.size("pp") > 1 else 1
    from hypothesis import strategies as st

    return lambda world: st.integers(1, 2).map(lambda n: n * world * (2 if "interleaved" in program.options else least))
