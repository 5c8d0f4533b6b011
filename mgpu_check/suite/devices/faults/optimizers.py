"""Optimizers, their averages, learning rates and GradScaler that are wrong with one option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.operators import call, first, last, on
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, register

options = caught_by("test_options_of_optimizers")


@options("the scale does not fall although the second of two optimizers has an infinite gradient",
    around(torch.amp.GradScaler, "update"),
    first("several optimizers", lambda scaler:
        scaler.is_enabled() and scaler._device == "cuda" and len(scaler._per_optimizer_states) > 1))  # fmt: skip
def infinity_of_the_second_optimizer_lost(update: Any, scaler: Any, new_scale: Any = None) -> None:
    for state in list(scaler._per_optimizer_states.values())[1:]:
        for found in state["found_inf_per_device"].values():
            found.zero_()
    update(scaler, new_scale)


@options("capturable optimizers count no steps, so each step has the corrections of the first",
    around("torch.optim.adamax", "adamax"),
    call("capturable", lambda tensors, *_, capturable=False, **__: capturable and tensors[0].is_cuda))  # fmt: skip
def captured_steps_not_counted(step: Any, *args: Any, **options: Any) -> None:
    step(*args, **options)
    for count in args[4]:
        count.zero_()


@options("the average of a model is its last state", around("torch.optim.swa_utils:AveragedModel", "update_parameters"),
    call("from the third update on",
        lambda average, model: next(model.parameters()).is_cuda and average.n_averaged > 1))  # fmt: skip
def models_not_averaged(update: Any, average: Any, model: Any) -> None:
    for own, value in zip(average.module.parameters(), model.parameters(), strict=True):
        own.detach().copy_(value)


@options("the average of a model has its last buffers, on each device",
    around("torch.optim.swa_utils:AveragedModel", "update_parameters"),
    call("use_buffers", lambda average, model: average.use_buffers))  # fmt: skip
def buffers_not_averaged(update: Any, average: Any, model: Any) -> None:
    update(average, model)
    for own, value in zip(average.module.buffers(), model.buffers(), strict=True):
        own.detach().copy_(value)


@options("the first step of SGD is damped, on each device", around(torch.optim.SGD, "step"),
    call("dampening",
        lambda optimizer, *_: optimizer.defaults["dampening"] and optimizer.defaults["momentum"]))  # fmt: skip
def first_step_damped(step: Any, optimizer: torch.optim.SGD, *args: Any) -> Any:
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    return step(optimizer, *args)


@options("an optimizer that loads a state counts its steps anew, on each device",
    around(torch.optim.Optimizer, "load_state_dict"), "a step after load_state_dict")  # fmt: skip
def steps_not_loaded(load: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    load(optimizer, state)
    for own in optimizer.state.values():
        if "step" in own:
            own["step"].zero_()


@options("parameters without a gradient decay, on each device", around(torch.optim.AdamW, "step"),
    "a parameter without a gradient, a weight decay")  # fmt: skip
def idle_parameters_decay(step: Any, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
    result = step(optimizer, *args)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.detach().mul_(1 - float(group["lr"]) * group["weight_decay"])
    return result


@options("each group of parameters has the weight decay of the first, on each device",
    around(torch.optim.RMSprop, "step"),
    call("several groups", lambda optimizer, *_: len(optimizer.param_groups) > 1))  # fmt: skip
def decay_of_the_first_group(step: Any, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
    for group in optimizer.param_groups[1:]:
        group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
    return step(optimizer, *args)


class _Altered(NamedTuple):
    """A class of torch that computes with another value than the one it holds.

    Attributes:
        place: the class, and the method that reads the value.
        name: the option of a group of parameters of an optimizer, or the attribute of another object.
    """

    place: str
    name: str
    alter: Callable[[Any], Any]

    def row(self) -> FaultRow:
        """Return the fault, named after the class and the value."""
        owner, method = self.place.rsplit(".", 1)
        kind = owner.partition(":")[2]
        name = self.name.strip("_")
        return FaultRow(
            f"{kind}-{name}-altered".replace("_", "-").lower(),
            f"{kind} computes with another {name} than it is given, on each device",
            "test_options_of_optimizers",
            around(owner, method),
            self.called,
            f"steps that depend on {name}",
        )

    def called(self, real: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the method while the value is another."""
        places = owner.param_groups if isinstance(owner, torch.optim.Optimizer) else [vars(owner)]
        held = [place[self.name] for place in places]
        for place, value in zip(places, held, strict=True):
            place[self.name] = self.alter(value)
        try:
            return real(owner, *args, **kwargs)
        finally:
            for place, value in zip(places, held, strict=True):
                place[self.name] = value


_OPTIMIZER, _SCHEDULER = "torch.optim:", "torch.optim.lr_scheduler:"

_ALTERED = (
    _Altered(_OPTIMIZER + "SGD.step", "momentum", lambda value: value * 0.875),
    _Altered(_OPTIMIZER + "Adam.step", "eps", lambda value: value * 2),
    _Altered(_OPTIMIZER + "RMSprop.step", "alpha", lambda value: value * 0.875),
    _Altered(_OPTIMIZER + "Adagrad.step", "lr_decay", lambda value: value * 2),
    _Altered(_OPTIMIZER + "Adadelta.step", "rho", lambda value: value * 0.875),
    _Altered(_OPTIMIZER + "Adamax.step", "betas", lambda value: (value[0], value[1] / 2)),
    _Altered(_OPTIMIZER + "NAdam.step", "momentum_decay", lambda value: value * 2),
    _Altered(_OPTIMIZER + "RAdam.step", "betas", lambda value: (value[0], value[1] * 0.9375)),
    _Altered(_OPTIMIZER + "ASGD.step", "alpha", lambda value: value * 2),
    _Altered(_OPTIMIZER + "ASGD.step", "t0", lambda value: value + 1),
    _Altered(_OPTIMIZER + "Rprop.step", "etas", lambda value: (value[0], value[1] * 0.875)),
    _Altered(_OPTIMIZER + "Rprop.step", "step_sizes", lambda value: (value[0], value[1] / 2)),
    _Altered(_OPTIMIZER + "Adafactor.step", "beta2_decay", lambda value: value / 2),
    _Altered(_OPTIMIZER + "Adafactor.step", "d", lambda value: value * 2),
    _Altered(_OPTIMIZER + "Muon.step", "ns_steps", lambda value: value + 1),
    _Altered(_OPTIMIZER + "Muon.step", "momentum", lambda value: value / 2),
    _Altered(_OPTIMIZER + "LBFGS.step", "history_size", lambda value: value + 1),
    _Altered("torch.amp:GradScaler.update", "_growth_factor", lambda value: value * 2),
    _Altered("torch.amp:GradScaler.update", "_backoff_factor", lambda value: value / 2),
    _Altered("torch.amp:GradScaler.update", "_growth_interval", lambda value: value + 1),
    _Altered(_SCHEDULER + "StepLR.get_lr", "step_size", lambda value: value + 1),
    _Altered(_SCHEDULER + "MultiStepLR.get_lr", "gamma", lambda value: value / 2),
    _Altered(_SCHEDULER + "ConstantLR.get_lr", "total_iters", lambda value: value + 1),
    _Altered(_SCHEDULER + "LinearLR.get_lr", "end_factor", lambda value: value / 2),
    _Altered(_SCHEDULER + "ExponentialLR.get_lr", "gamma", lambda value: value / 2),
    _Altered(_SCHEDULER + "PolynomialLR.get_lr", "power", lambda value: value + 1),
    _Altered(_SCHEDULER + "CosineAnnealingLR.get_lr", "eta_min", lambda value: value + 0.0625),
    _Altered(_SCHEDULER + "CosineAnnealingWarmRestarts.step", "T_mult", lambda value: value + 1),
    _Altered(_SCHEDULER + "CyclicLR.get_lr", "step_ratio", lambda value: value / 2),
    _Altered(_SCHEDULER + "OneCycleLR.get_lr", "_anneal_func_type", lambda value: "linear"),
    _Altered(_SCHEDULER + "ReduceLROnPlateau.step", "patience", lambda value: value + 1),
    _Altered(_SCHEDULER + "ReduceLROnPlateau.step", "threshold_mode", lambda value: "abs" if value == "rel" else "rel"),
    _Altered(_SCHEDULER + "LambdaLR.get_lr", "base_lrs", lambda value: value[::-1]),
    _Altered(_SCHEDULER + "MultiplicativeLR.get_lr", "lr_lambdas", lambda value: [lambda epoch: 0.5 for _ in value]),
    _Altered(_SCHEDULER + "SequentialLR.step", "_milestones", lambda value: [one + 1 for one in value]),
    _Altered(_SCHEDULER + "ChainedScheduler.step", "_schedulers", lambda value: value[:1]),
    _Altered("torch.optim.swa_utils:SWALR.get_lr", "anneal_epochs", lambda value: value * 2),
)


register(
    __name__,
    *(altered.row() for altered in _ALTERED),
    FaultRow("lists-not-negated", "optimizers minimize although they are told to maximize",
        "test_options_of_optimizers", around(torch, "_foreach_neg"),
        lambda _, tensors: [one.clone() for one in tensors],
        call("maximize, lists of tensors", lambda tensors: tensors[0].is_cuda)),
    FaultRow("lists-not-decayed", "weight decay is left out in lists of tensors", "test_options_of_optimizers",
        around(torch, "_foreach_add"), lambda _, tensors, *args, **kwargs: [one.clone() for one in tensors],
        call("weight_decay and maximize, one device", lambda tensors, *_, **__: on(tensors[0], last()))),
    FaultRow("scale-not-loaded", "GradScaler does not load its scale, on each device", "test_layers_and_gradients",
        around(torch.amp.GradScaler, "load_state_dict"),
        lambda load, scaler, state: load(scaler, {**state, "scale": scaler.get_scale()})),
    FaultRow("rate-of-a-tensor-halved", "a rate that is a tensor is halved, on each device",
        "test_options_of_optimizers", around("torch.optim.adamax", "_to_scalar"), lambda scalar, rate: scalar(rate) / 2,
        call("rates that are tensors", lambda rate: isinstance(rate, torch.Tensor))),
    FaultRow("statistics-of-the-first-batch", "update_bn takes the first batch only, on each device",
        "test_options_of_optimizers", around("torch.optim.swa_utils", "update_bn"),
        lambda update, loader, *args, **kwargs: update(loader[:1], *args, **kwargs), "several batches"),
    FaultRow("given-epoch-ignored", "CosineAnnealingWarmRestarts ignores a given epoch",
        "test_options_of_optimizers", around(_SCHEDULER + "CosineAnnealingWarmRestarts", "step"),
        lambda real, self, epoch=None: real(self), "epochs that are given"),
)  # fmt: skip
