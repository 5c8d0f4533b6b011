"""Record the gradients that are applied to parameters, also where an optimizer then writes into `grad`.

On devices, torch's foreach optimizers compute in place: SGD with Nesterov momentum adds its momentum to `grad`
(`torch.optim.sgd._multi_tensor_sgd`), and fused optimizers unscale it. On the CPU they leave `grad` alone. So the
gradient that a gate compares is read before the optimizer runs.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from mgpu_check.torch_hooks.tensors import digest_of


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
        traced: whether to keep the history of a parameter.

    Attributes:
        rewritten: an optimizer that is not torch's own has written into a gradient. It may have reduced the gradient
            over the ranks, or it may have computed in place, so which gradient counts is not known.
    """

    def __init__(self, after: bool, traced: Callable[[torch.Tensor], bool]) -> None:
        self.rewritten = False
        self._after, self._traced = after, traced
        self._hooks: dict[int, Any] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._applied: dict[int, _Applied] = {}
        self._histories: dict[int, str] = {}
        self._stepped: set[int] = set()  # ids of the parameters that an optimizer has stepped in this call
        self._cleared: set[int] = set()

    def before_step(self, optimizer: Optimizer, ready: Callable[[Optimizer], None]) -> None:
        """Call `ready` once the gradients of a step are there: after the user's hooks, or after the closure.

        Call it from a global hook, which torch runs before the hooks of the optimizer.
        """

        def take() -> None:
            with _disable_current_modes():  # a mode would perturb the copies
                for parameter in _parameters(optimizer):
                    if parameter.grad is not None and parameter.grad.layout == torch.strided:
                        self._before[id(parameter)] = parameter.grad.detach().clone()
                        self._stepped.add(id(parameter))
                        self._trace(parameter)
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
                if before is None or after is None or _equal(before, after):
                    continue
                self._applied[id(parameter)] = _Applied(parameter, before, after.detach().clone())
                self.rewritten |= not type(optimizer).__module__.startswith("torch.")

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that was applied; or `grad`, if it was changed after that, or by no optimizer."""
        applied, now = self._applied.get(id(parameter)), parameter.grad
        if applied is None or now is None or self._after or not _equal(applied.after, now):
            return now
        return applied.before

    def by_gradient(self, parameters: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return id of `grad` -> the gradient that was applied, for the gradients that differ."""
        return {
            id(parameter.grad): applied
            for parameter in parameters
            if (applied := self.of(parameter)) is not None and applied is not parameter.grad
        }

    def start_histories(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin the histories of parameters with their values."""
        for parameter in parameters:
            if self._traced(parameter):
                self._histories[id(parameter)] = digest_of(_local(parameter))

    def end_call(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add to the histories of parameters that no optimizer has stepped in this call of the step."""
        for parameter in parameters:
            if parameter.grad is None or id(parameter) in self._stepped or not self._traced(parameter):
                continue
            self._trace(parameter)
            if not bool(_local(parameter.grad).any()):
                self._cleared.add(id(parameter))
        self._stepped.clear()

    def history(self, parameter: torch.Tensor) -> str:
        """Return a checksum of the first value of a parameter and of the gradients that were applied to it, in order.

        Return "" if there is none, or if code without an optimizer may have cleared a gradient that it applied.
        """
        return "" if id(parameter) in self._cleared else self._histories.get(id(parameter), "")

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def _trace(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if self._traced(parameter):
            known = self._histories.get(id(parameter)) or digest_of(_local(parameter))
            both = f"{known} {digest_of(_local(parameter.grad))}"
            self._histories[id(parameter)] = hashlib.sha1(both.encode(), usedforsecurity=False).hexdigest()

    def _remove_hook(self, optimizer: Optimizer) -> None:
        if (hook := self._hooks.pop(id(optimizer), None)) is not None:
            hook.remove()


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _equal(gradient: torch.Tensor, later: torch.Tensor) -> bool:
    one, other = _local(gradient), _local(later)
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
