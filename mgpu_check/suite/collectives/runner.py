"""Prepare collectives by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Runner", "of_one_tensor", "runner"]


@dataclass(frozen=True)
class Runner:
    """A collective that is ready to be called; `output` has its result, or None on ranks that get no result."""

    call: Callable[[], object]
    output: torch.Tensor | None


def runner(
    operation: str,
    reduction: str,
    given: torch.Tensor,
    group: dist.ProcessGroup | None,
    count: int,
    place: int,
    root: int,
) -> Runner:
    """Prepare a collective with new memory for its result.

    Args:
        given: as many elements as the largest tensor of this rank has.
        group: None for all ranks.
        count: the number of ranks in the group.
        place: the position of this rank in the group.
        root: the root, as a rank of the world.
    """
    part = given.numel() // count
    op = dist.ReduceOp.AVG if reduction == "avg" else getattr(dist.ReduceOp, reduction.upper())
    mine = dist.get_rank() == root
    if operation in ("all_reduce", "reduce", "broadcast"):
        whole = given.clone()
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, op=op, group=group),
            "reduce": lambda: dist.reduce(whole, root, op=op, group=group),
            "broadcast": lambda: dist.broadcast(whole, root, group=group),
        }
        return Runner(calls[operation], whole if mine or operation != "reduce" else None)
    if operation in ("reduce_scatter", "scatter"):
        small = given.new_empty(part)
        parts = _pieces(given, count) if mine and operation == "scatter" else None
        if operation == "reduce_scatter":
            return Runner(lambda: of_one_tensor("reduce_scatter")(small, given, op=op, group=group), small)
        return Runner(lambda: dist.scatter(small, parts, src=root, group=group), small)
    whole = torch.empty_like(given)
    if operation == "all_to_all":
        return Runner(lambda: dist.all_to_all_single(whole, given, group=group), whole)
    if operation == "all_gather":
        return Runner(lambda: of_one_tensor("all_gather")(whole, given[:part], group=group), whole)
    places = _pieces(whole, count) if mine else None
    return Runner(
        lambda: dist.gather(given[:part].contiguous(), places, dst=root, group=group), whole if mine else None
    )


def _pieces(whole: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(whole.chunk(count))


def of_one_tensor(operation: str) -> Callable[..., Any]:
    """Return the single-tensor form of a collective, under a name that this version of torch does not deprecate.

    Args:
        operation: "reduce_scatter" or "all_gather".
    """
    older = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}
    found: Callable[..., Any] = getattr(dist, f"{operation}_single", None) or getattr(dist, older[operation])
    return found
