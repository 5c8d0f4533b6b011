"""Record, in the script's process, the gradients after backward and after each reduction before the optimizer's step.

If a gradient has a wrong factor, one of these calls caused it, and the report names the line of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from mgpu_check.compare.errors import Guard
from mgpu_check.compare.naming import Names
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.torch_hooks.collective_arguments import group_of, option
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, FunctionForm
from mgpu_check.torch_hooks.patches import Patches
from mgpu_check.torch_hooks.tensors import is_distributed, is_pending, readable

_REDUCTIONS = tuple(name for name, row in COLLECTIVES.items() if row.reduces)
_JOINING = tuple(name for name, row in COLLECTIVES.items() if row.transfer is not None and row.transfer.joins)
_STEPS = 4
"""Number of recorded steps: a wrong factor shows from the first step on."""
_CALLS = 256
"""Largest number of recorded calls per step, to bound time and the size of the trace."""


class Flow:
    """Records the calls since the last step, with the norms of the gradients after each."""

    def __init__(self, names: Names, guard: Guard, note: Callable[..., None]) -> None:
        self._names, self._guard, self._note_event = names, guard, note
        self._steps = 0
        self._calls: list[tuple[str, dict[int, float]]] = []
        self._within = False
        self._cut: set[str] = set()  # calls that join tensors, although gradients flow to them

    def install(self) -> None:
        """Record reductions from now on."""
        from torch.distributed import distributed_c10d as c10d

        patches = Patches(among="torch")
        for name in (*_REDUCTIONS, *_JOINING):
            function = getattr(c10d, name, None)
            if function is not None:
                patches.replace(function, self._watched(function, FunctionForm(function)))
        patches.apply()

    def after_backward(self) -> None:
        """Record the gradients after a backward pass."""
        if self._is_noted():
            parameters = {id(p): p for module in self._names.modules() for p in module._parameters.values()}
            self._note("backward", (p for p in parameters.values() if p is not None))

    def taken(self, numbers: Mapping[int, int]) -> list[tuple[str, dict[int, float]]]:
        """Return the recorded calls of this step in order, and start the next step.

        A call is a backward pass or a reduction. Each has a description with its file and line, and norms of gradients
        after it, by number of the parameter. A backward pass has the norms of all gradients, a reduction that of the
        reduced gradient, and an asynchronous reduction none. Only `_STEPS` steps are recorded, and `_CALLS` calls of
        each.

        Args:
            numbers: id of a parameter -> its number in the trace; other parameters are left out.
        """
        found = [(told, {numbers[i]: n for i, n in norms.items() if i in numbers}) for told, norms in self._calls]
        self._calls = []
        self._steps += 1
        return found

    def _is_noted(self) -> bool:
        return self._steps < _STEPS and len(self._calls) < _CALLS and not self._within

    def _watched(self, function: Callable[..., Any], form: FunctionForm) -> Callable[..., Any]:
        @functools.wraps(function)
        def reduced(*args: Any, **kwargs: Any) -> Any:
            if not self._is_noted():
                return function(*args, **kwargs)
            self._within = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._within = False
            self._guard(self._reduced)(form, result, args, kwargs)
            return result

        return reduced

    def _reduced(self, form: FunctionForm, result: Any, args: Any, kwargs: Any) -> None:
        operand = form.argument(form.operand, args, kwargs) if form.operand else None
        if form.name in _JOINING:
            if torch.is_grad_enabled() and isinstance(operand, torch.Tensor) and operand.grad_fn is not None:
                file, line = calling_line()
                if (told := f"{form.name} at {relative(file)}:{line}") not in self._cut:
                    self._cut.add(told)
                    self._note_event("cut", call=told)
            return
        group = group_of(form.argument(form.group, args, kwargs))
        values = ((name, form.argument(name, args, kwargs)) for name in form.options)
        options = [option(name, value) for name, value in values if value is not None]
        told = f"{form.name} ({', '.join([*options, f'{len(group.ranks)} ranks' if group else ''])})"
        # An asynchronous call may not have changed its operand yet.
        owners = [] if isinstance(result, torch.distributed.Work) else self._owners(operand)
        self._note(told, owners)

    def _owners(self, operand: Any) -> Sequence[torch.Tensor]:
        """Return the parameter whose gradient is the operand; empty if there is no such parameter."""
        if not isinstance(operand, torch.Tensor):
            return []
        parameters = (p for module in self._names.modules() for p in module._parameters.values() if p is not None)
        return [p for p in parameters if p.grad is not None and _is_same(p.grad, operand)][:1]

    def _note(self, told: str, parameters: Iterable[torch.Tensor]) -> None:
        file, line = calling_line()
        some = {id(p): value for p in parameters if (value := _plain(p.grad)) is not None}
        norms = [torch.linalg.vector_norm(value, dtype=torch.float64).cpu() for value in some.values()]
        found = torch.stack(norms).tolist() if norms else []
        self._calls.append((f"{told} at {relative(file)}:{line}", dict(zip(some, found, strict=True))))


def _is_same(gradient: torch.Tensor, operand: torch.Tensor) -> bool:
    if gradient is operand or gradient.shape != operand.shape:
        return gradient is operand
    own, reduced = _plain(gradient), _plain(operand)
    return own is not None and reduced is not None and own.data_ptr() == reduced.data_ptr()


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the floating-point numbers of a strided tensor; None for any other tensor."""
    if tensor is None or is_distributed(tensor) or is_pending(tensor) or tensor.layout is not torch.strided:
        return None
    value = readable(tensor)
    real = value is not None and bool(value.numel()) and (value.is_floating_point() or value.is_complex())
    return value if real else None
