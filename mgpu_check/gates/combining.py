"""Combine the gradients of ranks after each backward pass, to see whether that makes a wrong step right."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.gates.holdings import parameters_of
from mgpu_check.gates.program import modules_of
from mgpu_check.gates.terms import around_backward
from mgpu_check.torch_hooks.collectives import recorder


def combining_gradients(
    model: Any, group: dist.ProcessGroup, names: Collection[str], how: str
) -> contextlib.AbstractContextManager[None]:
    """Give all ranks of a group the mean, or the sum, of their gradients of some parameters after each backward pass.

    A mean may be repeated without effect, so gradients that accumulate over several passes come out right.
    """
    return around_backward(then=lambda: recorder.aside(lambda: _combine(model, group, names, how == "mean")))


def _combine(model: Any, group: dist.ProcessGroup, names: Collection[str], mean: bool) -> None:
    held = {name: one for name, one in parameters_of(modules_of(model)) if name in names and not _is_dtensor(one)}
    shapes = {name: tuple(one.shape) for name, one in held.items()}
    of_ranks: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, shapes, group=group)
    for name, one in held.items():
        if any(others.get(name) != shapes[name] for others in of_ranks):
            continue  # ranks hold different slices, or a module that others lack
        gradient = torch.zeros_like(one) if one.grad is None else one.grad.detach().clone()
        dist.all_reduce(gradient, group=group)
        one.grad = gradient / len(of_ranks) if mean else gradient


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")
