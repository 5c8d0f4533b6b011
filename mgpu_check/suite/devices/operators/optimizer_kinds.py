"""The optimizers of torch with the values of their options: a table for the cases that step them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_Options = Mapping[str, Sequence[Any]]

_DECAY, _WAYS = (0.0, 0.25), (False, True)
_AVERAGES: dict[str, Sequence[Any]] = {
    "betas": ((0.9, 0.999), (0.5, 0.5)),
    "eps": (1e-8, 0.25),
    "weight_decay": _DECAY,
    "maximize": _WAYS,
}


class OptimizerKind(NamedTuple):
    """An optimizer with the values of its options, the default first.

    Attributes:
        forms: the names of the implementations that it has besides the default.
        data: "flat" for parameters of several sizes, "matrices" for matrices, "loss" for one group of matrices and a
            closure that is called several times.
        steps: the number of steps until each branch of the formula is taken.
    """

    make: Callable[..., torch.optim.Optimizer]
    values: _Options
    forms: tuple[str, ...] = ("loop", "lists", "capturable", "differentiable")
    data: str = "flat"
    steps: int = 2

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", str(self.make))

    @property
    def defaults(self) -> dict[str, Any]:
        """The documented default of each option."""
        return {name: values[0] for name, values in self.values.items()}


FORMS: Mapping[str, dict[str, Any]] = {
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

KINDS: tuple[OptimizerKind, ...] = (
    OptimizerKind(
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
    OptimizerKind(torch.optim.Adam, {**_AVERAGES, "amsgrad": _WAYS}, _CAPTURED),
    OptimizerKind(torch.optim.AdamW, {**_AVERAGES, "weight_decay": (0.01, 0.25, 0.0), "amsgrad": _WAYS}, _CAPTURED),
    OptimizerKind(
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
    OptimizerKind(
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
    OptimizerKind(
        torch.optim.Adadelta, {"rho": (0.9, 0.5), "eps": (1e-6, 0.5), "weight_decay": _DECAY, "maximize": _WAYS}
    ),
    OptimizerKind(torch.optim.Adamax, _AVERAGES),
    OptimizerKind(torch.optim.NAdam, {**_AVERAGES, "momentum_decay": (0.004, 0.25), "decoupled_weight_decay": _WAYS}),
    OptimizerKind(
        torch.optim.RAdam,
        {**_AVERAGES, "betas": ((0.9, 0.999), (0.5, 0.9)), "decoupled_weight_decay": _WAYS},
        steps=7,  # the sixth is the first one with a rectified rate
    ),
    OptimizerKind(
        torch.optim.ASGD,
        {"lambd": (0.0001, 0.5), "alpha": (0.75, 0.5), "t0": (1e6, 1), "weight_decay": _DECAY, "maximize": _WAYS},
        steps=5,  # with t0=1 the fourth is the first one that averages
    ),
    OptimizerKind(
        torch.optim.Rprop,
        {"etas": ((0.5, 1.2), (0.25, 2.0)), "step_sizes": ((1e-6, 50), (0.0625, 0.125)), "maximize": _WAYS},
        steps=5,  # the fourth is the first one whose gradient agrees with the one before
    ),
    OptimizerKind(
        torch.optim.Adafactor,
        {
            "beta2_decay": (-0.8, -0.5),
            "lr": (1e-2, 1.0),  # the second step has a lower bound than 1
            "eps": ((None, 1e-3), (2.0, 2.0)),  # above roots of squares of gradients and of parameters
            "d": (1.0, 2.0),
            "weight_decay": _DECAY,  # the documentation of torch 2.13 names 0.01 as the default
            "maximize": _WAYS,
        },
        _LISTS,
        steps=7,  # the seventh is the first one whose gradient exceeds the averages, so that `d` bounds it
    ),
    OptimizerKind(
        torch.optim.Muon,
        {
            "weight_decay": (0.1, 0.25),
            "momentum": (0.95, 0.5),
            "nesterov": (True, False),
            "ns_coefficients": ((3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)),
            "eps": (1e-7, 1.0),  # 1 is above the norms at the default momentum
            "ns_steps": (5, 3),
            "adjust_lr_fn": (None, "original", "match_rms_adamw"),
        },
        (),
        "matrices",
    ),
    OptimizerKind(
        torch.optim.LBFGS,
        {
            "max_iter": (2, 3),
            "max_eval": (None, 9),
            "tolerance_grad": (1e-7, 1e-3),  # these tolerances stop no iteration
            "tolerance_change": (1e-9, 1e-3),
            "history_size": (100, 1),
            "line_search_fn": (None, "strong_wolfe"),
        },
        (),
        "loss",
    ),
)  # fmt: skip
KIND_OF: Mapping[Any, OptimizerKind] = {kind.make: kind for kind in KINDS}

FUSED = frozenset({"SGD", "Adam", "AdamW"})
"""Optimizers with a fused form on CUDA."""

COARSE = (torch.optim.ASGD, torch.optim.NAdam)
"""Optimizers that keep factors in float32: their parameters of float64 are compared as float32."""

_FACTORS = (1.0, -0.75, -0.5, -0.25, -0.5, 0.5, 1.0)
"""Changes of the gradient from step to step: Rprop distinguishes a sign that turns from one that stays."""


def gradient(parameter: torch.Tensor, data: str, number: int, step: int) -> torch.Tensor:
    """Return a gradient of a parameter, numbered from 1, in a step, numbered from 0."""
    if data == "loss":
        return (parameter - 1) * number
    if data == "matrices":
        # Far from singular: Muon divides by the singular values. It ignores the length, so the direction changes.
        one = torch.eye(*parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return one.roll(step, 1) * (4 / (1 + 3 * step)) + parameter / 8
    # Away from 0, where rounding could change the sign.
    return (parameter.abs() * number + 0.5) * _FACTORS[step]
