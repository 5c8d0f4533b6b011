"""Compare torch's tensor parallelism and pipelining with one device, bit for bit, on exact data.

Styles of `torch.distributed.tensor.parallel` are checked for sequences, for inputs and outputs, and for losses, too.
Schedules of `torch.distributed.pipelining` run one after the other, and with each pair of values of their options.
`assert_mechanisms_agree` runs the mechanisms at the end, and compares what each rank has with one device.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel
from torch.nn import functional as F

from mgpu_check.asserts.findings import Findings, on_any_rank, run_all
from mgpu_check.asserts.known_defects import left_out
from mgpu_check.asserts.models import assert_gradients_agree, assert_same, gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.reduction import unit_roundoff
from mgpu_check.numerics.steps import full_precision
from mgpu_check.oracles.pairs import drawn_rows
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.oracles.training.gradient_exchange import chunks
from mgpu_check.oracles.training.reference_training import gathered, one_device, seen, sgd
from mgpu_check.oracles.training.training_steps import weighted
from mgpu_check.simulated import simulated_device_count
from mgpu_check.suite.parallelism.cases import MECHANISMS, MechanismCase
from mgpu_check.suite.parallelism.handwritten_parallelism import stage_of
from mgpu_check.suite.recipes import model_parallel
from mgpu_check.torch_hooks.tensors import copied

_LARGE = 1 << 16

_SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleavedZeroBubble": 1,  # computes the gradients of inputs and of weights separately
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
}
"""Schedule -> number of stages per rank."""


def assert_parallelized_agree(training: ExactTraining, rank: Rank) -> None:
    """Assert that modules and an embedding under `parallelize_module` train as on one device. A collective."""
    checks = (assert_parallelized_modules_agree, assert_parallelized_embedding_agrees)
    run_all((partial(check, training, rank) for check in checks), rank)


def assert_parallelized_modules_agree(training: ExactTraining, rank: Rank) -> None:
    """Assert that `parallelize_module`, by columns and then by rows, trains as one device does. A collective.

    The hidden width must be a multiple of the world size. Runs with replicated inputs, and with inputs and outputs
    divided along the batch, whose size must then be a multiple too. Divided outputs are DTensors, and then local.
    """
    mesh = init_device_mesh("cuda", (rank.size,))
    expected, tolerance = _with_divided_bias(training, rank.size)
    with Findings() as findings:
        for divided, local in ((False, True), (True, False), (True, True)):
            layout = Shard(0) if divided else Replicate()
            by_rows = parallel.RowwiseParallel(output_layouts=layout, use_local_output=local)
            plan = {"0": parallel.ColwiseParallel(input_layouts=layout), "2": by_rows}
            model = parallel.parallelize_module(training.model().to(rank.device), mesh, plan)
            optimizer = sgd(training, model)
            got: dict[str, torch.Tensor] = {}
            with full_precision():
                for step, (inputs, factors) in enumerate(training.batches(), 1):
                    optimizer.zero_grad()
                    x = inputs.chunk(rank.size)[rank.index] if divided else inputs
                    outputs = model(x.to(rank.device))
                    if divided and local:
                        outputs = DTensor.from_local(outputs, mesh, [layout])
                    full_outputs = outputs.full_tensor() if divided else outputs
                    weighted(full_outputs, factors.to(rank.device)).backward()
                    optimizer.step()
                    got[f"step {step}: outputs"] = copied(full_outputs)
                    got |= gathered(model, step)
            how = ("the batch divided" if divided else "the batch on all ranks") + ", use_local_output" * local
            label = f"parallelize_module, {how}, on {rank.device}"
            with findings.collected():
                assert_gradients_agree(got, expected, tolerance=tolerance, rank=rank.index, what=label)
            frozen = parallel.parallelize_module(training.model().requires_grad_(False).to(rank.device), mesh, plan)
            trained = [name for name, parameter in frozen.named_parameters() if parameter.requires_grad]
            message = f"{label}: {', '.join(trained)} of a frozen model require gradients"
            findings.require(not trained, message, ranks=(rank.index,))


def assert_parallelized_embedding_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that an embedding that `parallelize_module` divides by rows or by columns works as on one device. A
    collective.

    The last part is smaller than the others, but not empty, which torch refuses. Every row is looked up, and some rows
    twice. Only one rank has the right values, and the others get theirs from it.
    """
    mesh = init_device_mesh("cuda", (rank.size,))
    rows = columns = 3 * rank.size - 1
    values = torch.arange(1.0, rows * columns + 1).reshape(rows, columns)
    tokens = torch.cat((torch.arange(rows), torch.arange(0, rows, 2)))
    factors = (torch.arange(len(tokens) * columns) * 7 + training.seed) % 11 - 5.0
    factors = factors.reshape(len(tokens), columns)
    expected = {"outputs": values[tokens], "gradient": torch.zeros_like(values).index_add(0, tokens, factors)}
    with Findings() as findings:
        for how, style, source in (
            ("rows", parallel.RowwiseParallel(input_layouts=Replicate(), use_local_output=False), rank.size - 1),
            ("columns", parallel.ColwiseParallel(output_layouts=Replicate(), use_local_output=False), 0),
        ):
            initial = values if rank.index == source else -values
            layer = nn.Embedding.from_pretrained(initial.clone(), freeze=False).to(rank.device)
            divided = parallel.parallelize_module(layer, mesh, style, src_data_rank=source)
            outputs = divided(tokens.to(rank.device)).full_tensor()
            weighted(outputs, factors.to(rank.device)).backward()
            got = {"outputs": copied(outputs), "gradient": gathered(divided, 1)["step 1: gradient of weight"]}
            label = f"an embedding of {rows} rows, divided by {how}, on {rank.device}"
            with findings.collected():
                assert_same(got, expected, label, rank.index)


def _with_divided_bias(training: ExactTraining, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train on one device; return the results, and their tolerances if each rank adds its part of the bias.

    In a sum over n ranks DTensor divides the bias by n, which rounds unless n is a power of two. Then a rank's part of
    an output has at most two roundings, and the sum of n parts has n - 1 more, each relative to the sum of the
    magnitudes. So the tolerance is (n + 1)·u·(|h|·|W| + |b|), u = 2^-24. Gradients do not depend on these outputs.
    """
    model = training.model()
    magnitudes: list[torch.Tensor] = []

    def add_up(layer: nn.Linear, inputs: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> None:
        magnitudes.append((inputs[0].abs() @ layer.weight.abs().T + layer.bias.abs()).detach())

    model[-1].register_forward_hook(add_up)
    expected = one_device(training, model)
    tolerance = {name: torch.zeros_like(value) for name, value in expected.items()}
    if ranks & (ranks - 1):
        for step, magnitude in enumerate(magnitudes, 1):
            tolerance[f"step {step}: outputs"] = (ranks + 1) * 2.0**-24 * magnitude
    return expected, tolerance


def assert_schedules_agree(training: ExactTraining, rank: Rank, most: int) -> None:
    """Assert that schedules with up to `most` stages per rank train as one device does. A collective.
    If `most` is 2, schedules with one stage per rank also run with large activations, and without a scaled loss."""
    # One step whose first stage passes on 64 Ki elements per micro-batch. It is exact for up to 16 samples and few
    # features after the first stage, because sums of 64 Ki small numbers are below 2^24.
    width = _LARGE * 4 // training.batch
    large = replace(training, widths=(training.widths[0], width, *training.widths[2:]), steps=1)
    schedules = [(name, stages) for name, stages in _SCHEDULES.items() if stages <= most]
    checks = [partial(assert_schedule_agrees, training, name, 4, rank, stages) for name, stages in schedules]
    of_one = [name for name, stages in schedules if stages == 1 and most == 2]
    checks += [partial(assert_schedule_agrees, large, name, 4, rank, 1, scaled=False) for name in of_one]
    run_all(checks, rank)


def assert_schedule_agrees(
    training: ExactTraining,
    schedule: str,
    micro_batches: int,
    rank: Rank,
    stages_of_a_rank: int = 1,
    *,
    scaled: bool = True,
    in_vee: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Assert that a schedule of `torch.distributed.pipelining` trains as one device does. A collective.

    Each micro-batch must get its part of keyword arguments, and each step its losses. The model must have as many
    linear layers as there are ranks. `micro_batches` must be a power of two that divides the batch, because schedules
    divide gradients by it. Ranks get stages in turn. A stage is a layer; with two stages per rank, one is the product
    of a layer and the other its bias.

    Args:
        scaled: the loss is the mean over micro-batches, else their sum.
        in_vee: ranks get their second stages in reverse order, so the first rank has the first and the last stage.
        options: other options of the schedule; `args_chunk_spec` is for the rank with the first stage. If
            `kwargs_chunk_spec` divides columns, the keyword argument has the rows of the batch in its columns.
    """
    count = rank.size * stages_of_a_rank
    modules = dict(enumerate(_stages(training, stages_of_a_rank)))
    numbers_here = (rank.index, count - 1 - rank.index) if in_vee else range(rank.index, count, rank.size)
    own = {number: modules[number].to(rank.device) for number in numbers_here}
    last = count - 1 in own
    optimizer = sgd(training, nn.ModuleList(own.values()))
    stages = [pipelining.PipelineStage(module, number, count, rank.device) for number, module in own.items()]

    def loss(outputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return weighted(outputs, factors) * (micro_batches if scaled else 1)

    schedule_class = getattr(pipelining.schedules, schedule)
    several = issubclass(schedule_class, pipelining.schedules.PipelineScheduleMulti)
    options = {name: value for name, value in options.items() if name != "args_chunk_spec" or rank.index == 0}
    runs = schedule_class(
        stages if several else stages[0], n_microbatches=micro_batches, loss_fn=loss, scale_grads=scaled, **options
    )
    got: dict[str, torch.Tensor] = {}
    losses: list[torch.Tensor] = []
    numbers = torch.arange(training.batch, device=rank.device)
    by_columns = any(spec.split_dim == 1 for spec in (options.get("kwargs_chunk_spec") or {}).values())
    with full_precision():
        for step, (inputs, factors) in enumerate(training.batches(), 1):
            optimizer.zero_grad()
            arguments = (inputs.to(rank.device),) if rank.index == 0 else ()
            target = {"target": factors.to(rank.device), "losses": losses} if last else {}
            outputs = runs.step(*arguments, rows=numbers[None] if by_columns else numbers, **target)
            optimizer.step()
            for number, module in own.items():
                rows = {f"step {step}: rows of micro-batches": torch.cat(module.rows[-micro_batches:]).cpu()}
                got |= _of_stage(number, seen(module, step) | rows)
            if last:
                got[f"step {step}: outputs"] = copied(outputs)
                got[f"step {step}: losses"] = torch.stack([copied(computed) for computed in losses])
    chosen = "".join(f", {name}={value}" for name, value in options.items())
    how = f"{stages_of_a_rank} stages a rank, scale_grads={scaled}{chosen}, widths {training.widths}"
    label = f"{schedule} of {micro_batches} micro-batches, {how}, on {rank.device}"
    single = one_device(training)
    expected: dict[str, torch.Tensor] = {}
    for number, module in own.items():
        of_layer = stage_of(single, number // stages_of_a_rank, False)
        parameter_names = tuple(name for name, _ in module.named_parameters())
        rows = {f"step {step}: rows of micro-batches": numbers.cpu() for step in range(1, training.steps + 1)}
        of_module = {key: value for key, value in of_layer.items() if key.endswith(parameter_names)}
        expected |= _of_stage(number, of_module | rows)
    for step, (_, factors) in enumerate(training.batches(), 1):
        if last:
            expected[f"step {step}: outputs"] = single[f"step {step}: outputs"]
            pairs = zip(single[f"step {step}: outputs"].chunk(micro_batches), factors.chunk(micro_batches), strict=True)
            expected[f"step {step}: losses"] = torch.stack([loss(output, own.double()) for output, own in pairs])
    assert_same(got, expected, label, rank.index)


def _of_stage(number: int, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"stage {number}, {name}": value for name, value in results.items()}


def _stages(training: ExactTraining, of_a_rank: int) -> list[_Stage]:
    """Return the stages in order: layers, or alternately the product and the bias of each layer."""
    stages = []
    *hidden, last = training.layers()
    for layer in (*hidden, last):
        after = nn.Identity() if layer is last else nn.ReLU()
        if of_a_rank == 1:
            stages.append(_Stage(layer, after))
            continue
        bias = _Bias(layer.bias)
        layer.register_parameter("bias", None)
        stages += [_Stage(layer), _Stage(bias, after)]
    return stages


class _Bias(nn.Module):
    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class _Stage(nn.Sequential):
    """Layers that record the rows of the batch in each micro-batch."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.rows: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # a stage has one more argument
        self.rows.append(rows.reshape(-1))
        return super().forward(x)


_FEATURES = 4
_ROUNDOFF = 2.0**-24


class _RMSNorm(nn.Module):
    """An RMSNorm written in Python, which `SequenceParallel` documents as supported."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_FEATURES, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def _norm(norm_type: str) -> nn.Module:
    norm: nn.Module = _RMSNorm() if norm_type == "RMSNorm" else nn.LayerNorm(_FEATURES, device="cpu")
    with torch.no_grad():
        for start, value in enumerate(norm.parameters(), 1):
            value.copy_(torch.arange(start, start + _FEATURES))
    return norm


def _numbers(*shape: int, seed: int) -> torch.Tensor:
    """Return whole numbers from -5 to 5 that differ from their neighbours."""
    return ((torch.arange(torch.Size(shape).numel(), device="cpu") * 7 + seed) % 11 - 5.0).reshape(shape)


def assert_styles_agree(rank: Rank, seed: int) -> None:
    """Assert that all these styles agree with one device. A collective."""
    checks = (assert_sequence_parallel_agrees, assert_prepared_modules_agree, assert_losses_in_parallel_agree)
    run_all((partial(check, rank, seed) for check in checks), rank)


def assert_sequence_parallel_agrees(rank: Rank, seed: int = 0) -> None:
    """Assert that norms under `SequenceParallel` give the outputs and gradients of one device. A collective.

    A LayerNorm gets and returns this rank's part along the second dimension. An RMSNorm gets a replicated DTensor, to
    be divided along the first dimension.
    """
    mesh = init_device_mesh("cuda", (rank.size,))
    inputs, factors = (_numbers(2 * rank.size, 2 * rank.size, _FEATURES, seed=seed + i) for i in (0, 1))
    with Findings() as findings:
        for norm_type, dim in (("LayerNorm", 1), ("RMSNorm", 0)):
            style = parallel.SequenceParallel(sequence_dim=dim, use_local_output=dim == 1)
            norm = parallel.parallelize_module(_norm(norm_type).to(rank.device), mesh, style)
            if dim == 1:
                x = inputs.chunk(rank.size, dim)[rank.index].to(rank.device).requires_grad_()
            else:
                replicated = DTensor.from_local(inputs.to(rank.device), mesh, [Replicate()], run_check=False)
                x = replicated.detach().requires_grad_()
            outputs = norm(x)
            if dim == 1:
                outputs = DTensor.from_local(outputs, mesh, [Shard(1)])
            label = f"SequenceParallel of dimension {dim}, {norm_type}, on {rank.device}"
            divided = outputs.placements == (Shard(dim),) and outputs.shape == inputs.shape
            text = f"{label}: the outputs are not divided along dimension {dim}"
            findings.require(divided, text, ranks=(rank.index,))
            if findings.anywhere(rank):
                return
            everything = outputs.full_tensor()
            weighted(everything, factors.to(rank.device)).backward()
            got = {"outputs": copied(everything), **gathered(norm, 1)}
            if x.grad is not None:
                gradient = DTensor.from_local(x.grad, mesh, [Shard(1)]) if dim == 1 else x.grad
                assert isinstance(gradient, DTensor)
                got["gradient of inputs"] = copied(gradient.full_tensor())
            expected = _norm_of_one_device(norm_type, inputs, factors)
            tolerance = _of_norms(expected, inputs)
            with findings.collected():
                assert_gradients_agree(got, expected, tolerance=tolerance, rank=rank.index, what=label)


def _norm_of_one_device(norm_type: str, inputs: torch.Tensor, factors: torch.Tensor) -> dict[str, torch.Tensor]:
    norm, x = _norm(norm_type).double(), inputs.double().requires_grad_()
    outputs = norm(x)
    weighted(outputs, factors.double()).backward()
    return {"outputs": outputs.detach(), "gradient of inputs": gradient_or_zeros(x), **seen(norm, 1)}


def _of_norms(expected: dict[str, torch.Tensor], inputs: torch.Tensor) -> dict[str, float]:
    """Return the tolerance of each result for float32.
    An element of a norm is below 64 and rounds up to 32 times. The gradient of a parameter also sums over the rows,
    whose terms are at most 16."""
    rows = inputs.numel() // _FEATURES
    summed = (rows + 32) * rows * 16 * _ROUNDOFF
    return {name: summed if name.startswith("step 1: gradient") else 32 * 64 * _ROUNDOFF for name in expected}


def _own(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class _Told(nn.Module):
    """A module that records its arguments: a tensor that it needs whole, a word, and its part of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, word: str, *, y: torch.Tensor) -> tuple[torch.Tensor, str, torch.Tensor]:
        self.given = {"x": copied(_own(x)), "y": copied(_own(y))}
        return x * x, word, y * 3


def assert_prepared_modules_agree(rank: Rank, seed: int = 0) -> None:
    """Assert that `PrepareModuleInput`, `PrepareModuleOutput` and their combination redistribute right. A collective.

    The module must get its arguments, and the caller its outputs, in the desired layouts; gradients must be those of
    one device. Both get parts of this rank, or DTensors.
    """
    mesh = init_device_mesh("cuda", (rank.size,))
    x, y = _numbers(2 * rank.size, 3, seed=seed), _numbers(2, 3 * rank.size, seed=seed + 1)
    factors = _numbers(2 * rank.size, 3, seed=seed + 2), _numbers(2, 3 * rank.size, seed=seed + 3)

    def mine(full_tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return full_tensor.chunk(rank.size, dim)[rank.index]

    expected = {
        "x that the module is given": x,
        "y that the module is given": mine(y, 1),
        "outputs of x": mine(x * x, 0),
        "outputs of y": y * 3,
        "gradient of x": mine(2 * x * factors[0], 0),
        "gradient of y": 3 * factors[1],
    }
    with Findings() as findings:
        for how, module in (*_prepared(mesh, local=True).items(), *_prepared(mesh, local=False).items()):
            own, full_y = (tensor.to(rank.device).requires_grad_() for tensor in (mine(x, 0), y))
            out_x, word, out_y = module(own, "word", y=full_y)
            out_x, out_y = _own(out_x), _own(out_y)
            own_factors = mine(factors[0], 0).to(rank.device), factors[1].to(rank.device)
            # With a wrong shape on any rank, no rank runs backward, because its collectives could hang.
            if not on_any_rank(rank, (out_x.shape, out_y.shape) != (own_factors[0].shape, own_factors[1].shape)):
                (weighted(out_x, own_factors[0]) + weighted(out_y, own_factors[1])).backward()
            got = {f"{name} that the module is given": value for name, value in module.given.items()}
            got |= {"outputs of x": copied(out_x), "outputs of y": copied(out_y)}
            gradients = {"gradient of x": own.grad, "gradient of y": full_y.grad}
            got |= {name: copied(gradient) for name, gradient in gradients.items() if gradient is not None}
            with findings.collected():
                assert_same(got, expected, f"{how}, on {rank.device}", rank.index)
            findings.require(word == "word", f"{how}: a word came back as {word!r}", ranks=(rank.index,))


def _prepared(mesh: DeviceMesh, *, local: bool) -> dict[str, Any]:
    """Return modules that gather `x`, given by rows, and divide `y`, given whole, by columns; outputs are moved back.
    With `local`, modules and callers get the parts of this rank, else DTensors."""
    whole, rows, columns = Replicate(), Shard(0), Shard(1)
    inputs: dict[str, Any] = {"input_layouts": (rows, None), "desired_input_layouts": (whole, None)}
    inputs |= {"input_kwarg_layouts": {"y": whole}, "desired_input_kwarg_layouts": {"y": columns}}
    outputs: dict[str, Any] = {"output_layouts": (whole, None, columns), "desired_output_layouts": (rows, None, whole)}
    separate = parallel.parallelize_module(_Told(), mesh, parallel.PrepareModuleInput(**inputs, use_local_output=local))
    parallel.parallelize_module(separate, mesh, parallel.PrepareModuleOutput(**outputs, use_local_output=local))
    style = parallel.PrepareModuleInputOutput(**inputs, **outputs, use_local_input=local, use_local_output=local)
    both = parallel.parallelize_module(_Told(), mesh, style)
    what = "" if local else " of DTensors"
    return {f"PrepareModuleInput and PrepareModuleOutput{what}": separate, f"PrepareModuleInputOutput{what}": both}


_NO_CLASS = -100  # the default of `ignore_index`

_LOSSES: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "mean", "ignore_index": 0, "weight": True},
    {"reduction": "sum", "ignore_index": 1, "weight": True},
    {"reduction": "none", "ignore_index": 1},
)
"""Options of `cross_entropy`; "weight" gives each class a weight."""


def assert_losses_in_parallel_agree(rank: Rank, seed: int = 0) -> None:
    """Assert that `cross_entropy` within `loss_parallel` gives the loss and gradients of one device. A collective.
    The logits are divided among ranks by classes. Afterwards log_softmax accepts logits on all ranks again."""
    mesh = init_device_mesh("cuda", (rank.size,))
    rows, classes = 6, 3 * rank.size
    logits = _numbers(rows, classes, seed=seed) / 2
    target = (torch.arange(rows, device="cpu") * 5 + seed) % classes
    target[:2] = torch.arange(2, device="cpu")  # the classes that some losses ignore
    without_class = target.clone()
    without_class[2] = _NO_CLASS
    factors = torch.arange(1.0, rows + 1, device="cpu")
    weight = torch.arange(1, classes + 1, device="cpu") % 5 + 0.5
    # Each row is a logarithm of a sum of `classes` exponentials, below 8, times the factor of the row.
    tolerance = (classes + 32) * 8 * rows * rows * _ROUNDOFF

    def loss_of(x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        arguments = {**options, "weight": weight.to(x.device, x.dtype)} if "weight" in options else options
        # With weights, torch's gradient looks up the weight of the ignored index too, so it must be a class.
        own_target = target if "ignore_index" in options or "weight" in options else without_class
        return F.cross_entropy(x, own_target.to(x.device), **arguments)

    def compare(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], label: str) -> None:
        tolerances = dict.fromkeys(expected, tolerance)
        with findings.collected():
            assert_gradients_agree(got, expected, tolerance=tolerances, rank=rank.index, what=label)

    with Findings() as findings:
        for options in _LOSSES:
            single = logits.double().requires_grad_()
            expected = loss_of(single, options)
            weighted(expected, factors[: expected.numel()].view_as(expected).double()).backward()
            expected_results = {"loss": expected.detach(), "gradient of logits": gradient_or_zeros(single)}
            divided = distribute_tensor(logits.to(rank.device), mesh, [Shard(1)]).requires_grad_()
            with parallel.loss_parallel():
                loss = loss_of(divided, options)
                assert isinstance(loss, DTensor)
                full_tensor = loss.full_tensor()
                weighted(full_tensor, factors[: full_tensor.numel()].view_as(full_tensor).to(rank.device)).backward()
            got = {"loss": copied(full_tensor)}
            if divided.grad is not None:
                assert isinstance(divided.grad, DTensor)
                got["gradient of logits"] = copied(divided.grad.full_tensor())
            named = ", ".join(f"{name}={value}" for name, value in options.items()) or "as it is"
            compare(got, expected_results, f"cross_entropy within loss_parallel, {named}, on {rank.device}")
        replicated: Any = distribute_tensor(logits.to(rank.device), mesh, [Replicate()])
        label = f"log_softmax after loss_parallel, on {rank.device}"
        try:
            logarithms: Any = F.log_softmax(replicated, 1)
        except ValueError as refused:  # loss_parallel refuses logits that are not divided by classes
            findings.require(False, f"{label}, rank {rank.index}: {refused}", ranks=[rank.index])
        else:
            full_tensor = copied(logarithms.full_tensor() if isinstance(logarithms, DTensor) else torch.zeros(0))
            compare({"result": full_tensor}, {"result": F.log_softmax(logits.double(), 1)}, label)


_BY_ROWS, _BY_COLUMNS = TensorChunkSpec(0), TensorChunkSpec(1)
_VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
_SINGLE = ("ScheduleGPipe", "Schedule1F1B")
_OPTIONS: Mapping[str, Sequence[Any]] = {
    "schedule": (*_SINGLE, "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS", *_VEE),
    "micro_batches": (4, 2, 8),
    "scale_grads": (True, False),
    "args_chunk_spec": (None, (_BY_ROWS,)),
    "kwargs_chunk_spec": (None, {"rows": _BY_ROWS}, {"rows": _BY_COLUMNS}),
    "output_merge_spec": (None, _BY_ROWS),
    "backward_requires_autograd": (True, False),
    "defer_pp_recv": (False, True),
}
"""Options of schedules, the default first."""
_OF_SEVERAL = ("backward_requires_autograd", "defer_pp_recv")
_DEFERS = "defer_pp_recv" in inspect.signature(pipelining.ScheduleLoopedBFS).parameters
TAKES_UNEVEN = not hasattr(pipelining.PipelineStage, "_validate_fwd_input")
"""True if a stage accepts inputs of other shapes than the first. Torch 2.11 refuses them."""


def _together(ranks: int, row: Mapping[str, Any]) -> bool:
    schedule = row.get("schedule", "")
    if row.get("micro_batches", 8) < ranks or (schedule and not hasattr(pipelining, schedule)):
        return False
    if schedule in _SINGLE and any(row.get(name, _OPTIONS[name][0]) is not _OPTIONS[name][0] for name in _OF_SEVERAL):
        return False
    if schedule == "ScheduleLoopedBFS" and (row.get("args_chunk_spec") or row.get("kwargs_chunk_spec")):
        return False
    if row.get("defer_pp_recv") and (not _DEFERS or "ZeroBubble" in schedule or schedule in _VEE):
        # With backward passes in two parts torch receives in another order than it sends: pytorch#178815.
        return False
    return schedule != "ScheduleDualPipeV" or bool(row.get("micro_batches", 8) >= 2 * ranks)


def assert_schedule_options_agree(training: ExactTraining, rank: Rank, *, more: bool) -> None:
    """Assert that schedules train as one device does with each pair of their options. A collective.

    `training` has as many linear layers as there are ranks, and a batch of a multiple of 8. With `more` all rows of
    options are trained, else an eighth of them, by its seed.
    """
    checks = []
    for row in drawn_rows(_OPTIONS, functools.partial(_together, rank.size), seed=training.seed, more=more, share=8):
        schedule, micro_batches = row["schedule"], row["micro_batches"]
        others = {
            name: value
            for name, value in row.items()
            if name not in ("schedule", "micro_batches", "scale_grads") and value is not _OPTIONS[name][0]
        }
        stages = 1 if schedule in _SINGLE else 2
        options = {"scaled": row["scale_grads"], "in_vee": schedule in _VEE, "options": others}
        checks.append(functools.partial(
            assert_schedule_agrees, training, schedule, micro_batches, rank, stages, **options
        ))  # fmt: skip
    if TAKES_UNEVEN:
        checks.append(functools.partial(_assert_uneven_parts_are_joined, rank))
    else:
        left_out("uneven micro-batches of a stage alone", "this torch refuses them")
    run_all(checks, rank)


def _assert_uneven_parts_are_joined(rank: Rank) -> None:
    """Assert that a stage alone returns its outputs in order for micro-batches of several lengths: several stages
    cannot have these."""
    alone, groups = dist.new_subgroups_by_enumeration([[index] for index in range(rank.size)])
    layer = nn.Linear(3, 2, bias=False).to(rank.device)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).view(2, 3))
    x = torch.arange(21.0, device=rank.device).view(7, 3)
    outputs = pipelining.ScheduleGPipe(pipelining.PipelineStage(layer, 0, 1, rank.device, group=alone), 3).step(x)
    label = f"ScheduleGPipe of 3 micro-batches of 7 samples in one stage, on {rank.device}"
    assert_same({"outputs": copied(outputs)}, {"outputs": copied(layer(x)).double()}, label, rank.index)
    for group in groups:
        dist.destroy_process_group(group)


class Portion(NamedTuple):
    """A rank's part of a result: the indices `at` of dimension `dim` of the whole."""

    value: torch.Tensor
    dim: int
    at: Sequence[int] | torch.Tensor | slice

    def of(self, full_tensor: torch.Tensor) -> torch.Tensor:
        at = torch.arange(full_tensor.shape[self.dim], device="cpu")[self.at] if isinstance(self.at, slice) else self.at
        return full_tensor.index_select(self.dim, torch.as_tensor(at, dtype=torch.int64, device="cpu"))


Results = dict[str, torch.Tensor | Portion]  # results of a rank by name: whole, or its part


class DividedStep(ABC):
    """A case of a mechanism, with data that all ranks and the reference make alike.
    `step_of` makes it on each rank; `assert_mechanisms_agree` runs it once divided and once undivided, and drops it."""

    def __init__(self, case: MechanismCase, ranks: int) -> None:
        self.case, self.ranks = case, ranks
        self.dtype: torch.dtype = getattr(torch, case.dtype)

    def __getitem__(self, size: str) -> int:
        number = self.case.sizes[size]
        assert isinstance(number, int), size
        return number

    def numbers(self, salt: int, *shape: int) -> torch.Tensor:
        """Return eighths from -1 to 1, float64 on the CPU. `salt` separates the tensors of a case."""
        generator = torch.Generator().manual_seed(self.case.seed * 64 + salt)
        return torch.randint(-8, 9, shape, generator=generator, device="cpu").double() / 8

    def tensors(self, dtype: torch.dtype, *shapes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return tuple(self.numbers(salt, *shape).to(dtype) for salt, shape in enumerate(shapes))

    def lacks(self, rank: Rank) -> str | None:
        """Return what these devices lack for the mechanism, or None; the same on all ranks. A collective."""
        return None

    @abstractmethod
    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Run the step on the CPU; return the whole results by name: outputs, losses, gradients."""

    @abstractmethod
    def divided(self, rank: Rank) -> Results:
        """Run the step with the recipe, in `dtype`; return what this rank has of each result. A collective."""


def _gradients(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"gradient of {name}": gradient_or_zeros(value) for name, value in tensors.items()}


def _portions(results: Mapping[str, torch.Tensor], places: Mapping[str, tuple[int, Any]]) -> Results:
    """Return results; those of the tensors in `places` are parts, at indices of a dimension."""
    chosen = {name: places.get(name.removeprefix("gradient of ")) for name in results}
    return {name: Portion(value, *place) if (place := chosen[name]) else value for name, value in results.items()}


def step_of(case: MechanismCase, ranks: int) -> DividedStep:
    return pkgutil.resolve_name(f"{__name__}:{MECHANISMS[case.name].class_name}")(case, ranks)


def tolerance_of(expected: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Return the tolerance of each result: 2^8 unit roundoffs of its largest element, or of 1.

    No result depends on more than some 2^6 roundings in sequence, each relative to a number that is at most some times
    as large as the result, or than 1. Exponents are at most some units: logits are shifted by their maximum.
    """
    return {
        name: 2.0**8 * unit_roundoff(dtype) * max(1.0, float(value.abs().max()) if value.numel() else 0.0)
        for name, value in expected.items()
    }


def assert_mechanisms_agree(rank: Rank, cases: Sequence[MechanismCase]) -> None:
    """Assert that each mechanism has the outputs, losses and gradients of one device. A collective."""
    with Findings() as findings:
        for case in cases:
            step = step_of(case, rank.size)
            if lack := step.lacks(rank):
                left_out(case.name, lack)
                continue
            with full_precision():
                got = step.divided(rank)
            expected = step.undivided(torch.float64)
            tolerance = tolerance_of(expected, step.dtype)
            results: dict[str, torch.Tensor] = {}
            for name, result in got.items():
                results[name] = copied(result.value if isinstance(result, Portion) else result)
                if isinstance(result, Portion) and name in expected:
                    expected[name] = result.of(expected[name])
            sizes = ", ".join(f"{name} {value}" for name, value in case.sizes.items())
            label = f"{case.name} ({sizes}, {case.dtype}) on {rank.size} ranks, {rank.device}"
            with findings.collected():
                assert_gradients_agree(results, expected, tolerance=tolerance, rank=rank.index, what=label)
            if findings.enough(rank):
                break


_HEADS, _WIDTH = 2, 4
_FEATURES = _HEADS * _WIDTH


class ContextOfTorch(DividedStep):
    """`torch.distributed.tensor.experimental.context_parallel`, around `scaled_dot_product_attention`."""

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return queries, keys, values, and the factors of outputs in the loss."""
        # The memory-efficient kernel pads its logsumexp to 32 rows: each half of a rank's part must be a multiple.
        return self.tensors(dtype, *[(1, _HEADS, 64 * self.ranks, _WIDTH)] * 4)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        q, k, v, factors = (tensor.requires_grad_() for tensor in self.data(dtype))
        outputs = F.scaled_dot_product_attention(q, k, v, is_causal=self.case.sizes["causal"] != "not causal")
        weighted(outputs, factors).backward()
        return {"outputs": outputs.detach()} | _gradients({"q": q, "k": k, "v": v})

    def divided(self, rank: Rank) -> Results:
        from torch.distributed.tensor.experimental import _attention as attention
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh("cuda", (rank.size,), mesh_dim_names=("cp",))
        q, k, v, factors = buffers = [tensor.to(rank.device) for tensor in self.data(self.dtype)]
        causal = self.case.sizes["causal"]
        options = attention._cp_options
        before = options.enable_load_balance, options.rotate_method
        try:
            options.enable_load_balance = causal == "balanced"
            attention.set_rotate_method(str(self.case.sizes["rotation"]))
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers={factors}):
                q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
                outputs = F.scaled_dot_product_attention(q, k, v, is_causal=causal != "not causal")
                weighted(outputs, factors).backward()
                # The outputs with the sequence before the heads, as a model has them outside of its attention.
                shards = {"outputs": outputs.detach().transpose(1, 2)} | _gradients({"q": q, "k": k, "v": v})
                full_tensors = attention.context_parallel_unshard(mesh, [*shards.values()], [1, 2, 2, 2])
                full_tensors[0] = full_tensors[0].transpose(1, 2)
        finally:
            options.enable_load_balance, options.rotate_method = before
        return dict(zip(shards, full_tensors, strict=True))


_LAYER_FEATURES = 6


class AsynchronousLayers(DividedStep):
    """`recipes.model_parallel`: two layers whose products overlap with their collectives."""

    def lacks(self, rank: Rank) -> str | None:
        peers = {*range(torch.cuda.device_count())} - {rank.device.index}
        unreachable = not all(torch.cuda.can_device_access_peer(rank.device, peer) for peer in peers)
        if on_any_rank(rank, unreachable or rank.node_index > 0):
            return "GPUs that do not reach the memory of each other"
        refused = False
        if simulated_device_count() is None:
            from torch.distributed import _symmetric_memory as symmetric

            try:
                symmetric.get_symm_mem_workspace(rank.group.group_name, 1 << 16)
            except RuntimeError:  # the driver, or the container, does not share memory between processes
                refused = True
        return "no symmetric memory" if on_any_rank(rank, refused) else None

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return inputs, factors of outputs in the loss, and the weights of both layers."""
        rows, hidden = self["own"] * self.ranks, self["hidden"] * self.ranks
        shapes = (rows, _LAYER_FEATURES), (rows, _LAYER_FEATURES), (hidden, _LAYER_FEATURES), (_LAYER_FEATURES, hidden)
        return self.tensors(dtype, *shapes)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        x, factors, up, down = (tensor.requires_grad_() for tensor in self.data(dtype))
        outputs = F.linear(F.gelu(F.linear(x, up)), down)
        weighted(outputs, factors).backward()
        return {"outputs": outputs.detach()} | _gradients({"inputs": x, "up": up, "down": down})

    def divided(self, rank: Rank) -> Results:
        x, factors, up, down = self.data(self.dtype)
        rows, hidden = (chunks(count, rank.size)[rank.index] for count in (len(x), len(up)))
        x, up, down = (tensor.to(rank.device).requires_grad_() for tensor in (x[rows], up[hidden], down[:, hidden]))
        outputs = model_parallel.scattered_linear(F.gelu(model_parallel.gathered_linear(x, up)), down)
        weighted(outputs, factors[rows].to(rank.device)).backward()
        results = {"outputs": outputs.detach()} | _gradients({"inputs": x, "up": up, "down": down})
        return _portions(results, {"outputs": (0, rows), "inputs": (0, rows), "up": (0, hidden), "down": (1, hidden)})
