"""Yield the learning rates of each scheduler of torch, next to its closed form."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import lr_scheduler, swa_utils

from mgpu_check.suite.common.agreement import Case
from mgpu_check.suite.common.pairs import drawn_rows, words_of

_BASES = (0.125, 0.5)
"""The initial learning rates of two groups of parameters."""
_MOMENTUM = 0.9
_STEPS = 12
_METRICS = (8.0, 4.0, 4.0, 3.5, 3.99, 4.5, 5.0, 8.5, 5.0, 2.0, 2.1, 2.2)
"""Losses for ReduceLROnPlateau: they fall, stay, and rise. By 3.5 after 4.0, and 8.5 after 8.0, a threshold of 0.25 is
passed as a difference only, not as a share."""
_WAYS = (False, True)


class _Scheduler(NamedTuple):
    """A scheduler with the values of its options, the default first.

    Attributes:
        rate: the closed form: from options, initial rate and number of steps to the rate, or to rate and momentum. For
            ReduceLROnPlateau it is the loop that torch documents.
    """

    make: Any
    values: Mapping[str, Sequence[Any]]
    rate: Callable[[Any, float, int], Any]


def _halved(epoch: int) -> float:
    return 1 / (2 + epoch)


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def _line(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


_BETWEEN = {"cos": _cosine, "linear": _line}


def _restarted(o: Any, base: float, t: int) -> float:
    length = o.T_0
    while t >= length:
        t, length = t - length, length * o.T_mult
    return _cosine(base, o.eta_min, t / length)


def _cycled(o: Any, base: float, t: int) -> tuple[float, float]:
    up, down = o.step_size_up, o.step_size_up if o.step_size_down is None else o.step_size_down
    cycle, place = divmod(t, up + down)
    height = place / up if place <= up else (up + down - place) / down
    scale = {"triangular": 1.0, "triangular2": 0.5**cycle, "exp_range": o.gamma**t}[o.mode]
    if o.scale_fn is not None:
        scale = o.scale_fn(cycle + 1 if o.scale_mode == "cycle" else t)
    least, most = o.base_momentum, o.max_momentum
    momentum = most - (most - least) * height * scale if o.cycle_momentum else _MOMENTUM
    return o.base_lr + (o.max_lr - o.base_lr) * height * scale, momentum


def _once(o: Any, base: float, t: int) -> tuple[float, float]:
    total = o.total_steps or o.epochs * o.steps_per_epoch
    start, end = o.max_lr / o.div_factor, o.max_lr / o.div_factor / o.final_div_factor
    peak = o.pct_start * total - 1
    phases = [(0.0, start, o.max_momentum), (peak, o.max_lr, o.base_momentum)]
    phases += [(2 * peak, start, o.max_momentum)] if o.three_phase else []
    phases.append((total - 1, end, o.max_momentum))
    (begun, *old), (ended, *new) = next(two for two in itertools.pairwise(phases) if t <= two[1][0])
    share = (t - begun) / (ended - begun)
    rate, momentum = (_BETWEEN[o.anneal_strategy](*ends, share) for ends in zip(old, new, strict=True))
    return rate, momentum if o.cycle_momentum else _MOMENTUM


def _on_plateau(o: Any, base: float, t: int) -> float:
    best, bad, waits = None, 0, 0
    for metric in _METRICS[:t]:
        sign = 1 if o.mode == "min" else -1
        if best is None:
            better = True
        elif o.threshold_mode == "rel":
            better = sign * metric < sign * best * (1 - sign * o.threshold)
        else:
            better = sign * metric < sign * best - o.threshold
        best, bad = (metric, 0) if better else (best, bad + 1)
        if waits:
            waits, bad = waits - 1, 0
        if bad > o.patience:
            new = max(base * o.factor, o.min_lr)
            base, waits, bad = new if base - new > o.eps else base, o.cooldown, 0
    return base


def _sequence(optimizer: Any, milestone: int) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 20), lr_scheduler.ExponentialLR(optimizer, 0.75)]
    return lr_scheduler.SequentialLR(optimizer, parts, [milestone])


def _chain(optimizer: Any, gamma: float) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, gamma)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


_SCHEDULERS = (
    _Scheduler(lr_scheduler.LambdaLR, {"lr_lambda": (_halved,)}, lambda o, base, t: base * o.lr_lambda(t)),
    _Scheduler(
        lr_scheduler.MultiplicativeLR,
        {"lr_lambda": (_halved,)},
        lambda o, base, t: base * math.prod(o.lr_lambda(at) for at in range(1, t + 1)),
    ),
    _Scheduler(
        lr_scheduler.StepLR,
        {"step_size": (3, 5), "gamma": (0.1, 0.5)},
        lambda o, base, t: base * o.gamma ** (t // o.step_size),
    ),
    _Scheduler(
        lr_scheduler.MultiStepLR,
        {"milestones": ((2, 7), (4, 4, 9)), "gamma": (0.1, 0.5)},
        lambda o, base, t: base * o.gamma ** sum(at <= t for at in o.milestones),
    ),
    _Scheduler(
        lr_scheduler.ConstantLR,
        {"factor": (1 / 3, 0.5), "total_iters": (5, 3)},
        lambda o, base, t: base * o.factor if t < o.total_iters else base,
    ),
    _Scheduler(
        lr_scheduler.LinearLR,
        {"start_factor": (1 / 3, 0.25), "end_factor": (1.0, 0.75), "total_iters": (5, 9)},
        lambda o, base, t: base * _line(o.start_factor, o.end_factor, min(1, t / o.total_iters)),
    ),
    _Scheduler(lr_scheduler.ExponentialLR, {"gamma": (0.5, 0.9)}, lambda o, base, t: base * o.gamma**t),
    _Scheduler(
        lr_scheduler.PolynomialLR,
        {"total_iters": (5, 11), "power": (1.0, 2.0)},
        lambda o, base, t: base * (1 - min(1, t / o.total_iters)) ** o.power,
    ),
    _Scheduler(
        lr_scheduler.CosineAnnealingLR,
        {"T_max": (5, 20), "eta_min": (0.0, 0.0625)},
        lambda o, base, t: _cosine(base, o.eta_min, t / o.T_max),
    ),
    _Scheduler(
        lr_scheduler.CosineAnnealingWarmRestarts,
        {"T_0": (3, 5), "T_mult": (1, 2), "eta_min": (0.0, 0.0625)},
        _restarted,
    ),
    _Scheduler(
        lr_scheduler.CyclicLR,
        {
            "base_lr": (0.125, 0.0625),
            "max_lr": (0.5,),
            "step_size_up": (2, 3),
            "step_size_down": (None, 4),
            "mode": ("triangular", "triangular2", "exp_range"),
            "gamma": (1.0, 0.75),
            "scale_fn": (None, _halved),
            "scale_mode": ("cycle", "iterations"),
            "cycle_momentum": (True, False),
            "base_momentum": (0.8, 0.5),
            "max_momentum": (0.9, 0.75),
        },
        _cycled,
    ),
    _Scheduler(
        lr_scheduler.OneCycleLR,
        {
            "max_lr": (0.5,),
            "total_steps": (None, 13),
            "epochs": (4,),
            "steps_per_epoch": (5,),
            "pct_start": (0.3, 0.25),
            "anneal_strategy": ("cos", "linear"),
            "cycle_momentum": (True, False),
            "base_momentum": (0.85, 0.5),
            "max_momentum": (0.95, 0.75),
            "div_factor": (25.0, 4.0),
            "final_div_factor": (1e4, 8.0),
            "three_phase": _WAYS,
        },
        _once,
    ),
    _Scheduler(
        lr_scheduler.ReduceLROnPlateau,
        {
            "mode": ("min", "max"),
            "factor": (0.1, 0.5),
            "patience": (10, 0, 2),
            "threshold": (1e-4, 0.25),
            "threshold_mode": ("rel", "abs"),
            "cooldown": (0, 2),
            "min_lr": (0.0, 0.0625),
            "eps": (1e-8, 0.25),
        },
        _on_plateau,
    ),
    _Scheduler(
        swa_utils.SWALR,
        {"swa_lr": (0.25, 0.0625), "anneal_epochs": (10, 4), "anneal_strategy": ("cos", "linear")},
        lambda o, base, t: _BETWEEN[o.anneal_strategy](base, o.swa_lr, min(1, t / o.anneal_epochs)),
    ),
    _Scheduler(
        _sequence,
        {"milestone": (2, 5)},
        lambda o, base, t: base * (0.5 if t < o.milestone else 0.75 ** (t - o.milestone)),
    ),
    _Scheduler(_chain, {"gamma": (0.75, 0.5)}, lambda o, base, t: base * (0.5 if t < 4 else 1.0) * o.gamma**t),
)


def learning_rate_cases(seed: int = 0, *, more: bool = True) -> list[Iterator[Case]]:
    """Return for each scheduler its rates with each pair of values of its options; without `more`, only some rows.

    Further options are whether the rates are tensors, and whether another scheduler continues from a state.
    """
    schedulers = _SCHEDULERS if more else _SCHEDULERS[seed % 4 :: 4]
    return [_cases_of(scheduler, seed + number, more=more) for number, scheduler in enumerate(schedulers)]


def _cases_of(scheduler: _Scheduler, seed: int, *, more: bool) -> Iterator[Case]:
    # Older versions of torch take the initial rate of SequentialLR for the current one, if it is a tensor.
    tensors = (False,) if scheduler.make is _sequence else _WAYS
    options = {**scheduler.values, "tensors": tensors, "loaded": _WAYS}
    x = torch.zeros(3, dtype=torch.float64)
    for row in drawn_rows(options, seed=seed, more=more, share=16):
        name = f"{scheduler.make.__name__.strip('_')} with {words_of(row, options)}"
        yield Case(name, functools.partial(_rates, scheduler, row), (x,), "close")


def _rates(scheduler: _Scheduler, row: Mapping[str, Any], x: Tensor) -> Tensor:
    """Return the rates of two groups and their momentum, at first and after each step."""
    own = {name: row[name] for name in scheduler.values}
    if not x.is_cuda:
        epochs = [_epoch(scheduler, step) for step in range(_STEPS + 1)]
        found = [scheduler.rate(SimpleNamespace(**own), base, epoch) for epoch in epochs for base in _BASES]
        return x.new_tensor([one if isinstance(one, tuple) else (one, _MOMENTUM) for one in found])

    def made() -> tuple[torch.optim.Optimizer, Any]:
        bases = [x.new_tensor(base) for base in _BASES] if row["tensors"] else _BASES
        groups = [{"params": [x.clone().requires_grad_()], "lr": base} for base in bases]
        optimizer = torch.optim.SGD(groups, momentum=_MOMENTUM)
        return optimizer, scheduler.make(optimizer, **own)

    optimizer, schedule = made()
    found = []
    for step in range(_STEPS + 1):
        found += [(float(group["lr"]), group["momentum"]) for group in optimizer.param_groups]
        if step == _STEPS // 2 and row["loaded"]:
            states = optimizer.state_dict(), schedule.state_dict()
            optimizer, schedule = made()
            for one, state in zip((optimizer, schedule), states, strict=True):
                one.load_state_dict(state)
        if step < _STEPS:
            optimizer.step()
            schedule.step(*_given(scheduler, step))
    return x.new_tensor(found)


def _jumps(scheduler: _Scheduler) -> bool:
    """Return whether every second step of the scheduler gets the next epoch but one."""
    return scheduler.make is lr_scheduler.CosineAnnealingWarmRestarts


def _epoch(scheduler: _Scheduler, steps: int) -> int:
    return steps + steps // 2 if _jumps(scheduler) else steps


def _given(scheduler: _Scheduler, step: int) -> Sequence[float]:
    """Return what a step of the scheduler gets: a metric, an epoch, or nothing."""
    if scheduler.make is lr_scheduler.ReduceLROnPlateau:
        return _METRICS[step : step + 1]
    return [_epoch(scheduler, step + 1)] if _jumps(scheduler) and step % 2 else []
