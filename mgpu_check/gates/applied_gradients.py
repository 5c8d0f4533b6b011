"""Keep the gradients that optimizers apply, where an optimizer then writes into `grad`.

On devices, torch's foreach optimizers compute in place: SGD with Nesterov momentum adds its momentum to `grad`
(`torch.optim.sgd._multi_tensor_sgd`), and fused optimizers unscale it. On the CPU they leave `grad` alone. So the
gradient that a gate compares is read before the optimizer runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class _Applied:
    """The gradient of one parameter before and after a step of an optimizer that has written into it."""

    parameter: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


class AppliedGradients:
    """Read the gradients of parameters as the optimizer gets them, after all hooks of the user.

    Args:
        after: read them as the optimizer leaves them instead.

    Attributes:
        rewritten: an optimizer that is not torch's own has written into a gradient. It may have reduced the gradient
            over the ranks, or it may have computed in place, so which gradient counts is not known.
    """

    def __init__(self, after: bool) -> None:
        self.rewritten = False
        self._after = after
        self._hooks: dict[int, Any] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._applied: dict[int, _Applied] = {}

    def before_step(self, optimizer: Optimizer, ready: Callable[[Optimizer], None]) -> None:
        """Call `ready` once the gradients of a step are there: after the user's hooks, or after the closure.

        Call it from a global hook, which torch runs before the hooks of the optimizer.
        """

        def take() -> None:
            with _disable_current_modes():  # a mode would perturb the copies
                for parameter in _parameters(optimizer):
                    if parameter.grad is not None and parameter.grad.layout == torch.strided:
                        self._before[id(parameter)] = parameter.grad.detach().clone()
            ready(optimizer)

        def last(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if not callable(closure):
                return take()

            @functools.wraps(closure)
            def then_take(*of_closure: Any, **named: Any) -> Any:
                loss = closure(*of_closure, **named)
                take()
                return loss

            if "closure" in kwargs:
                return args, kwargs | {"closure": then_take}
            return (args[0], then_take, *args[2:]), kwargs

        self._remove_hook(optimizer)
        self._hooks[id(optimizer)] = optimizer.register_step_pre_hook(last)

    def after_step(self, optimizer: Optimizer) -> None:
        self._remove_hook(optimizer)
        with _disable_current_modes():
            for parameter in _parameters(optimizer):
                before, after = self._before.pop(id(parameter), None), parameter.grad
                self._applied.pop(id(parameter), None)
                if before is None or after is None or _same(before, after):
                    continue
                self._applied[id(parameter)] = _Applied(parameter, before, after.detach().clone())
                self.rewritten |= not type(optimizer).__module__.startswith("torch.")

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that was applied; or `grad`, if that has changed since, or if no optimizer wrote into it."""
        applied, now = self._applied.get(id(parameter)), parameter.grad
        if applied is None or now is None or self._after or not _same(applied.after, now):
            return now
        return applied.before

    def by_gradient(self, parameters: Iterator[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return id of `grad` -> the gradient that was applied, for the gradients that differ."""
        return {
            id(parameter.grad): applied
            for parameter in parameters
            if (applied := self.of(parameter)) is not None and applied is not parameter.grad
        }

    def _remove_hook(self, optimizer: Optimizer) -> None:
        if (hook := self._hooks.pop(id(optimizer), None)) is not None:
            hook.remove()


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _same(gradient: torch.Tensor, other: torch.Tensor) -> bool:
    mine, others = (getattr(tensor, "_local_tensor", tensor) for tensor in (gradient, other))
    return mine.shape == others.shape and mine.dtype == others.dtype and torch.equal(mine, others.detach())
