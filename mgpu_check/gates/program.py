"""Call what the user hands to the gate."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mgpu_check.numerics.placement.declared import Placement
from mgpu_check.rank_side.rank import Rank

__all__ = [
    "Program",
    "Unusable",
    "bound",
    "bound_reference",
    "is_class",
    "modules_of",
    "name_of",
    "raise_unusable",
    "wants_world_size",
]


class Unusable(ValueError):
    """The user's function or batch does not fit what the gate needs of it."""


def raise_unusable(gate: str, failure: Exception) -> None:
    """Raise a ValueError if a rank has failed because of what the user hands to the gate."""
    if isinstance(failure.__cause__, Unusable):
        raise ValueError(f"{gate}: {failure.__cause__}") from None


@dataclass(frozen=True)
class Program:
    """The functions and options that the user gives.

    Attributes:
        step: ``step(model, batch, rank)``; or a class that is called with (model, rank) first.
        build: makes the model.
        batch: ``batch(n)``; None where batches are drawn.
        reference: ``reference(model, batch)`` on one device, or None.
        single_process: one process drives all devices, as with nn.DataParallel.
        gate: the function that the user has called, for messages.
        placement: which slices of which parameters ranks hold; see `numerics.placement.declared.by_user`.
        returned_by: the ranks whose returned values count: "last", or a function of coordinates in the mesh; None for all.
    """

    step: Callable[..., Any]
    build: Callable[[], Any]
    batch: Callable[[int], Any] | None
    reference: Callable[..., Any] | None = None
    single_process: bool = False
    gate: str = "assert_step_scales"
    placement: Placement = None
    returned_by: Callable[[Mapping[str, int]], bool] | str | None = None


def bound(step: Callable[..., Any], model: Any, rank: Rank) -> Callable[[Any], Any]:
    """Return what is to be called for each batch; call a class, or a partial of one, with (model, rank) first."""
    made = step(model, rank) if isinstance(_innermost(step), type) else step
    return lambda batch: made(model, batch, rank)


def bound_reference(reference: Callable[..., Any], model: Any, world_size: int) -> Callable[[Any], Any]:
    """Return the same of a reference, with the world size if it asks for that; a class is called with the model first."""
    given = {"world_size": world_size} if wants_world_size(reference) else {}
    made = reference(model) if is_class(reference) else reference
    return lambda batch: made(model, batch, **given)


def wants_world_size(reference: Callable[..., Any] | None) -> bool:
    """Return whether a reference has a parameter of that name."""
    if reference is None:
        return False
    called: Callable[..., Any] = vars(_innermost(reference))["__call__"] if is_class(reference) else reference
    return "world_size" in inspect.signature(called).parameters


def is_class(step: Callable[..., Any]) -> bool:
    """Return whether `step` makes the object that is called for each batch."""
    return isinstance(_innermost(step), type)


def name_of(step: Callable[..., Any]) -> str:
    """Return the name of a step in reports."""
    inner = _innermost(step)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _innermost(step: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(step, functools.partial):
        step = step.func
    return step


def modules_of(model: Any) -> dict[str, nn.Module]:
    """Return the modules by prefix of names; several where `build` returns several.

    Raises:
        Unusable: there is none, or one whose parameters have no values.
    """
    found: dict[str, nn.Module] = {}
    if isinstance(model, nn.Module):
        found = {"": model}
    elif isinstance(model, (Mapping, list, tuple)):
        several: Mapping[Any, Any] = model if isinstance(model, Mapping) else dict(enumerate(model))
        found = {f"{key}.": module for key, module in several.items() if isinstance(module, nn.Module)}
    if not found:
        raise Unusable(f"build() returned {type(model).__name__}; return an nn.Module, or a tuple or mapping of them")
    for prefix, module in found.items():
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise Unusable(f"build() returned a model with {prefix}{name} on meta; give its parameters values")
    return found
