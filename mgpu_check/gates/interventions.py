"""Change one call of the code under test during one run: if a wrong step is then right, it is the cause."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from mgpu_check.diagnosis.observed import Change, ObservedRun, Term
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.combining import combining_gradients
from mgpu_check.gates.observing import observe
from mgpu_check.gates.operands import site
from mgpu_check.gates.program import Program
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.terms import Paths, noting_terms, scaling_term
from mgpu_check.numerics.steps import full_precision
from mgpu_check.torch_hooks.arguments import group_of, own_groups
from mgpu_check.torch_hooks.collectives import Recorder
from mgpu_check.torch_hooks.forms import Form
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.torch_hooks.table import COLLECTIVES, OPERATIONS

_OPS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
_OUTPUTS = tuple(dict.fromkeys(row.taken for row in COLLECTIVES.values() if row.taken and row.taken != row.operand))
"""Parameters that collectives write their results to; collectives without such a parameter overwrite the operand."""
_ADDING = ("add", "add_", "__add__", "__iadd__", "__radd__")


def run_changed(rank: Rank, program: Program, scenario: Scenario, change: Change) -> ObservedRun:
    with full_precision():
        return observe(rank, program, scenario, around=lambda model, batches: _changed(change, rank, model))


def run_noting_ranges(rank: Rank, program: Program, scenario: Scenario) -> dict[str, Range]:
    """Return the lines that call `torch.arange` or slice a parameter, each with its first range."""
    noting = _NotingRanges()
    with full_precision():
        observe(rank, program, scenario, digests=False, around=lambda model, batches: _noting(noting))
    return noting.slices | {line: Range(len(values), first) for line, (values, first) in noting.found.items()}


def part_of(shift: Change, rank: int, size: int) -> int:
    """Return the index of the part of a range that a rank has."""
    parts, order = shift.value
    return int(rank % parts if order == "inner" else rank // max(1, size // parts))


def run_noting_terms(rank: Rank, program: Program, scenario: Scenario) -> list[Term]:
    found: dict[tuple[str, Paths], Term] = {}
    with full_precision():
        observe(rank, program, scenario, digests=False, around=lambda model, batches: noting_terms(model, found))
    return list(found.values())


def _changed(change: Change, rank: Rank, model: Any) -> contextlib.AbstractContextManager[None]:
    if change.kind == "combine":
        index, names, how = change.value
        return combining_gradients(model, _group(index), names, how)
    if change.kind == "term":
        return scaling_term(*change.value)
    if change.kind == "shift":
        return _Shifting(change, rank)
    return _with_calls(change)


@contextlib.contextmanager
def _with_calls(change: Change) -> Iterator[None]:
    """Change the collectives of one name that one line calls, or those of several lines."""
    lines = change.value if change.kind == "wait" else ((change.name, change.site),)
    call, apply = Recorder.call, torch.autograd.Function.__dict__["apply"]
    alter = _ALTERED.get(change.kind)
    kept: list[torch.Tensor] = []
    sizes: list[int] = []  # group sizes of changed collectives, one per running autograd function

    def changed(
        recorder: Recorder, function: Callable[..., Any], form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if recorder._inside.depth or (form.name, site(sys._getframe())) not in lines:
            return call(recorder, function, form, args, kwargs)
        if change.kind == "wait":
            result = call(recorder, function, form, args, kwargs)
            if isinstance(result, dist.Work):
                result.wait()
            return result
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
        if alter is None:
            name = form.group if change.kind == "group" else next(one for one in OPERATIONS if one in form.parameters)
            value = _group(change.value) if change.kind == "group" else _OPS[str(change.value)]
            args, kwargs = _with_argument(form, args, kwargs, name, value)
            return call(recorder, function, form, args, kwargs)
        group = group_of(form.argument(form.group, args, kwargs))
        size = len(group.ranks) if group is not None else 1
        result = call(recorder, function, form, args, kwargs)
        if sizes:
            sizes[-1] = size
            return result
        return _with_results(form, args, kwargs, result, lambda tensors: alter(tensors, size, change.value))

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Alter the result of an autograd function, not of its collective: autograd then changes gradients too."""
        sizes.append(0)
        try:
            result = apply.__func__(cls, *args, **kwargs)
        finally:
            size = sizes.pop()
        if not size or alter is None:
            return result
        several = isinstance(result, (list, tuple))
        tensors = alter(list(result) if several else [result], size, change.value)
        return type(result)(tensors) if several else tensors[0]

    with replaced(Recorder, "call", changed), replaced(torch.autograd.Function, "apply", classmethod(applied)):
        yield


def _multiplied(tensors: list[torch.Tensor], by: float) -> list[torch.Tensor]:
    return [
        one if one.dtype is torch.bool else (one if one.is_floating_point() else one.double()) * by for one in tensors
    ]


def _reordered(tensors: list[torch.Tensor], size: int, pieces: int) -> list[torch.Tensor]:
    """Put the first pieces of all ranks first, then the second ones, if the rows divide into pieces."""
    rows = sum(map(len, tensors))
    if rows % (size * pieces):
        return tensors
    whole = torch.cat(tensors).unflatten(0, (size, pieces, -1)).transpose(0, 1).flatten(0, 2)
    return list(whole.split([len(one) for one in tensors]))


_ALTERED: dict[str, Callable[[list[torch.Tensor], int, Any], list[torch.Tensor]]] = {
    "divide": lambda tensors, size, value: _multiplied(tensors, 1 / size),
    "multiply": lambda tensors, size, value: _multiplied(tensors, float(size)),
    "reorder": _reordered,
}
"""By kind of change: a function from the results of a collective, the group size and a value to the changed results."""


class _Settled(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def _done(form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = form.argument(form.operand, args, kwargs)
    if "self" in form.parameters:
        return given
    return _Settled() if form.argument("async_op", args, kwargs) else None


def _group(index: Any) -> Any:
    return own_groups()[int(index)]


def _with_argument(
    form: Form, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    position = form.parameters.index(name)
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, kwargs | {name: value}


def _with_results(
    form: Form,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    alter: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> Any:
    if isinstance(result, torch.Tensor):
        return alter([result])[0]
    if isinstance(result, dist.Work):
        result.wait()
    value = next((one for name in _OUTPUTS if (one := form.argument(name, args, kwargs)) is not None), None)
    if value is None:
        value = form.argument(form.operand, args, kwargs)
    tensors = list(value) if isinstance(value, (list, tuple)) else [value]
    if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        with torch.no_grad():
            for tensor, new in zip(tensors, alter(tensors), strict=True):
                tensor.copy_(new)
    return result


class _AroundRanges(TorchFunctionMode):
    """Watches calls of `arange` in the code under test, by any name or method, and slices of parameters."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__getitem__" and isinstance(args[0], nn.Parameter):
            place, line = _place_of_slice(args[1]), site(sys._getframe())
            if place is not None and line:
                args = args[0], self.sliced(line, args[1], place)
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "arange":
            line = site(sys._getframe())
            return self.made(line, result) if line else result
        self.called(func, args, result)
        return result

    def made(self, line: str, values: torch.Tensor) -> torch.Tensor:
        return values

    def sliced(self, line: str, index: Any, place: int) -> Any:
        return index

    def called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        pass


def _place_of_slice(index: Any) -> int | None:
    """Return the place of the one slice with an end in an index of a tensor; None if there is not just one."""
    parts = index if isinstance(index, tuple) else (index,)
    found = [place for place, part in enumerate(parts) if isinstance(part, slice) and isinstance(part.stop, int)]
    return found[0] if len(found) == 1 and parts[found[0]].step is None else None


def _slice_in(index: Any, place: int) -> tuple[int, int]:
    """Return the first row of a slice in an index, and the row where it ends."""
    part = index[place] if isinstance(index, tuple) else index
    return part.start or 0, part.stop


@dataclass(frozen=True)
class Range:
    """A range that a line makes.

    Attributes:
        first: the first number, including an offset that is added to the range later.
        name: "arange", or "slice" for the rows of a parameter that the line takes.
    """

    length: int
    first: float
    name: str = "arange"


class _NotingRanges(_AroundRanges):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[torch.Tensor, float]] = {}
        self.slices: dict[str, Range] = {}

    def sliced(self, line: str, index: Any, place: int) -> Any:
        first, end = _slice_in(index, place)
        if 0 <= first < end:
            self.slices.setdefault(line, Range(end - first, first, "slice"))
        return index

    def made(self, line: str, values: torch.Tensor) -> torch.Tensor:
        if values.numel():
            self.found.setdefault(line, (values, float(values[0])))
        return values

    def called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if getattr(func, "__name__", "") not in _ADDING or not isinstance(result, torch.Tensor):
            return
        for line, (values, _) in self.found.items():
            if any(one is values for one in args) and result.shape == values.shape:
                self.found[line] = values, float(result[0])


@contextlib.contextmanager
def _noting(ranges: _NotingRanges) -> Iterator[None]:
    """Record ranges as the code under test receives them: a simulated device moves the tensors that torch makes."""
    arange, known = torch.arange, set[str]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        values = arange(*args, **kwargs)
        if (line := site(sys._getframe())) not in known and line in ranges.found:
            known.add(line)
            ranges.found[line] = values, float(values[0])
        return values

    with ranges, replaced(torch, "arange", noted):
        yield


class _Shifting(_AroundRanges):
    """Lets the ranges of one line continue where the ranges of earlier ranks end."""

    def __init__(self, change: Change, rank: Rank) -> None:
        super().__init__()
        self._line, self._index = (change.name, change.site), part_of(change, rank.index, rank.size)

    def made(self, line: str, values: torch.Tensor) -> torch.Tensor:
        return values + self._index * values.numel() if ("arange", line) == self._line else values

    def sliced(self, line: str, index: Any, place: int) -> Any:
        if ("slice", line) != self._line:
            return index
        first, end = _slice_in(index, place)
        by = self._index * (end - first)
        moved = slice(first + by, end + by)
        return (*index[:place], moved, *index[place + 1 :]) if isinstance(index, tuple) else moved
