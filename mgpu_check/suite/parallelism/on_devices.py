"""Compare hand-written parallelism on the devices of a process with one device, bit for bit, on exact data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.func import functional_call

from mgpu_check.asserts.gradients import assert_gradients_agree, assert_same
from mgpu_check.asserts.replicas import assert_replicas_agree
from mgpu_check.errors import ReplicaMismatch
from mgpu_check.numerics.steps import full_precision
from mgpu_check.suite.common.exact_training.cases import ExactTraining
from mgpu_check.suite.common.exact_training.reference import ADAM_RATE, adam_tolerance, one_device, seen, sgd, update_of
from mgpu_check.suite.recipes import model_parallel, parameter_server
from mgpu_check.suite.recipes import training as recipe
from mgpu_check.torch_hooks.tensors import copied


def assert_replicas_are_apart(training: ExactTraining, devices: Sequence[torch.device]) -> None:
    """Assert that `recipes.training.replicate` makes independent leaves, each on its device, without shared memory."""
    what = "replicate"
    source = {name: value.detach().to(devices[0]) for name, value in training.model().named_parameters()}
    before = {name: copied(value) for name, value in source.items()}
    replicas = recipe.replicate(source, devices)
    if len(replicas) != len(devices):
        raise ReplicaMismatch(f"{what}: {len(replicas)} replicas for {len(devices)} devices")
    for index, (replica, device) in enumerate(zip(replicas, devices, strict=True)):
        for name, value in replica.items():
            if value.device != device:
                raise ReplicaMismatch(f"{what}: {name!r} of {device} is on {value.device}", ranks=[index])
            if not (value.is_leaf and value.requires_grad):
                raise ReplicaMismatch(
                    f"{what}: {name!r} on {device} is not a leaf that requires gradients", ranks=[index]
                )
    assert_replicas_agree([before, *replicas], what=what)
    for index, replica in enumerate(replicas):
        expected = [{name: copied(value) for name, value in other.items()} for other in replicas]
        with torch.no_grad():
            for name, value in replica.items():
                value.add_(1)
                expected[index][name] += 1
        for other, (held, should) in enumerate(zip(replicas, expected, strict=True)):
            for name, value in held.items():
                if not torch.equal(copied(value), should[name]):
                    raise ReplicaMismatch(
                        f"{what}: {name!r} on {devices[other]} changes with the replica on {devices[index]}",
                        ranks=[other],
                    )
    for name, value in source.items():
        if not torch.equal(copied(value), before[name]):
            raise ReplicaMismatch(f"{what}: {name!r} that was copied changes with its replicas")


def assert_training_loop_agrees(training: ExactTraining, devices: Sequence[torch.device]) -> None:
    """Assert that the training loop of tutorials, `recipes.training.train`, gives the parameters of one device.

    The loop uses SGD without momentum and the mean over a batch, whose number of samples is a power of two.
    """
    start = training.model()

    def forward(inputs: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        outputs: torch.Tensor = functional_call(start, dict(parameters), (inputs,))
        return outputs

    # The second batch is half as large, as the last one of an epoch may be.
    batches = [(x[: len(x) >> step], y[: len(y) >> step]) for step, (x, y) in enumerate(training.batches())]
    with full_precision():
        replicas = recipe.train(
            forward, dict(start.named_parameters()), devices, batches, rate=training.rate, loss=recipe.weighted
        )
        held = [_with_gradients(replica) for replica in replicas]
    what = f"training loop on {len(devices)} devices"
    assert_replicas_agree(held, what=what)
    single = start.double()
    optimizer = torch.optim.SGD(single.parameters(), lr=training.rate)
    for inputs, factors in batches:
        optimizer.zero_grad()
        (recipe.weighted(single(inputs.double()), factors.double()) / len(inputs)).backward()
        optimizer.step()
    assert_same(held[0], _with_gradients(dict(single.named_parameters())), what)


def assert_store_agrees(training: ExactTraining, devices: Sequence[torch.device]) -> None:
    """Assert that training by `recipes.parameter_server.KeyValueStore` gives one device's parameters, on all
    devices."""
    what = f"parameter server on {len(devices)} devices"
    store = parameter_server.KeyValueStore(devices, update_of(training))
    names = [name for name, _ in training.model().named_parameters()]
    start = training.model()
    for turn, (name, value) in enumerate(start.named_parameters()):
        store.init(name, value)
        if store.home(name) != devices[turn % len(devices)]:
            raise ReplicaMismatch(f"{what}: the store keeps {name!r} on {store.home(name)}")
    workers = [training.model().to(device) for device in devices]
    got: dict[str, torch.Tensor] = {}
    with full_precision():
        for step, (inputs, factors) in enumerate(training.batches(), 1):
            parts = zip(recipe.split(inputs, len(devices)), recipe.split(factors, len(devices)), strict=True)
            for worker, device, (x, y) in zip(workers, devices, parts, strict=True):
                worker.zero_grad()
                recipe.weighted(worker(x.to(device)), y.to(device)).backward()
            for name in names:
                held = [worker.get_parameter(name) for worker in workers]
                store.push(name, [_gradient(value) for value in held])
                store.pull(name, held)
            assert_replicas_agree(workers, what=f"{what}, step {step}")
            got |= {f"step {step}: {name}": copied(workers[-1].get_parameter(name)) for name in names}
    expected = one_device(training)
    assert_same(got, {name: expected[name] for name in got}, what)


def assert_model_parallel_agrees(training: ExactTraining, devices: Sequence[torch.device]) -> None:
    """Assert that a model with parts on several devices, as stages or as parallel branches, trains as on one device.

    With SGD and momentum the results must be equal bit for bit; with Adam they may differ by the rounding of its
    elementwise arithmetic. Each parameter, its gradient and its state must stay on the device of the parameter.
    """
    places = ", ".join(map(str, devices))

    def stages() -> list[nn.Module]:
        return _stages(training, len(devices))

    def branches() -> list[nn.Module]:
        return [ExactTraining(training.widths, seed=training.seed + 7 * index).model() for index in range(len(devices))]

    for name, single, build, parts in (
        ("stages", _StagedOnOne, model_parallel.Staged, stages),
        ("branches", _BranchedOnOne, model_parallel.Branched, branches),
    ):
        what = f"{name} on {places}"
        with full_precision():
            got = _trained(training, build(parts(), devices), devices, what)
            moments = _adam(training, build(parts(), devices), devices, what)
        assert_same(got, one_device(training, single(parts())), what)
        expected = _adam(training, single(parts()), [torch.device("cpu")] * len(devices), what)
        tolerance = adam_tolerance(expected, ADAM_RATE)
        assert_gradients_agree(moments, expected, tolerance=tolerance, what=f"{what}, Adam")


class _StagedOnOne(nn.Module):
    """Stages on one device, with the same parameter names as stages on several."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class _BranchedOnOne(nn.Module):
    """Branches on one device, with the same parameter names as branches on several."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


def _stages(training: ExactTraining, count: int) -> list[nn.Module]:
    """Divide the layers into nonempty stages; a ReLU stays with the layer before it."""
    layers = list(training.model())
    starts = list(range(0, len(layers), 2))
    cuts = [starts[index * len(starts) // count] for index in range(count)] + [len(layers)]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(cuts)]


def _trained(
    training: ExactTraining, model: nn.Module, devices: Sequence[torch.device], what: str
) -> dict[str, torch.Tensor]:
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
        _assert_at_home(model, optimizer, homes, f"{what}, step {step}")
    return got


def _adam(
    training: ExactTraining, model: nn.Module, devices: Sequence[torch.device], what: str
) -> dict[str, torch.Tensor]:
    """Take two steps with the exact gradients of the start, because later gradients would depend on rounding."""
    homes = {name: value.device for name, value in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=ADAM_RATE)
    inputs, factors = training.batches()[0]
    recipe.weighted(model(inputs.to(devices[0])), factors.to(devices[-1])).backward()
    for _ in range(2):
        optimizer.step()
    _assert_at_home(model, optimizer, homes, f"{what}, Adam")
    got: dict[str, torch.Tensor] = {}
    for name, value in model.named_parameters():
        state = optimizer.state[value]
        got |= {f"{key} of {name}": copied(state[key]) for key in ("exp_avg", "exp_avg_sq")}
        got[name] = copied(value)
    return got


def _assert_at_home(
    model: nn.Module, optimizer: torch.optim.Optimizer, homes: Mapping[str, torch.device], what: str
) -> None:
    for name, value in model.named_parameters():
        tensors = {name: value, f"the gradient of {name}": _gradient(value)}
        state = optimizer.state[value]
        # Skip tensors without dimensions: the number of steps may be on the host.
        tensors |= {f"{key} of {name}": held for key, held in state.items() if getattr(held, "shape", None)}
        for label, held in tensors.items():
            if held.device != homes[name]:
                raise ReplicaMismatch(f"{what}: {label} is on {held.device}; {name} was put on {homes[name]}")


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "the loss depends on each parameter"
    return parameter.grad


def _with_gradients(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    gradients = {f"gradient of {name}": copied(_gradient(value)) for name, value in parameters.items()}
    return gradients | {name: copied(value) for name, value in parameters.items()}
