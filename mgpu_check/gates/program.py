"""The functions that the user passes to a gate for steps: check them and their options, and call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.gate_arguments import check_tolerance, innermost
from mgpu_check.gates.run.switches import Switch
from mgpu_check.numerics.placement import Placement, check_placement
from mgpu_check.torch_hooks.nested import named_parameters


class Unusable(ValueError):
    """A function or batch of the user does not meet the needs of the gate."""


def raise_unusable(gate: str, failure: Exception) -> None:
    """Raise a ValueError if a rank failed because the user's functions cannot be used."""
    if isinstance(failure.__cause__, Unusable):
        raise ValueError(f"{gate}: {failure.__cause__}") from None


@dataclass(frozen=True)
class Program:
    """The functions and options of the user."""

    step: Callable[..., Any]  # ``step(model, batch, rank)``; or a class that is called with (model, rank) first
    build: Callable[[], Any]
    batch: Callable[[int], Any] | None  # ``batch(n)``; None if batches are drawn from a strategy
    reference: Callable[..., Any] | None = None  # ``reference(model, batch)`` on one device, or None
    single_process: bool = False  # whether one process drives all devices, as with nn.DataParallel
    gate: str = "assert_step_scales"  # the gate that the user called, for messages
    placement: Placement = None  # the slices of parameters that ranks hold; see `numerics.placement.by_user`
    # The ranks whose returned values count: "last", or a function of coordinates in the mesh; None for all.
    returned_by: Callable[[Mapping[str, int]], bool] | str | None = None
    switch: Switch | None = None  # an option that is turned on or off for the step; None for none


def bound(step: Callable[..., Any], model: Any, rank: Rank) -> Callable[[Any], Any]:
    """Return a function to call for each batch; a class, or a partial of one, is called with (model, rank) first."""
    instance = step(model, rank) if is_class(step) else step
    return lambda batch: instance(model, batch, rank)


def bound_reference(reference: Callable[..., Any], model: Any, world_size: int) -> Callable[[Any], Any]:
    """Return a function to call for each batch. A class is called with the model first.

    The world size is passed if the reference has a parameter `world_size`.
    """
    options = {"world_size": world_size} if wants_world_size(reference) else {}
    instance = reference(model) if is_class(reference) else reference
    return lambda batch: instance(model, batch, **options)


def wants_world_size(reference: Callable[..., Any] | None) -> bool:
    if reference is None:
        return False
    called = reference
    if is_class(reference):
        called = inspect.getattr_static(innermost(reference), "__call__")  # a base class may define it
    return "world_size" in inspect.signature(called).parameters


def is_class(step: Callable[..., Any]) -> bool:
    """Return whether `step` is a class, or a partial of a class, whose instance is called for each batch."""
    return isinstance(innermost(step), type)


def name_of(step: Callable[..., Any]) -> str:
    """Return the name for reports of a step, or of what a partial wraps: its `__name__`, or else that of its class."""
    inner = innermost(step)
    return str(getattr(inner, "__name__", type(inner).__name__))


def modules_of(model: Any) -> dict[str, nn.Module]:
    several = model if isinstance(model, Mapping) else dict(enumerate(model)) if isinstance(model, list | tuple) else {}
    modules = {f"{key}.": module for key, module in several.items() if isinstance(module, nn.Module)}
    if isinstance(model, nn.Module):
        modules = {"": model}
    if not modules:
        raise Unusable(f"build() returned {type(model).__name__}; return an nn.Module, or a tuple or mapping of them")
    for prefix, module in modules.items():
        for name, parameter in named_parameters(module):
            if parameter.is_meta:
                raise Unusable(f"build() returned a model with {prefix}{name} on meta; give its parameters values")
    return modules


_AS_IN = {
    "step": "step(model, batch, rank)",
    "build": "build() that makes the model",
    "batch": "batch(n) that makes n samples, or a strategy of batches",
    "reference": "reference(model, batch)",
}


def check_arguments(
    program: Program, observe: Collection[str], tolerance: float | Mapping[str, float] | None, max_examples: int | None
) -> None:
    gate = program.gate
    for name, example in _AS_IN.items():
        value = getattr(program, name)
        if value is not None and (not callable(value) or isinstance(value, nn.Module)):
            raise ValueError(f"{gate}: {name}={value!r:.80} is not a function; give a function, as in {example}")
    if isinstance(observe, str) or not isinstance(observe, Collection) or not set(observe) or set(observe) - set(KINDS):
        raise ValueError(f"{gate}: observe={observe!r}; choose some of {', '.join(KINDS)}")
    check_tolerance(gate, tolerance)
    check_placement(gate, program.placement)
    if program.returned_by not in (None, "last") and not callable(program.returned_by):
        raise ValueError(
            f'{gate}: returned_by={program.returned_by!r}; give "last", or a function of the coordinates of a rank'
        )
    if max_examples is not None and (type(max_examples) is not int or max_examples < 1):
        raise ValueError(f"{gate}: max_examples={max_examples!r}; give an integer of at least 1")
