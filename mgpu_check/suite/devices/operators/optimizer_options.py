"""Step optimizers and GradScaler with each pair of values of their options, next to float64 on the CPU.

Optimizers whose steps `documented_steps` has are compared with them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgpu_check.suite.common.agreement import Case
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.common.values import small
from mgpu_check.suite.devices.operators.averaging import averaging_cases
from mgpu_check.suite.devices.operators.documented_steps import STEPS, DocumentedSteps
from mgpu_check.suite.devices.operators.optimizing import FUSED, by_tensors

_Options = Mapping[str, Sequence[Any]]

_DECAY, _WAYS = (0.0, 0.25), (False, True)
_AVERAGES: dict[str, Sequence[Any]] = {
    "betas": ((0.9, 0.999), (0.5, 0.5)),
    "eps": (1e-8, 0.25),
    "weight_decay": _DECAY,
    "maximize": _WAYS,
}


class _Kind(NamedTuple):
    """An optimizer with the values of its options, the default first.

    Attributes:
        forms: the names of the implementations that it has besides the default.
        data: "flat" for parameters of several sizes, "matrices" for matrices, "loss" for one group of matrices and a
            closure that is called several times.
    """

    make: Any
    values: _Options
    forms: tuple[str, ...] = ("loop", "lists", "capturable", "differentiable")
    data: str = "flat"

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", str(self.make))


_FORMS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "loop": {"foreach": False},
    "lists": {"foreach": True},
    "fused": {"fused": True},
    "not fused": {"foreach": True, "fused": False},
    "capturable": {"capturable": True},
    "differentiable": {"differentiable": True},
}
_LISTS = ("loop", "lists")
_UNCAPTURED = ("loop", "lists", "differentiable", "not fused")
_CAPTURED = ("loop", "lists", "capturable", *_UNCAPTURED[2:])

_KINDS = (
    _Kind(
        torch.optim.SGD,
        {
            "momentum": (0.0, 0.5),
            "dampening": (0.0, 0.25),
            "nesterov": _WAYS,
            "weight_decay": _DECAY,
            "maximize": _WAYS,
        },
        _UNCAPTURED,
    ),
    _Kind(torch.optim.Adam, {**_AVERAGES, "amsgrad": _WAYS}, _CAPTURED),
    _Kind(torch.optim.AdamW, {**_AVERAGES, "amsgrad": _WAYS}, _CAPTURED),
    _Kind(
        torch.optim.RMSprop,
        {
            "alpha": (0.99, 0.5),
            "eps": (1e-8, 0.5),
            "momentum": (0.0, 0.5),
            "centered": _WAYS,
            "weight_decay": _DECAY,
            "maximize": _WAYS,
        },
    ),
    _Kind(
        torch.optim.Adagrad,
        {
            "lr_decay": (0.0, 0.25),
            "initial_accumulator_value": (0.0, 0.5),
            "eps": (1e-10, 0.5),
            "weight_decay": _DECAY,
            "maximize": _WAYS,
        },
        _UNCAPTURED,
    ),
    _Kind(torch.optim.Adadelta, {"rho": (0.9, 0.5), "eps": (1e-6, 0.5), "weight_decay": _DECAY, "maximize": _WAYS}),
    _Kind(torch.optim.Adamax, _AVERAGES),
    _Kind(torch.optim.NAdam, {**_AVERAGES, "momentum_decay": (0.004, 0.25), "decoupled_weight_decay": _WAYS}),
    _Kind(torch.optim.RAdam, {**_AVERAGES, "decoupled_weight_decay": _WAYS}),
    _Kind(
        torch.optim.ASGD,
        {"lambd": (0.0001, 0.5), "alpha": (0.75, 0.5), "t0": (1e6, 1), "weight_decay": _DECAY, "maximize": _WAYS},
    ),
    _Kind(
        torch.optim.Rprop,
        {"etas": ((0.5, 1.2), (0.25, 2.0)), "step_sizes": ((1e-6, 50), (0.0625, 4.0)), "maximize": _WAYS},
    ),
    _Kind(
        torch.optim.Adafactor,
        {
            "beta2_decay": (-0.8, -0.5),
            "eps": ((None, 1e-3), (1e-8, 0.25)),
            "d": (1.0, 2.0),
            "weight_decay": _DECAY,
            "maximize": _WAYS,
        },
        _LISTS,
    ),
    _Kind(
        torch.optim.Muon,
        {
            "weight_decay": (0.1, 0.25),
            "momentum": (0.95, 0.5),
            "nesterov": (True, False),
            "ns_coefficients": ((3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)),
            "eps": (1e-7, 1e-3),
            "ns_steps": (5, 3),
            "adjust_lr_fn": (None, "original", "match_rms_adamw"),
        },
        (),
        "matrices",
    ),
    _Kind(
        torch.optim.LBFGS,
        {
            "max_iter": (2, 3),
            "max_eval": (None, 9),
            "tolerance_grad": (1e-7, 1e-3),
            "tolerance_change": (1e-9, 1e-3),
            "history_size": (100, 1),
            "line_search_fn": (None, "strong_wolfe"),
        },
        (),
        "loss",
    ),
)  # fmt: skip
_OTHERS: _Options = {
    "dtype": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    "groups": _WAYS,
    "closure": _WAYS,
}
"""Options of each optimizer besides those of its constructor."""

_NARROW = (torch.float16, torch.bfloat16)

_SCALER: _Options = {
    "init_scale": (2.0**16, 4.0),
    "growth_factor": (2.0, 4.0),
    "backoff_factor": (0.5, 0.25),
    "growth_interval": (2000, 1, 2, 3),
    "enabled": (True, False),
    "unscaled": ("", "first", "and clipped"),
    "optimizers": (1, 2),
    "infinite": (None, 0, 1, 2),
    "new_scale": (None, 8.0, "tensor"),
    "dtype": (torch.float32, torch.float64),
}
"""Options of GradScaler and of the steps with it.

`infinite` is the step in which the last optimizer has an infinite gradient, `new_scale` the one given to `update`.
"""
_SHARE = 32
"""A run of few examples takes every 32nd row, and one at least."""


def _together(kind: _Kind, row: Mapping[str, Any]) -> bool:
    """Return whether an optimizer takes these options, and rounding stays small with them."""
    if row.get("nesterov") and (row.get("momentum") == 0 or row.get("dampening")):
        return False
    if row.get("centered") and row.get("eps") == 1e-8:
        return False  # a difference of two near numbers is the divisor
    form, dtype = row.get("form"), row.get("dtype")
    if kind.data == "loss":
        # Quotients of inner products enlarge roundings, and a search ends early or late by one.
        return dtype not in (*_NARROW, torch.float32 if row.get("line_search_fn") else None)
    if form == "capturable" and dtype == torch.float64:
        return False  # its corrections are computed in float32
    if kind.make is torch.optim.ASGD and form == "default":
        return dtype != torch.float64  # its rate is rounded to float32, otherwise in lists than in a loop
    if kind.make is torch.optim.SGD and form == "fused":
        return dtype not in _NARROW  # torch 2.13 takes the step twice on the CPU, which the simulated node computes on
    return form != "differentiable" or dtype not in _NARROW


def _in_turn(row: Mapping[str, Any]) -> bool:
    """Return whether an infinity of GradScaler is found: without it, the scaler steps to infinity."""
    return row.get("enabled") is not False or row.get("infinite") is None


def option_cases(seed: int = 0, *, more: bool = True) -> Iterator[Case]:
    """Yield steps of each optimizer, of GradScaler, and averages of models: each pair of values of two options occurs.

    Without `more`, only some of the rows are left, by seed.
    """
    for number, kind in enumerate(_KINDS):
        fused = ("fused",) if kind.name in FUSED else ()
        options = {**kind.values, "form": ("default", *kind.forms, *fused), **_OTHERS}
        for row in drawn_rows(
            options, functools.partial(_together, kind), seed=seed + 5 * number, more=more, share=_SHARE
        ):
            x = small((5, 13), row["dtype"], seed)
            yield Case(
                f"{kind.name} with {words_of(row, options)}", functools.partial(_stepped, kind, row), (x,), "close"
            )
    for row in drawn_rows(_SCALER, _in_turn, seed=seed, more=more, share=_SHARE):
        x = small((3, 7), row["dtype"], seed)
        yield Case(f"GradScaler with {words_of(row, _SCALER)}", functools.partial(_scaled, row), (x,), "close")
    yield from averaging_cases(seed, more=more)


def _stepped(kind: _Kind, row: Mapping[str, Any], x: Tensor) -> list[Tensor]:
    """Return the parameters after steps; for a differentiable step, also its gradient."""
    options = {name: row[name] for name in kind.values} | _FORMS[row["form"]]
    if not x.is_cuda:
        options.pop("capturable", None)  # torch has it for devices only
        if "loop" in kind.forms and row["form"] != "differentiable":
            options = by_tensors(kind.make, options)
    inner = "differentiable" in options
    leaf = x.detach().clone().requires_grad_()
    before = _parts(leaf if inner else x, kind.data)
    parameters = [part.clone() if inner else part.detach().clone().requires_grad_() for part in before]
    # The corrections of a differentiable Adam are powers in float32.
    if not x.is_cuda and kind.make in STEPS and not (inner and "betas" in kind.values):
        moved = torch.cat([one.reshape(-1) for one in _documented(kind, row, parameters, 1 if inner else 2)])
        return [moved.detach(), *(torch.autograd.grad(moved.sum(), [leaf]) if inner else ())]
    groups: Any = parameters
    if row["groups"] and kind.data == "loss":
        groups = [{"params": parameters, "lr": 0.125}]
    elif row["groups"]:
        groups = [{"params": parameters[:2], "lr": 0.125}, {"params": parameters[2:], "lr": 0.0625}]
    optimizer = kind.make(groups, lr=0.125, **options)
    for step in range(1 if inner else 2):
        _step(optimizer, parameters, kind.data, step, by_closure=row["closure"] or kind.data == "loss")
    moved = torch.cat([parameter.reshape(-1) for parameter in parameters])
    if kind.data == "loss" and row["dtype"] == torch.float32:
        return [moved.detach().to(torch.float16)]
    if kind.data == "matrices" and row["dtype"] != torch.bfloat16:  # Muon computes in bfloat16
        return [(moved - torch.cat([part.reshape(-1) for part in before])).detach().bfloat16()]
    return [moved.detach(), *(torch.autograd.grad(moved.sum(), [leaf]) if inner else ())]


def _documented(kind: _Kind, row: Mapping[str, Any], parameters: list[Tensor], count: int) -> list[Tensor]:
    """Return the parameters after steps as torch documents them."""
    steps = DocumentedSteps(kind.make, {name: row[name] for name in kind.values})
    rates = [0.125 if number < 2 or not row["groups"] else 0.0625 for number in range(len(parameters))]
    for step in range(count):
        gradients = [_gradient(one.detach(), kind.data, number, step) for number, one in enumerate(parameters, start=1)]
        parameters = steps.stepped(parameters, gradients, rates)
    return parameters


def _parts(x: Tensor, data: str) -> list[Tensor]:
    if data == "flat":
        # Odd, even and single numbers of elements: kernels for lists of tensors work in chunks and vectors.
        return [x, x[0], x[1, :8], x[2, :1]]
    return [x, x[:3, :6], x[2:, 1:5]]


def _step(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], data: str, step: int, *, by_closure: bool
) -> None:
    def loss() -> float:
        total = 0.0
        for number, parameter in enumerate(parameters, start=1):
            parameter.grad = _gradient(parameter.detach(), data, number, step)
            if data == "loss":
                total += float((parameter.detach() - 1).square().sum()) * number / 2
        return total

    if by_closure:
        optimizer.step(loss)
        return
    loss()
    optimizer.step()


def _gradient(parameter: Tensor, data: str, number: int, step: int) -> Tensor:
    if data == "loss":
        return (parameter - 1) * number
    if data == "matrices":
        # Far from singular: Muon divides by the singular values.
        return torch.eye(*parameter.shape, dtype=parameter.dtype, device=parameter.device) * 4 + parameter / 4
    # Away from 0, where rounding could change the sign.
    return (parameter.abs() * number + 0.5) * (1 - 1.75 * step)


def _scaled(row: Mapping[str, Any], x: Tensor) -> list[Tensor]:
    """Return the scales of four steps of GradScaler, and the parameters after them."""
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
    scaler = torch.amp.GradScaler(x.device.type, **{name: row[name] for name in names})
    parameters = [part.detach().clone().requires_grad_() for part in (x, x[1], x[2, :4])[: row["optimizers"] + 1]]
    optimizers = [torch.optim.SGD([parameter], lr=0.125) for parameter in parameters[1:]]
    optimizers[0].add_param_group({"params": parameters[:1]})
    scales = []
    for step in range(4):
        for parameter in parameters:
            parameter.grad = scaler.scale(parameter.detach() * 0.5 + step)
        if step == row["infinite"]:
            last = parameters[-1].grad
            assert last is not None
            last.view(-1)[-1] = torch.inf
        for optimizer in optimizers if row["unscaled"] else ():
            scaler.unscale_(optimizer)
        if row["unscaled"] == "and clipped":
            for parameter in parameters:
                torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        new = row["new_scale"] if step == 3 else None
        scaler.update(torch.full((), 2.0, device=x.device) if new == "tensor" else new)
        scales.append(scaler.get_scale())
    return [x.new_tensor(scales), torch.cat([parameter.detach().reshape(-1) for parameter in parameters])]
