"""Compare hand-written parallelism between ranks with one device, bit for bit, on exact data."""

from __future__ import annotations

import functools

import torch
from torch import nn

from mgpu_check.asserts.allreduce import assert_allreduce_matches
from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.gradients import assert_same, gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.steps import full_precision
from mgpu_check.suite.common.exact_training.cases import ExactTraining
from mgpu_check.suite.common.exact_training.reference import one_device, own_part, seen, sgd, update_of
from mgpu_check.suite.recipes import allreduce, parameter_server, pipeline, tensor_parallel
from mgpu_check.suite.recipes import training as recipe
from mgpu_check.torch_hooks.tensors import copied

RECIPES = ("ring_allreduce", "tree_allreduce", "halving_doubling_allreduce", "reduce_broadcast")
_LARGE = 65_537  # just above 64 Ki, where transports change their method
_SOME = 4_097
_DTYPES = ("float32", "int64", "float64", "bfloat16", "int32", "uint8", "float16", "int8")


def assert_allreduce_by_hand_matches(rank: Rank, seed: int) -> None:
    """Assert that each hand-written allreduce gives the exact sum. A collective.

    Sizes are 0, near the world size, and just above 4,096 and 64 Ki. `seed` rotates the dtypes among them.
    """
    sizes = (0, rank.size - 1, 2 * rank.size + 1, _SOME, _LARGE)
    with Findings() as findings:
        for number, elements in enumerate(sizes):
            dtype: torch.dtype = getattr(torch, _DTYPES[(seed + number) % len(_DTYPES)])
            parts = _terms(elements, dtype, rank.size, seed + number)
            # `torch.sum` would return int64 for integers.
            expected = functools.reduce(torch.add, parts)
            for name in RECIPES:
                tensor = parts[rank.index].to(rank.device, copy=True)
                getattr(allreduce, name)(tensor)
                # A cheap comparison first, because examining each element takes longer than the sum.
                if torch.equal(copied(tensor), expected):
                    continue
                with findings.collected():
                    assert_allreduce_matches({rank.index: tensor}, parts, what=f"{name} on {rank.device}")


def _terms(elements: int, dtype: torch.dtype, count: int, seed: int) -> list[torch.Tensor]:
    """Return small whole numbers for each rank, whose sum every dtype holds; ranks and neighbouring elements differ."""
    most = max(1, 120 // count)
    index = torch.arange(elements)
    return [((index * 7 + rank * 5 + seed) % most + 1).to(dtype) for rank in range(count)]


def assert_parameter_server_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that ranks with a parameter server have the parameters of one device after each step. A collective.

    Runs once with one server, and once with the parameters divided among all ranks. Servers keep the momentum.
    """
    expected = one_device(training)
    with Findings() as findings:
        for name, servers in (("one server", 1), ("a sharded server", rank.size)):
            model = training.model().to(rank.device)
            parameters = list(model.parameters())
            homes = [key % servers for key in range(len(parameters))]
            update = update_of(training)
            got: dict[str, torch.Tensor] = {}
            with full_precision():
                for step, (inputs, factors) in enumerate(training.batches(), 1):
                    model.zero_grad()
                    x, y = own_part((inputs, factors), rank)
                    recipe.weighted(model(x), y).backward()
                    gradients = [gradient_or_zeros(parameter) for parameter in parameters]
                    parameter_server.push_and_pull(parameters, gradients, update, homes)
                    got |= {f"step {step}: {key}": copied(value) for key, value in model.named_parameters()}
            with findings.collected():
                assert_same(got, {key: expected[key] for key in got}, f"{name}, on {rank.device}", rank.index)


def assert_tensor_parallel_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that two linear layers, divided among ranks by columns and rows, train as on one device. A collective.

    Runs once with divided hidden activations, as usual, and once with activations that are gathered and divided again.
    The widths need not be multiples of the world size.
    """
    hidden = allreduce.chunks(training.widths[1], rank.size)[rank.index]
    parts = {"0.weight": (hidden,), "0.bias": (hidden,), "2.weight": (slice(None), hidden), "2.bias": (slice(None),)}
    expected = _with_gradient_of_inputs(training)
    for name, value in expected.items():
        expected[name] = value[parts.get(name.split()[-1], (slice(None),))]
    with Findings() as findings:
        for gather in (False, True):
            first, second = training.layers()
            model = nn.Sequential(
                tensor_parallel.ColumnLinear(first, rank.device, gather=gather),
                nn.ReLU(),
                tensor_parallel.RowLinear(second, rank.device, divide=gather),
            )
            optimizer = sgd(training, model)
            got: dict[str, torch.Tensor] = {}
            with full_precision():
                for step, (inputs, factors) in enumerate(training.batches(), 1):
                    optimizer.zero_grad()
                    x = inputs.to(rank.device, copy=True).requires_grad_()
                    outputs = model(x)
                    recipe.weighted(outputs, factors.to(rank.device)).backward()
                    optimizer.step()
                    assert x.grad is not None
                    got |= {
                        f"step {step}: outputs": copied(outputs),
                        f"step {step}: gradient of inputs": copied(x.grad),
                    }
                    got |= seen(model, step)
            how = "gathered between" if gather else "divided between"
            with findings.collected():
                assert_same(got, expected, f"tensor parallelism, {how}, on {rank.device}", rank.index)


def _with_gradient_of_inputs(training: ExactTraining) -> dict[str, torch.Tensor]:
    model = training.model()
    asked: list[torch.Tensor] = []

    def require(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        asked.append(given[0].requires_grad_())

    model.register_forward_pre_hook(require)
    expected = one_device(training, model)
    for step, inputs in enumerate(asked, 1):
        assert inputs.grad is not None
        expected[f"step {step}: gradient of inputs"] = copied(inputs.grad)
    return expected


def assert_pipeline_agrees(training: ExactTraining, micro_batches: int, rank: Rank) -> None:
    """Assert that a hand-written pipeline with a stage on each rank trains as one device does. A collective.

    The model must have as many linear layers as there are ranks. Micro-batches may be of different sizes.

    Raises:
        GradientMismatch: this rank's outputs, gradients or parameters differ.
        ValueError: the numbers of layers and ranks differ.
    """
    layers = training.layers()
    if len(layers) != rank.size:
        raise ValueError(f"assert_pipeline_agrees: {len(layers)} layers for {rank.size} ranks; give one for each")
    last = rank.index == rank.size - 1
    own = layers[rank.index]
    stage = nn.Sequential(own, nn.Identity() if last else nn.ReLU()).to(rank.device)
    optimizer = sgd(training, stage)
    got: dict[str, torch.Tensor] = {}
    with full_precision():
        for step, (inputs, factors) in enumerate(training.batches(), 1):
            optimizer.zero_grad()
            targets = [part.to(rank.device) for part in recipe.split(factors, micro_batches)]
            outputs = pipeline.gpipe_step(
                stage,
                rank.index,
                rank.size,
                recipe.split(inputs, micro_batches),
                lambda outputs, number: recipe.weighted(outputs, targets[number]),  # noqa: B023  # called at once
                width=training.widths[rank.index],
                device=rank.device,
            )
            optimizer.step()
            got |= seen(stage, step)
            if last:
                got[f"step {step}: outputs"] = copied(torch.cat(outputs))
    assert_same(got, stage_of(one_device(training), rank.index, last), f"pipeline on {rank.device}", rank.index)


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
