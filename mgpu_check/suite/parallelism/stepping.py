"""Check clipping, scaling and stepping of a model whose parameters are on several devices of a process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mgpu_check.asserts.gradients import assert_gradients_agree
from mgpu_check.errors import GradientMismatch
from mgpu_check.suite.common.documented_steps import DocumentedSteps
from mgpu_check.suite.common.exact_training.reference import ADAM_RATE, adam_tolerance
from mgpu_check.torch_hooks.tensors import copied

_SHAPES = ((2, 3), (5,))
"""Shapes of the parameters on each device."""

_FORMS = ("foreach", "fused", "")
"""Options of optimizers; "" steps parameter by parameter."""

_OPTIMIZERS: Mapping[Callable[..., torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.SGD: {"lr": 0.25, "momentum": 0.5, "dampening": 0.0, "nesterov": False},
    torch.optim.Adam: {"lr": ADAM_RATE, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": True},
}
"""Optimizers with the options that their documented steps read."""


def assert_clipped_over_devices(devices: Sequence[torch.device], seed: int) -> None:
    """Assert that gradients on several devices are clipped by their common norm, and by value.

    Clips by the norms 1, 2, 3 and inf, tensor by tensor and by kernels for lists of tensors. With `error_if_nonfinite`
    an infinite gradient must raise, and change no other gradient.

    Args:
        devices: at least one, in any order; the norm is computed on the first.
    """
    count = len(devices)
    # The largest element must be on one device only, and not always on the first: otherwise its norm is that of all.
    factors = [1 + (number + seed) % count for number in range(count) for _ in _SHAPES]
    right = [gradient * factor for gradient, factor in zip(_drawn(count, seed), factors, strict=True)]
    for order, foreach in itertools.product((1.0, 2.0, 3.0, float("inf")), (None, True, False)):
        whole = torch.cat([gradient.double().reshape(-1) for gradient in right])
        norm = torch.linalg.vector_norm(whole, order)
        held = _on(devices, right)
        got = nn.utils.clip_grad_norm_(held, 1.0, norm_type=order, foreach=foreach)
        # Torch adds 1e-6 to the norm; the gradients are never 0.
        expected = {"norm": norm} | _named([gradient.double() / (norm + 1e-6) for gradient in right])
        # About a dozen roundings of 2^-24 each, relative to the largest element.
        tolerance = {name: 2.0**-19 * float(value.abs().max()) for name, value in expected.items()}
        what = f"clip_grad_norm_ of order {order:g} over {', '.join(map(str, devices))}, foreach={foreach}"
        assert_gradients_agree({"norm": got} | _gradients(held), expected, tolerance=tolerance, what=what)
    for foreach in (None, True, False):
        _assert_infinity_refused(devices, right, foreach)
        held = _on(devices, right)
        nn.utils.clip_grad_value_(held, 2.0, foreach=foreach)
        expected = _named([gradient.clamp(-2, 2) for gradient in right])
        what = f"clip_grad_value_ over {', '.join(map(str, devices))}, foreach={foreach}"
        assert_gradients_agree(_gradients(held), expected, tolerance=dict.fromkeys(expected, 0.0), what=what)


def _assert_infinity_refused(devices: Sequence[torch.device], right: list[torch.Tensor], foreach: bool | None) -> None:
    held = _on(devices, right)
    spoilt = held[-1].grad
    assert spoilt is not None
    spoilt[-1:] = torch.inf
    what = f"clip_grad_norm_ of an infinite gradient over {', '.join(map(str, devices))}, {foreach=}"
    try:
        nn.utils.clip_grad_norm_(held, 1.0, error_if_nonfinite=True, foreach=foreach)
    except RuntimeError as error:
        if "non-finite" not in str(error):
            raise GradientMismatch(f"{what}: it raised another error: {error}") from error
        kept = _named([gradient.double() for gradient in right[:-1]])
        assert_gradients_agree(_gradients(held[:-1]), kept, tolerance=dict.fromkeys(kept, 0.0), what=what)
    else:
        raise GradientMismatch(f"{what}: error_if_nonfinite=True raised no error")


def assert_stepped_over_devices(devices: Sequence[torch.device], seed: int) -> None:
    """Assert that an optimizer steps parameters on several devices as on one, and that a GradScaler skips on all.

    SGD and Adam step tensor by tensor, by kernels for lists of tensors, and fused. Between two steps each device in
    turn has an infinite gradient, and this step must be skipped.
    """
    for make, own in _OPTIMIZERS.items():
        expected = _expected(len(devices), seed, make)
        name = make.__name__
        # SGD only adds small whole numbers times powers of two, which is exact.
        tolerance: Any = dict.fromkeys(expected, 0.0) if name == "SGD" else adam_tolerance(expected, 4 * ADAM_RATE)
        for form in _FORMS:
            options = {form: True} if form else {"foreach": False}
            what = f"{name} with {options} and a GradScaler over {', '.join(map(str, devices))}"
            got = _stepped(devices, seed, functools.partial(make, **own, **options))
            assert_gradients_agree(got, expected, tolerance=tolerance, what=what)


def _stepped(devices: Sequence[torch.device], seed: int, make: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return parameters and scale after a step, one step to be skipped for each device, and another step."""
    count = len(devices)
    parameters, first, second = (_on(devices, _drawn(count, seed + number)) for number in range(3))
    groups = [{"params": parameters[start::2]} for start in (0, 1)]
    optimizer, scaler = make(groups), torch.amp.GradScaler("cuda", init_scale=2.0**count)
    for step, gradients in enumerate([first, *([second] * count), second]):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = scaler.scale(gradient.detach())
        if 1 <= step <= count:
            spoilt = parameters[len(_SHAPES) * step - 1].grad
            assert spoilt is not None
            spoilt[-1:] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    return {"scale": torch.tensor(scaler.get_scale())} | _named([copied(parameter) for parameter in parameters])


def _expected(count: int, seed: int, make: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the right result of `_stepped`: the first and the last step, as documented, in float64 on the CPU.

    The scale starts at 2^count and is halved for each device, so it ends at 1.
    """
    parameters = [value.double() for value in _drawn(count, seed)]
    steps, options = DocumentedSteps(make), [_OPTIMIZERS[make]] * len(parameters)
    for step in (1, 2):
        parameters = steps.stepped(parameters, [one.double() for one in _drawn(count, seed + step)], options)
    return {"scale": torch.ones((), dtype=torch.float64)} | _named(parameters)


def _drawn(count: int, seed: int) -> list[torch.Tensor]:
    """Return whole numbers from 1 to 7, with alternating signs, for the parameters on `count` devices: float32, CPU."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(1, 8, shape, generator=generator) for _ in range(count) for shape in _SHAPES]
    return [(values * (-1) ** number).float() for number, values in enumerate(drawn)]


def _on(devices: Sequence[torch.device], values: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    """Return parameters with these values and equal gradients, the same number on each device."""
    held = []
    for number, value in enumerate(values):
        parameter = nn.Parameter(value.to(devices[number // len(_SHAPES)]))
        parameter.grad = parameter.detach().clone()
        held.append(parameter)
    return held


def _named(values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    count = len(_SHAPES)
    return {f"parameter {number % count} of device {number // count}": value for number, value in enumerate(values)}


def _gradients(parameters: Sequence[nn.Parameter]) -> dict[str, torch.Tensor]:
    return _named([copied(parameter.grad) for parameter in parameters if parameter.grad is not None])
