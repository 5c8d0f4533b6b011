"""Yield optimizer steps on one device, with parameters of several sizes and gradients that GradScaler must see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mgpu_check.suite.common.agreement import Case
from mgpu_check.suite.common.documented_steps import DocumentedSteps
from mgpu_check.suite.common.values import small
from mgpu_check.suite.devices.operators.optimizer_kinds import COARSE, FUSED, KIND_OF
from mgpu_check.torch_hooks.tensors import name_of

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
_DTYPES = (torch.float32, torch.float64)


def optimizer_cases(seed: int = 0) -> Iterator[Case]:
    """Yield three steps of each optimizer, in its multi-tensor form and, where torch has one, its fused form.

    Also yield the steps of a GradScaler that continues from the state of another one.
    """
    for dtype in _DTYPES:
        x = small((5, 13), dtype, seed)
        yield Case(f"GradScaler from the state of another of {name_of(dtype)}", _continued, (x,), "close")
        for name, kind, options in _OPTIMIZERS:
            for form in ({"foreach": True}, {"fused": True})[: 1 + (name in FUSED)]:
                yield _case(name, kind, {**options, **form}, dtype, seed)


def _case(
    name: str, kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype, seed: int
) -> Case:
    words = ", ".join(f"{option}={value}" for option, value in options.items())
    coarse = kind in COARSE and dtype == torch.float64
    return Case(
        f"GradScaler, and {name} with {words}, of {name_of(dtype)}",
        lambda x: [one.float() if coarse else one for one in _stepped(x, kind, options)],
        (small((5, 13), dtype, seed),),
        "close",
    )


def _stepped(
    x: torch.Tensor, kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the scale of the loss, and the parameters, after three steps.

    The second step is skipped for an infinite gradient. It also restarts the count of steps until the scale grows. The
    reference takes the other two steps by their documentation.
    """
    # Odd, even and single numbers of elements: kernels for lists of tensors work in chunks and vectors.
    parameters = [part.detach().clone() for part in (x, x[0], x[1, :8], x[2, :1])]
    if not x.is_cuda:
        own = KIND_OF[kind].defaults | options | {"lr": 0.125}
        documented = DocumentedSteps(kind)
        for step in (0, 2):
            parameters = documented.stepped(parameters, _gradients(parameters, step), [own] * len(parameters))
        return [x.new_tensor(1.0), torch.cat([one.reshape(-1) for one in parameters])]
    parameters = [one.requires_grad_() for one in parameters]
    optimizer = kind(parameters, lr=0.125, **options)
    scaler = torch.amp.GradScaler(
        x.device.type, init_scale=4.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2
    )
    for step in range(3):
        for parameter, gradient in zip(parameters, _gradients(parameters, step), strict=True):
            parameter.grad = scaler.scale(gradient)
        if step == 1:
            last = parameters[-1].grad
            assert last is not None
            last.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    # In one tensor, because an error counts in units of its largest element: a step may bring a parameter near 0.
    return [x.new_tensor(scaler.get_scale()), torch.cat([parameter.detach().reshape(-1) for parameter in parameters])]


def _gradients(parameters: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """Return gradients away from 0, where rounding could change their sign."""
    return [
        (parameter.detach().abs() * number + 0.5) * (1 - 0.75 * step)
        for number, parameter in enumerate(parameters, start=1)
    ]


def _continued(x: torch.Tensor) -> list[torch.Tensor]:
    """Return figures of GradScalers, and a parameter after five steps: two, one from their state, and two others.

    The reference is worked out by hand, because the Python code of GradScaler is the same on each device.
    """
    kind = x.device.type
    if kind == "cpu":
        known = [8.0, 8.0, 16.0, 64.0, 1.0, *(4.0, 0.25, 1.0), *(False, True)]
        return [x.new_tensor(known), x * (1 - 0.125 * 0.5) ** 5]
    parameter = x.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=0.125)

    def step(scaler: torch.amp.GradScaler) -> float:
        parameter.grad = scaler.scale(parameter.detach() * 0.5)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    first = torch.amp.GradScaler(kind, init_scale=8.0, growth_interval=3)
    scales = [step(first), step(first)]
    second = torch.amp.GradScaler(kind)
    second.load_state_dict(first.state_dict())
    scales.append(step(second))  # the scale grows in the third step of the interval
    second.set_growth_factor(4.0)
    second.set_backoff_factor(0.25)
    second.set_growth_interval(1)
    off = torch.amp.GradScaler(kind, enabled=False)
    scales += [step(second), step(off)]
    figures = second.get_growth_factor(), second.get_backoff_factor(), second.get_growth_interval()
    return [x.new_tensor([*scales, *figures, off.is_enabled(), second.is_enabled()]), parameter.detach()]
