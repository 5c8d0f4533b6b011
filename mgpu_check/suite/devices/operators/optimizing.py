"""Yield steps of optimizers on one device, with parameters of several sizes and gradients that GradScaler finds
infinite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mgpu_check.suite.common.agreement import Case
from mgpu_check.suite.common.values import small
from mgpu_check.torch_hooks.tensors import name_of

__all__ = ["optimizer_cases"]

_OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.25}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.25}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True, "eps": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.25}),
    "Adadelta": (torch.optim.Adadelta, {"rho": 0.5}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.25}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 1}),
    "Rprop": (torch.optim.Rprop, {}),
}
_FUSED = frozenset({"SGD", "Adam", "AdamW"})


def optimizer_cases(seed: int = 0) -> Iterator[Case]:
    """Yield three steps of each optimizer, in its multi-tensor form and, where torch has one, its fused form."""
    for dtype in (torch.float32, torch.float64):
        x = small((5, 13), dtype, seed)
        for name in _OPTIMIZERS:
            for form in ("foreach", *(("fused",) if name in _FUSED else ())):
                yield Case(
                    f"{name} with {form}=True of {name_of(dtype)}",
                    lambda x, name=name, form=form: _stepped(x, name, form),
                    (x,),
                    "close",
                )


def _stepped(x: torch.Tensor, name: str, form: str) -> list[torch.Tensor]:
    """Return the parameters after three steps, the second of them skipped for an infinite gradient."""
    kind, options = _OPTIMIZERS[name]
    # Odd, even and single numbers of elements: kernels for lists of tensors work in chunks and vectors.
    parameters = [part.detach().clone().requires_grad_() for part in (x, x[0], x[1, :8], x[2, :1])]
    optimizer = kind(parameters, lr=0.125, **options, **{form: True})
    scaler = torch.amp.GradScaler(x.device.type, init_scale=4.0)
    for step in range(3):
        for number, parameter in enumerate(parameters, start=1):
            # Keep gradients away from 0, where rounding could change their sign.
            gradient = (parameter.detach().abs() * number + 0.5) * (1 - 0.75 * step)
            parameter.grad = scaler.scale(gradient)
        if step == 1:
            last = parameters[-1].grad
            assert last is not None
            last.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach() for parameter in parameters]
