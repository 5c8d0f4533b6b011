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

_OPTIMIZERS: tuple[tuple[str, Callable[..., torch.optim.Optimizer], dict[str, Any]], ...] = (
    ("SGD", torch.optim.SGD, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.25}),
    # The second moment falls with the gradients, and AMSGrad keeps its maximum.
    ("Adam", torch.optim.Adam, {"amsgrad": True, "betas": (0.5, 0.5)}),
    ("AdamW", torch.optim.AdamW, {"weight_decay": 0.25}),
    ("RMSprop", torch.optim.RMSprop, {"momentum": 0.5, "centered": True, "eps": 0.5}),
    ("Adagrad", torch.optim.Adagrad, {"lr_decay": 0.25}),
    ("Adadelta", torch.optim.Adadelta, {"rho": 0.5}),
    ("Adamax", torch.optim.Adamax, {}),
    ("NAdam", torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.25}),
    ("RAdam", torch.optim.RAdam, {}),
    ("ASGD", torch.optim.ASGD, {"t0": 1}),
    ("Rprop", torch.optim.Rprop, {}),
)
_AVERAGES = {"betas": (0.5, 0.75), "eps": 0.25, "weight_decay": 0.25, "maximize": True}
_OTHER_OPTIONS: tuple[tuple[str, Callable[..., torch.optim.Optimizer], dict[str, Any]], ...] = (
    ("SGD, dampened", torch.optim.SGD, {"momentum": 0.5, "dampening": 0.25, "maximize": True}),
    ("Adam, decayed", torch.optim.Adam, _AVERAGES),
    ("AdamW, AMSGrad", torch.optim.AdamW, {**_AVERAGES, "amsgrad": True}),
    ("RMSprop, decayed", torch.optim.RMSprop, {"alpha": 0.5, "weight_decay": 0.25, "maximize": True}),
    (
        "Adagrad, decayed",
        torch.optim.Adagrad,
        {"initial_accumulator_value": 0.5, "weight_decay": 0.25, "eps": 0.5, "maximize": True},
    ),
    ("Adadelta, decayed", torch.optim.Adadelta, {"eps": 0.5, "weight_decay": 0.25, "maximize": True}),
    ("Adamax, decayed", torch.optim.Adamax, _AVERAGES),
    ("NAdam, decayed", torch.optim.NAdam, {**_AVERAGES, "momentum_decay": 0.25}),
    ("RAdam, decayed", torch.optim.RAdam, {**_AVERAGES, "decoupled_weight_decay": True}),
    ("ASGD, decayed", torch.optim.ASGD, {"lambd": 0.5, "alpha": 0.5, "weight_decay": 0.25, "maximize": True}),
    ("Rprop, wide", torch.optim.Rprop, {"etas": (0.25, 2.0), "step_sizes": (0.0625, 4.0), "maximize": True}),
)
"""The same optimizers with the options that differ from the defaults."""
_FUSED = frozenset({"SGD", "Adam", "AdamW"})


def optimizer_cases(seed: int = 0) -> Iterator[Case]:
    """Yield three steps of each optimizer, in its multi-tensor form and, where torch has one, its fused form.

    Steps with other options are in one form for each optimizer, by seed: tensor by tensor, or one of these.
    """
    for dtype in (torch.float32, torch.float64):
        for name, kind, options in _OPTIMIZERS:
            for form in _forms(kind)[1:]:
                yield _case(name, kind, options, form, dtype, seed)
        for number, (name, kind, options) in enumerate(_OTHER_OPTIONS):
            forms = _forms(kind)
            yield _case(name, kind, options, forms[(number + seed) % len(forms)], dtype, seed)


def _forms(kind: Callable[..., torch.optim.Optimizer]) -> list[dict[str, bool]]:
    fused = [{"fused": True}] if getattr(kind, "__name__", "") in _FUSED else []
    return [{"foreach": False}, {"foreach": True}, *fused]


def _case(
    name: str,
    kind: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    form: dict[str, bool],
    dtype: torch.dtype,
    seed: int,
) -> Case:
    words = ", ".join(f"{option}={value}" for option, value in form.items())
    return Case(
        f"{name} with {words} of {name_of(dtype)}",
        lambda x: _stepped(x, kind, {**options, **form}),
        (small((5, 13), dtype, seed),),
        "close",
    )


def _stepped(
    x: torch.Tensor, kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the scale of the loss, and the parameters, after three steps.

    The second step is skipped for an infinite gradient. It also restarts the count of steps until the scale grows.
    """
    # Odd, even and single numbers of elements: kernels for lists of tensors work in chunks and vectors.
    parameters = [part.detach().clone().requires_grad_() for part in (x, x[0], x[1, :8], x[2, :1])]
    optimizer = kind(parameters, lr=0.125, **options)
    scaler = torch.amp.GradScaler(
        x.device.type, init_scale=4.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2
    )
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
    return [x.new_tensor(scaler.get_scale()), *(parameter.detach() for parameter in parameters)]
