"""Compare hand-written parallelism with one device, bit for bit, on exact data.

It is on the devices of one process, or between ranks. For a model whose parameters are on several devices of a
process, clipping, scaling and stepping are checked, too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mgpu_check.asserts.collectives import assert_allreduce_matches
from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.models import assert_gradients_agree, assert_same
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import GradientMismatch, ReplicaMismatch
from mgpu_check.numerics.steps import full_precision
from mgpu_check.oracles.training import gradient_exchange
from mgpu_check.oracles.training import training_steps as recipe
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.oracles.training.reference_training import (
    ADAM_RATE,
    DocumentedSteps,
    adam_tolerance,
    one_device,
    seen,
    sgd,
)
from mgpu_check.suite.recipes import model_parallel
from mgpu_check.torch_hooks.tensors import copied


def assert_model_parallel_agrees(training: ExactTraining, devices: Sequence[torch.device]) -> None:
    """Assert that a model with parts on several devices, as stages or as parallel branches, trains as on one device.

    With SGD and momentum the results must be equal bit for bit; with Adam they may differ by the rounding of its
    elementwise arithmetic. Each parameter, its gradient and its state must stay on the device of the parameter.
    """
    for name, build, make_modules in (
        ("stages", model_parallel.Staged, _stages),
        (
            "branches",
            model_parallel.Branched,
            lambda training, count: [
                ExactTraining(training.widths, seed=training.seed + 7 * index).model() for index in range(count)
            ],
        ),
    ):
        label = f"{name} on {', '.join(map(str, devices))}"
        make = functools.partial(make_modules, training, len(devices))
        with full_precision():
            model = build(make(), devices)
            homes = {name: value.device for name, value in model.named_parameters()}
            optimizer = sgd(training, model)
            got = {}
            for step, (inputs, factors) in enumerate(training.batches(), 1):
                optimizer.zero_grad()
                outputs = model(inputs.to(devices[0]))
                recipe.weighted(outputs, factors.to(devices[-1])).backward()
                optimizer.step()
                got[f"step {step}: outputs"] = copied(outputs)
                got |= seen(model, step)
                _assert_at_home(model, optimizer, homes, f"{label}, step {step}")
            moments = _adam(training, build(make(), devices), devices, label)
        assert_same(got, one_device(training, _PartsOnOneDevice(name, make())), label)
        expected = _adam(training, _PartsOnOneDevice(name, make()), [torch.device("cpu")] * len(devices), label)
        assert_gradients_agree(moments, expected, tolerance=adam_tolerance(expected, ADAM_RATE), what=f"{label}, Adam")


class _PartsOnOneDevice(nn.Module):
    """Stages or branches on one device, with the same parameter names as those on several."""

    def __init__(self, name: str, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList(parts))
        self.name, self.parts = name, list(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.name == "branches":
            return torch.stack([branch(x) for branch in self.parts]).sum(0)
        for stage in self.parts:
            x = stage(x)
        return x


def _stages(training: ExactTraining, count: int) -> list[nn.Module]:
    """Divide the layers into nonempty stages; a ReLU stays with the layer before it."""
    layers = list(training.model())
    starts = list(range(0, len(layers), 2))
    cuts = [starts[index * len(starts) // count] for index in range(count)] + [len(layers)]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(cuts)]


def _adam(
    training: ExactTraining, model: nn.Module, devices: Sequence[torch.device], label: str
) -> dict[str, torch.Tensor]:
    """Take two steps with the exact gradients of the start, because later gradients would depend on rounding."""
    homes = {name: value.device for name, value in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=ADAM_RATE)
    inputs, factors = training.batches()[0]
    recipe.weighted(model(inputs.to(devices[0])), factors.to(devices[-1])).backward()
    for _ in range(2):
        optimizer.step()
    _assert_at_home(model, optimizer, homes, f"{label}, Adam")
    got: dict[str, torch.Tensor] = {}
    for name, value in model.named_parameters():
        state = optimizer.state[value]
        got |= {f"{key} of {name}": copied(state[key]) for key in ("exp_avg", "exp_avg_sq")}
        got[name] = copied(value)
    return got


def _assert_at_home(
    model: nn.Module, optimizer: torch.optim.Optimizer, homes: Mapping[str, torch.device], label: str
) -> None:
    for name, value in model.named_parameters():
        tensors = {name: value, f"the gradient of {name}": recipe.gradient_of(value)}
        state = optimizer.state[value]
        # Skip tensors without dimensions: the number of steps may be on the host.
        tensors |= {f"{key} of {name}": tensor for key, tensor in state.items() if getattr(tensor, "shape", None)}
        for tensor_name, tensor in tensors.items():
            if tensor.device != homes[name]:
                raise ReplicaMismatch(f"{label}: {tensor_name} is on {tensor.device}; {name} was put on {homes[name]}")


_SHAPES = ((2, 3), (5,))  # shapes of the parameters on each device

_FORMS = ("foreach", "fused", "")  # options of optimizers; "" steps parameter by parameter

_OPTIMIZERS: Mapping[Callable[..., torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.SGD: {"lr": 0.25, "momentum": 0.5, "dampening": 0.0, "nesterov": False},
    torch.optim.Adam: {"lr": ADAM_RATE, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": True},
}
"""Optimizers with the options that their documented steps read."""


def assert_clipped_over_devices(devices: Sequence[torch.device], seed: int) -> None:
    """Assert that gradients on several devices are clipped by their common norm, and by value.

    Clips by the norms 1, 2, 3 and inf, tensor by tensor and by kernels for lists of tensors. With `error_if_nonfinite`
    an infinite gradient must raise, and change no other gradient. The norm is computed on the first of `devices`.
    """
    count, places = len(devices), ", ".join(map(str, devices))
    # The largest element must be on one device only, and not always on the first: otherwise its norm is that of all.
    factors = [1 + (number + seed) % count for number in range(count) for _ in _SHAPES]
    gradients = [gradient * factor for gradient, factor in zip(_drawn(count, seed), factors, strict=True)]
    for order, foreach in itertools.product((1.0, 2.0, 3.0, float("inf")), (None, True, False)):
        norm = torch.linalg.vector_norm(torch.cat([gradient.double().reshape(-1) for gradient in gradients]), order)
        parameters = _on(devices, gradients)
        got = nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=order, foreach=foreach)
        # Torch adds 1e-6 to the norm (torch/nn/utils/clip_grad.py, torch 2.13); the gradients are never 0.
        expected = {"norm": norm} | _named([gradient.double() / (norm + 1e-6) for gradient in gradients])
        # About a dozen roundings of 2^-24 each, relative to the largest element.
        tolerance = {name: 2.0**-19 * float(value.abs().max()) for name, value in expected.items()}
        label = f"clip_grad_norm_ of order {order:g} over {places}, {foreach=}"
        assert_gradients_agree({"norm": got} | _gradients(parameters), expected, tolerance=tolerance, what=label)
    for foreach in (None, True, False):
        _assert_infinity_refused(devices, gradients, foreach)
        parameters = _on(devices, gradients)
        nn.utils.clip_grad_value_(parameters, 2.0, foreach=foreach)
        expected = _named([gradient.clamp(-2, 2) for gradient in gradients])
        assert_same(_gradients(parameters), expected, f"clip_grad_value_ over {places}, {foreach=}")


def _assert_infinity_refused(
    devices: Sequence[torch.device], gradients: list[torch.Tensor], foreach: bool | None
) -> None:
    parameters = _on(devices, gradients)
    recipe.gradient_of(parameters[-1])[-1:] = torch.inf
    label = f"clip_grad_norm_ of an infinite gradient over {', '.join(map(str, devices))}, {foreach=}"
    try:
        nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True, foreach=foreach)
    except RuntimeError as error:
        if "non-finite" not in str(error):
            raise GradientMismatch(f"{label}: it raised another error: {error}") from error
        assert_same(_gradients(parameters[:-1]), _named([gradient.double() for gradient in gradients[:-1]]), label)
    else:
        raise GradientMismatch(f"{label}: error_if_nonfinite=True raised no error")


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
            label = f"{name} with {options} and a GradScaler over {', '.join(map(str, devices))}"
            got = _stepped(devices, seed, functools.partial(make, **own, **options))
            assert_gradients_agree(got, expected, tolerance=tolerance, what=label)


def _stepped(devices: Sequence[torch.device], seed: int, make: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return parameters and scale after a step, one step to be skipped for each device, and another step."""
    count = len(devices)
    parameters, earlier, later = (_on(devices, _drawn(count, seed + number)) for number in range(3))
    groups = [{"params": parameters[start::2]} for start in (0, 1)]
    optimizer, scaler = make(groups), torch.amp.GradScaler("cuda", init_scale=2.0**count)
    for step, gradients in enumerate([earlier, *([later] * count), later]):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = scaler.scale(gradient.detach())
        if 1 <= step <= count:
            recipe.gradient_of(parameters[len(_SHAPES) * step - 1])[-1:] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    return {"scale": torch.tensor(scaler.get_scale())} | _named([copied(parameter) for parameter in parameters])


def _expected(count: int, seed: int, make: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the right result of `_stepped`: the first and the last step, as documented, in float64 on the CPU.
    The scale starts at 2^count and is halved for each device, so it ends at 1."""
    parameters = [value.double() for value in _drawn(count, seed)]
    steps, options = DocumentedSteps(make), [_OPTIMIZERS[make]] * len(parameters)
    for step in (1, 2):
        parameters = steps.stepped(parameters, [gradient.double() for gradient in _drawn(count, seed + step)], options)
    return {"scale": torch.ones((), dtype=torch.float64)} | _named(parameters)


def _drawn(count: int, seed: int) -> list[torch.Tensor]:
    """Return whole numbers from 1 to 7, with alternating signs, for the parameters on `count` devices: float32, CPU."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(1, 8, shape, generator=generator) for _ in range(count) for shape in _SHAPES]
    return [(values * (-1) ** number).float() for number, values in enumerate(drawn)]


def _on(devices: Sequence[torch.device], values: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    parameters = []
    for number, value in enumerate(values):
        parameter = nn.Parameter(value.to(devices[number // len(_SHAPES)]))
        parameter.grad = parameter.detach().clone()
        parameters.append(parameter)
    return parameters


def _named(values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    count = len(_SHAPES)
    return {f"parameter {number % count} of device {number // count}": value for number, value in enumerate(values)}


def _gradients(parameters: Sequence[nn.Parameter]) -> dict[str, torch.Tensor]:
    return _named([copied(parameter.grad) for parameter in parameters if parameter.grad is not None])


RECIPES = ("ring_allreduce", "tree_allreduce", "halving_doubling_allreduce", "reduce_broadcast")
_LARGE = 65_537  # just above 64 Ki, where transports change their method
_SOME = 4_097
_DTYPES = ("float32", "int64", "float64", "bfloat16", "int32", "uint8", "float16", "int8")


def assert_allreduce_by_hand_matches(rank: Rank, seed: int) -> None:
    """Assert that each hand-written allreduce gives the exact sum. A collective.
    Sizes are 0, near the world size, and just above 4,096 and 64 Ki. `seed` rotates the dtypes among them."""
    sizes = (0, rank.size - 1, 2 * rank.size + 1, _SOME, _LARGE)
    with Findings() as findings:
        for number, elements in enumerate(sizes):
            dtype: torch.dtype = getattr(torch, _DTYPES[(seed + number) % len(_DTYPES)])
            terms = _terms(elements, dtype, rank.size, seed + number)
            # `torch.sum` would return int64 for integers.
            expected = functools.reduce(torch.add, terms)
            for name in RECIPES:
                tensor = terms[rank.index].to(rank.device, copy=True)
                getattr(gradient_exchange, name)(tensor)
                # A cheap comparison first, because examining each element takes longer than the sum.
                if torch.equal(copied(tensor), expected):
                    continue
                with findings.collected():
                    assert_allreduce_matches({rank.index: tensor}, terms, what=f"{name} on {rank.device}")


def _terms(elements: int, dtype: torch.dtype, count: int, seed: int) -> list[torch.Tensor]:
    """Return small whole numbers for each rank, whose sum every dtype holds; ranks and neighbouring elements differ."""
    most = max(1, 120 // count)
    index = torch.arange(elements)
    return [((index * 7 + rank * 5 + seed) % most + 1).to(dtype) for rank in range(count)]


def stage_of(expected: dict[str, torch.Tensor], stage: int, last: bool) -> dict[str, torch.Tensor]:
    """Return the right results for one stage of a pipeline, which calls its linear layer 0."""
    chosen = {}
    for name, value in expected.items():
        if name.endswith("outputs"):
            if last:
                chosen[name] = value
        elif name.split()[-1].startswith(f"{2 * stage}."):
            head, _, key = name.rpartition(" ")
            chosen[f"{head} 0.{key.partition('.')[2]}"] = value
    return chosen
