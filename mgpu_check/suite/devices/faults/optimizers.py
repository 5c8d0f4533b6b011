"""Optimizers, their averages and GradScaler that are wrong with one option."""

from __future__ import annotations

from typing import Any

import torch

from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.operators import call, first, last, on
from mgpu_check.suite.common.faults.registry import caught_by

layers = caught_by("test_layers_and_gradients")
options = caught_by("test_options_of_optimizers")


@options(
    "optimizers minimize although they are told to maximize",
    around(torch, "_foreach_neg"),
    call("maximize, lists of tensors", lambda tensors: tensors[0].is_cuda),
)
def lists_not_negated(_: Any, tensors: Any) -> Any:
    return [one.clone() for one in tensors]


@options(
    "weight decay is left out in lists of tensors",
    around(torch, "_foreach_add"),
    call("weight_decay and maximize, one device", lambda tensors, *_, **__: on(tensors[0], last())),
)
def lists_not_decayed(_: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    return [one.clone() for one in tensors]


@options(
    "the scale does not fall although the second of two optimizers has an infinite gradient",
    around(torch.amp.GradScaler, "update"),
    first(
        "several optimizers",
        lambda scaler: scaler.is_enabled() and scaler._device == "cuda" and len(scaler._per_optimizer_states) > 1,
    ),
)
def infinity_of_the_second_optimizer_lost(update: Any, scaler: Any, new_scale: Any = None) -> None:
    for state in list(scaler._per_optimizer_states.values())[1:]:
        for found in state["found_inf_per_device"].values():
            found.zero_()
    update(scaler, new_scale)


@options(
    "capturable optimizers count no steps, so each step has the corrections of the first",
    around("torch.optim.adamax", "adamax"),
    call("capturable", lambda tensors, *_, capturable=False, **__: capturable and tensors[0].is_cuda),
)
def captured_steps_not_counted(step: Any, *args: Any, **options: Any) -> None:
    step(*args, **options)
    for count in args[4]:
        count.zero_()


@options(
    "the average of a model is its last state",
    around("torch.optim.swa_utils:AveragedModel", "update_parameters"),
    call(
        "from the third update on", lambda average, model: next(model.parameters()).is_cuda and average.n_averaged > 1
    ),
)
def models_not_averaged(update: Any, average: Any, model: Any) -> None:
    for own, value in zip(average.module.parameters(), model.parameters(), strict=True):
        own.detach().copy_(value)


@options(
    "the average of a model has its last buffers, on each device",
    around("torch.optim.swa_utils:AveragedModel", "update_parameters"),
    call("use_buffers", lambda average, model: average.use_buffers),
)
def buffers_not_averaged(update: Any, average: Any, model: Any) -> None:
    update(average, model)
    for own, value in zip(average.module.buffers(), model.buffers(), strict=True):
        own.detach().copy_(value)


@options(
    "the first step of SGD is damped, on each device",
    around(torch.optim.SGD, "step"),
    call("dampening", lambda optimizer, *_: optimizer.defaults["dampening"] and optimizer.defaults["momentum"]),
)
def first_step_damped(step: Any, optimizer: torch.optim.SGD, *args: Any) -> Any:
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    return step(optimizer, *args)


@layers("GradScaler does not load its scale, on each device", around(torch.amp.GradScaler, "load_state_dict"))
def scale_not_loaded(load: Any, scaler: torch.amp.GradScaler, state: dict[str, Any]) -> None:
    load(scaler, {**state, "scale": scaler.get_scale()})
