"""Compare training under DataParallel with one device, bit for bit, on whole numbers whose sums do not round."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from mgpu_check.asserts.models import assert_same
from mgpu_check.errors import GradientMismatch
from mgpu_check.oracles.training import reference_training as oracle
from mgpu_check.oracles.training.cases import WholeRun
from mgpu_check.oracles.training.reference_training import OneDevice, Rows
from mgpu_check.oracles.training.training_steps import weighted
from mgpu_check.suite.data_parallel.forward import Devices, both_ways, indices_of, require_same


def _wrapped(model: nn.Module, order: Devices) -> nn.Module:
    return DataParallel(model.to(order[0]), device_ids=indices_of(order))


def _shards(batch: Rows, order: Devices) -> list[Rows]:
    return list(zip(*(tensor.chunk(len(order)) for tensor in batch), strict=True))


def _label(run: WholeRun, order: Devices, suffix: str = "") -> str:
    return f"DataParallel of {run.model} on {', '.join(map(str, order))}{suffix}"


def assert_models_train(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that outputs, gradients and parameters of every step equal those of one device, in both orders in turn."""
    with oracle.exact_arithmetic():
        for number, run in enumerate(runs):
            orders = both_ways(devices)
            _train(run, orders[(run.seed + number) % len(orders)])


def assert_frozen_parameters_kept(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that a model with a frozen first layer trains, and that this layer does not change or get a gradient."""
    with oracle.exact_arithmetic():
        for run in runs:
            for order in both_ways(devices):
                _train(run, order, frozen=True)


def _train(run: WholeRun, order: Devices, frozen: bool = False) -> None:
    prepare = oracle.freeze_first if frozen else oracle.as_it_is
    reference, model = OneDevice(run, order[0], prepare), run.build()
    prepare(model)
    parallel = _wrapped(model, order)
    optimizer = run.optimize(model)
    for number, batch in enumerate(run.batches(), start=1):
        x, targets = batch
        label = _label(run, order, ", first layer frozen" if frozen else "")
        expected = reference.outputs(x)
        optimizer.zero_grad()
        outputs = parallel(x)
        assert_same({"outputs": outputs}, {"outputs": expected}, f"{label}, step {number}")
        weighted(outputs, targets.to(order[0])).backward()
        shard_gradients = reference.parts(_shards(batch, order))
        oracle.assert_gradients_are(model, shard_gradients, label=f"{label}, gradients of step {number}")
        optimizer.step()
        reference.step(oracle.total(shard_gradients))
        got, right = oracle.parameters_of(model), oracle.parameters_of(reference.held)
        assert_same(got, right, f"{label}, parameters after step {number}")
        oracle.settle(model, run.most)
        reference.settle()


def assert_statistics_of_the_first_device(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that in training only the first device's shard changes buffers, and that evaluation does not change them.
    All replicas must start with the module's buffers: their outputs depend on these."""
    with oracle.exact_arithmetic():
        for run in runs:
            for order in both_ways(devices):
                model = run.build()
                reference = OneDevice(run, order[0])
                parallel = _wrapped(model, order)
                for number, (x, _) in enumerate(run.batches(), start=1):
                    evaluated = number % 2 == 0
                    parallel.train(not evaluated)
                    label = _label(run, order, f", batch {number}, {'evaluation' if evaluated else 'training'}")
                    before = {name: value.cpu().clone() for name, value in oracle.buffers_of(model).items()}
                    oracle.put_buffers(reference.exact, before)
                    expected = reference.outputs(x)
                    with torch.no_grad():
                        outputs = parallel(x)
                    assert_same({"outputs": outputs}, {"outputs": expected}, label)
                    head_shard = x.chunk(len(order))[0]
                    if not evaluated:
                        before = oracle.counting_statistics(before, head_shard)
                    assert_same(oracle.buffers_of(model), before, f"{label}, buffers")
        for order in both_ways(devices):
            _average(order, runs[0].seed)


def _average(order: Devices, seed: int) -> None:
    layer = oracle.averaging().to(order[0])
    parallel = _wrapped(layer, order)
    batches = oracle.drawn(3 * len(order), seed)
    for number, batch in enumerate(batches, start=1):
        with torch.no_grad():
            parallel(batch)
        deviation = oracle.wrong_statistics(layer, [before.chunk(len(order))[0] for before in batches[:number]])
        if deviation:
            subject = f"DataParallel of BatchNorm on {', '.join(map(str, order))}, momentum=None"
            raise GradientMismatch(f"{subject}: {deviation}", ranks=[order[0].index])


def assert_backward_of_several_calls(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that two forward passes before a backward pass add gradients, and later passes use changed parameters."""
    with oracle.exact_arithmetic():
        for run in runs:
            for order in both_ways(devices):
                reference, model = OneDevice(run, order[0]), run.build()
                parallel = _wrapped(model, order)
                earlier, later = run.batches()[0], run.batches()[-1]
                for number in range(2):
                    label = _label(run, order, f", two calls before one backward pass, round {number + 1}")
                    model.zero_grad()
                    losses = [weighted(parallel(x), targets.to(order[0])) for x, targets in (earlier, later)]
                    (losses[0] + losses[1]).backward()
                    shard_gradients = reference.parts([*_shards(earlier, order), *_shards(later, order)])
                    oracle.assert_gradients_are(model, shard_gradients, label=label)
                    with torch.no_grad():
                        # In place, as in load_state_dict and optimizers.
                        for mine, exact in zip(model.parameters(), reference.exact.parameters(), strict=True):
                            mine.neg_()
                            exact.neg_()


def assert_hooks_called(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that hooks are called as documented, and that hooks can change arguments and outputs."""
    with oracle.exact_arithmetic():
        for run in runs:
            for order in both_ways(devices):
                _call_hooks(run, order)
        for order in both_ways(devices):
            _change_by_hooks(order)


class _Shifted(nn.Module):
    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | float = 0.0) -> torch.Tensor:
        return x + shift


def _change_by_hooks(order: Devices) -> None:
    module = _Shifted()
    module.register_forward_pre_hook(
        lambda _, arguments, named: (arguments, {"shift": 2 * arguments[0] + 1}), with_kwargs=True
    )
    module.register_forward_hook(
        lambda _, arguments, named, output: 4 * output + named.get("shift", 0), with_kwargs=True
    )
    x = torch.arange(2.0 * len(order) + 1, device=order[0])
    got = _wrapped(module, order)(x)
    label = f"DataParallel on {', '.join(map(str, order))}, hooks that change arguments and outputs"
    assert_same({"outputs": got}, {"outputs": 4 * (3 * x + 1) + 2 * x + 1}, label)


def _call_hooks(run: WholeRun, order: Devices) -> None:
    reference, model = OneDevice(run, order[0]), run.build()
    parallel = _wrapped(model, order)
    replicas: dict[str, list[torch.device]] = {}
    wholes: list[torch.device] = []
    gradients: list[torch.Tensor] = []
    layer = next(model.children())
    names = "forward pre-hook", "forward hook"
    registers: tuple[Any, ...] = layer.register_forward_pre_hook, layer.register_forward_hook
    for (hook_type, register), keywords in itertools.product(zip(names, registers, strict=True), (False, True)):
        called = replicas[f"{hook_type}, with_kwargs={keywords},"] = []
        hook: Any = functools.partial(lambda called, module, arguments, *_: called.append(arguments[0].device), called)
        register(hook, with_kwargs=keywords)
    parallel.register_forward_hook(lambda module, arguments, output: wholes.append(output.device))
    name, parameter = next(model.named_parameters())
    parameter.register_hook(gradients.append)
    x, targets = run.batches()[0]
    weighted(parallel(x), targets.to(order[0])).backward()
    label = _label(run, order)
    used_devices = list(order[: len(_shards((x, targets), order))])
    for hook_type, places in replicas.items():
        got = sorted(map(str, places))
        if got != sorted(map(str, used_devices)):
            text = f"the {hook_type} of a layer was called on {', '.join(got) or 'no device'}"
            raise GradientMismatch(f"{label}: {text}, expected once on each replica")
    if wholes != [order[0]]:
        text = f"the forward hook of DataParallel was called {len(wholes)} times, expected once on {order[0]}"
        raise GradientMismatch(f"{label}: {text}")
    expected = oracle.total(reference.parts(_shards((x, targets), order)))[name]
    if len(gradients) != 1:
        raise GradientMismatch(f"{label}: the hook of {name} was called {len(gradients)} times, expected once")
    assert expected is not None
    assert_same({name: gradients[0]}, {name: expected}, f"{label}: the argument of a hook")


def assert_second_gradients(devices: Devices, runs: Sequence[WholeRun]) -> None:
    """Assert that gradients of gradients, as for a gradient penalty, equal those of one device with `DataParallel`.
    The one device is the CPU. The computation is in float64, which holds all of these whole numbers exactly."""
    with oracle.exact_arithmetic():
        for run in runs:
            x, targets = (tensor.double() for tensor in run.batches()[0])
            reference = run.build().double()
            expected = _second(reference, reference, x, targets)
            for order in both_ways(devices):
                model = run.build().double()
                got = _second(model, _wrapped(model, order), x, targets.to(order[0]))
                assert_same(got, expected, _label(run, order, ", gradients of gradients"))


def _second(model: nn.Module, called: nn.Module, x: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of a weighted sum of gradients, by name of parameter.
    A batch in float64 goes through `called`, the model or its wrapper."""
    outputs = called(x)
    named = dict(model.named_parameters())
    loss = (outputs.square() * targets.remainder(4)).sum()
    gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    penalty = sum((gradient * (number + 1)).sum() for number, gradient in enumerate(gradients))
    second = torch.autograd.grad(torch.as_tensor(penalty), list(named.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(named, second, strict=True) if gradient is not None}


def assert_sparse_gradients_added(devices: Devices, rows: Sequence[int]) -> None:
    """Assert that the sparse gradient of an embedding sums those of all replicas; a batch looks up these rows."""
    for order in both_ways(devices):
        count, samples = max(rows) + 1, torch.tensor(rows, device="cpu")
        factors = torch.arange(1.0, len(rows) + 1)
        model = nn.Embedding(count, 2, sparse=True).to(order[0])
        outputs = _wrapped(model, order)(samples)
        (outputs.sum(1) * factors.to(order[0])).sum().backward()
        expected = torch.zeros(count, 2).index_add_(0, samples, factors[:, None].expand(-1, 2))
        gradient = model.weight.grad
        label = f"DataParallel of a sparse embedding on {', '.join(map(str, order))}"
        if gradient is None or not gradient.is_sparse:
            raise GradientMismatch(f"{label}: its gradient is {None if gradient is None else gradient.layout}")
        require_same(f"{label}: the gradient", gradient.to_dense(), expected, order[0])
