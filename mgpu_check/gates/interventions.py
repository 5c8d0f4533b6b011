"""Change one call of the code under test, in a rank, for the time of a run: what makes a wrong step right is its cause."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgpu_check.gates.observing import observe
from mgpu_check.gates.operands import site
from mgpu_check.gates.program import Program
from mgpu_check.gates.scenario import Scenario
from mgpu_check.mistakes.observed import Change, Observation
from mgpu_check.numerics.steps import full_precision
from mgpu_check.rank_side.rank import Rank
from mgpu_check.torch_hooks.arguments import group_of
from mgpu_check.torch_hooks.collectives import Recorder
from mgpu_check.torch_hooks.forms import Form
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.torch_hooks.table import OPERATIONS

__all__ = ["run_changed", "run_noting_ranges"]

_OPS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


def run_changed(rank: Rank, program: Program, scenario: Scenario, change: Change) -> Observation:
    """Return the step on this rank, with one call of it changed."""
    with full_precision():
        return observe(rank, program, scenario, around=lambda model, batches: _changed(change, rank))


def run_noting_ranges(rank: Rank, program: Program, scenario: Scenario) -> dict[str, int]:
    """Return the lines of the code under test that call `torch.arange`, and how many numbers each has made at first."""
    found: dict[str, int] = {}
    with full_precision():
        observe(rank, program, scenario, digests=False, around=lambda model, batches: _with_arange(_noting(found)))
    return found


def _changed(change: Change, rank: Rank) -> contextlib.AbstractContextManager[None]:
    if change.kind == "shift":
        return _with_arange(_shifting(change, rank))
    return _with_calls(change)


@contextlib.contextmanager
def _with_calls(change: Change) -> Iterator[None]:
    """Change the collectives of one name that one line calls."""
    call = Recorder.call
    kept: list[torch.Tensor] = []

    def changed(
        recorder: Recorder, function: Callable[..., Any], form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if recorder._inside.depth or form.name != change.name or site(sys._getframe()) != change.site:
            return call(recorder, function, form, args, kwargs)
        if change.kind == "skip":
            return _done(form, args, kwargs)
        if change.kind == "new":
            operand = form.argument(form.operand, args, kwargs)
            before = kept[-change.value].clone() if len(kept) >= change.value else torch.zeros_like(operand)
            with torch.no_grad():
                operand.sub_(before)
                result = call(recorder, function, form, args, kwargs)
                if isinstance(result, dist.Work):
                    result.wait()
                operand.add_(before)
            kept.append(operand.detach().clone())
            return result
        if change.kind in ("group", "op"):
            name = form.group if change.kind == "group" else next(one for one in OPERATIONS if one in form.parameters)
            value = _group(change.value) if change.kind == "group" else _OPS[str(change.value)]
            args, kwargs = _with_argument(form, args, kwargs, name, value)
            return call(recorder, function, form, args, kwargs)
        group = group_of(form.argument(form.group, args, kwargs))
        size = len(group.ranks) if group is not None else 1
        result = call(recorder, function, form, args, kwargs)
        return _scaled(form, args, kwargs, result, 1 / size if change.kind == "divide" else float(size))

    with replaced(Recorder, "call", changed):
        yield


class _Done(dist.Work):
    """The handle of a collective that was left out."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def _done(form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = form.argument(form.operand, args, kwargs)
    if "self" in form.parameters:
        return given
    return _Done() if form.argument("async_op", args, kwargs) else None


def _group(index: Any) -> Any:
    """Return the group of this rank with this index; groups are in the order of their creation."""
    return list(c10d._world.pg_group_ranks)[int(index)]


def _with_argument(
    form: Form, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    position = form.parameters.index(name)
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, kwargs | {name: value}


def _scaled(form: Form, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, by: float) -> Any:
    if isinstance(result, torch.Tensor):
        return result * by
    if isinstance(result, dist.Work):
        result.wait()
    name = next((one for one in ("output", "output_tensor", form.operand) if one in form.parameters), "")
    value = form.argument(name, args, kwargs) if name else None
    for tensor in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(tensor, torch.Tensor) and tensor.dtype is not torch.bool:
            with torch.no_grad():
                tensor.copy_(tensor.double() * by if not tensor.is_floating_point() else tensor * by)
    return result


def _with_arange(
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> contextlib.AbstractContextManager[None]:
    return replaced(torch, "arange", around(torch.arange))


def _noting(found: dict[str, int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def around(arange: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            made = arange(*args, **kwargs)
            if where := site(sys._getframe()):
                found.setdefault(where, made.numel())
            return made

        return noted

    return around


def _shifting(change: Change, rank: Rank) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let one line count on where the ranks before this one end."""
    parts, order = change.value

    def around(arange: Callable[..., Any]) -> Callable[..., Any]:
        def shifted(*args: Any, **kwargs: Any) -> Any:
            made = arange(*args, **kwargs)
            if site(sys._getframe()) != change.site:
                return made
            index = rank.index % parts if order == "inner" else rank.index // max(1, rank.size // parts)
            return made + index * made.numel()

        return shifted

    return around
