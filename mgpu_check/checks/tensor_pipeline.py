"""Torch's own tensor parallelism and pipelining, against one device: to the bit, on exact data."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mgpu_check.checks.exact_training import gathered, one_device, seen, sgd
from mgpu_check.checks.findings import Findings
from mgpu_check.checks.gradients import assert_gradients_agree, assert_same
from mgpu_check.checks.ranks_parallel import stage_of
from mgpu_check.numerics.steps import full_precision
from mgpu_check.rank_side.rank import Rank
from mgpu_check.recipes.training import weighted
from mgpu_check.specs.exact_training import ExactTraining
from mgpu_check.torch_hooks.tensors import copied

__all__ = [
    "SCHEDULES",
    "assert_parallelized_embedding_agrees",
    "assert_parallelized_modules_agree",
    "assert_schedule_agrees",
]

SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble")
"""The last one takes the gradients of inputs and of weights apart."""


def assert_parallelized_modules_agree(training: ExactTraining, rank: Rank) -> None:
    """Assert that `parallelize_module`, by columns and then by rows, trains as one device does. A collective.

    The hidden width must be a multiple of the world size. Once with inputs that all ranks hold, and once with inputs and
    outputs divided along the batch (sequence parallelism), which then must be a multiple, too.

    Raises:
        GradientMismatch: outputs, gradients or parameters differ.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    __tracebackhide__ = True
    mesh = init_device_mesh("cuda", (rank.size,))
    expected, tolerance = _with_divided_bias(training, rank.size)
    with Findings() as findings:
        for divided in (False, True):
            layout = Shard(0) if divided else Replicate()
            plan = {
                "0": ColwiseParallel(input_layouts=layout),
                "2": RowwiseParallel(output_layouts=layout, use_local_output=False),
            }
            model = parallelize_module(training.model().to(rank.device), mesh, plan)
            optimizer = sgd(training, model)
            got: dict[str, torch.Tensor] = {}
            with full_precision():
                for step, (inputs, factors) in enumerate(training.batches(), 1):
                    optimizer.zero_grad()
                    x = inputs.chunk(rank.size)[rank.index] if divided else inputs
                    outputs = model(x.to(rank.device))
                    whole = outputs.full_tensor()
                    weighted(whole, factors.to(rank.device)).backward()
                    optimizer.step()
                    got[f"step {step}: outputs"] = copied(whole)
                    got |= gathered(model, step)
            how = "the batch divided" if divided else "the batch on all ranks"
            what = f"parallelize_module, {how}, on {rank.device}"
            with findings.collected():
                assert_gradients_agree(got, expected, tolerance=tolerance, rank=rank.index, what=what)


def assert_parallelized_embedding_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that an embedding that `parallelize_module` divides, by its rows and by its columns, gives every row, and the
    gradient of each, as on one device. A collective.

    The last rank has less than the others, but not nothing, which torch refuses. Every row is looked up, some of them twice.

    Raises:
        GradientMismatch: outputs, or the gradient, differ.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    __tracebackhide__ = True
    mesh = init_device_mesh("cuda", (rank.size,))
    rows = columns = 3 * rank.size - 1
    values = torch.arange(1.0, rows * columns + 1).reshape(rows, columns)
    tokens = torch.cat((torch.arange(rows), torch.arange(0, rows, 2)))
    factors = (torch.arange(len(tokens) * columns) * 7 + training.seed) % 11 - 5.0
    factors = factors.reshape(len(tokens), columns)
    right = {"outputs": values[tokens], "gradient": torch.zeros_like(values).index_add(0, tokens, factors)}
    with Findings() as findings:
        for how, style in (
            ("rows", RowwiseParallel(input_layouts=Replicate(), use_local_output=False)),
            ("columns", ColwiseParallel(output_layouts=Replicate(), use_local_output=False)),
        ):
            layer = nn.Embedding.from_pretrained(values.clone(), freeze=False).to(rank.device)
            divided = parallelize_module(layer, mesh, style)
            outputs = divided(tokens.to(rank.device)).full_tensor()
            weighted(outputs, factors.to(rank.device)).backward()
            got = {"outputs": copied(outputs), "gradient": gathered(divided, 1)["step 1: gradient of weight"]}
            with findings.collected():
                assert_same(got, right, f"an embedding of {rows} rows, divided by {how}, on {rank.device}", rank.index)


def _with_divided_bias(training: ExactTraining, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train on one device; return the results, and how far off they may be where each rank adds its part of the bias.

    DTensor divides the bias of a sum over ranks by their number n, which rounds unless that is a power of two. A rank's
    part of an output is then off by two roundings at most, and the sum of n parts by n - 1 more, each relative to the
    sum of the magnitudes: (n + 1)·u·(|h|·|W| + |b|), u = 2^-24. No gradient depends on these outputs.
    """
    model = training.model()
    magnitudes: list[torch.Tensor] = []

    def add_up(layer: nn.Linear, given: tuple[torch.Tensor, ...], made: torch.Tensor) -> None:
        magnitudes.append((given[0].abs() @ layer.weight.abs().T + layer.bias.abs()).detach())

    model[-1].register_forward_hook(add_up)
    expected = one_device(training, model)
    tolerance = {name: torch.zeros_like(value) for name, value in expected.items()}
    if ranks & (ranks - 1):
        for step, magnitude in enumerate(magnitudes, 1):
            tolerance[f"step {step}: outputs"] = (ranks + 1) * 2.0**-24 * magnitude
    return expected, tolerance


def assert_schedule_agrees(training: ExactTraining, schedule: str, micro_batches: int, rank: Rank) -> None:
    """Assert that a schedule of `torch.distributed.pipelining`, a stage on each rank, trains as one device does: that each
    micro-batch has its part of keyword arguments, and each step its losses. A collective.

    The model must have as many linear layers as there are ranks, and `micro_batches` must be a power of two that divides
    the batch: schedules divide gradients by it.

    Raises:
        GradientMismatch: this rank's outputs, gradients or parameters differ.
    """
    from torch.distributed import pipelining

    __tracebackhide__ = True
    last = rank.index == rank.size - 1
    own = training.layers()[rank.index]
    module = _Stage(own, nn.Identity() if last else nn.ReLU()).to(rank.device)
    optimizer = sgd(training, module)
    stage = pipelining.PipelineStage(module, rank.index, rank.size, rank.device)

    def loss(outputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return weighted(outputs, factors) * micro_batches

    kind = getattr(pipelining.schedules, schedule)
    several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    runs = kind([stage] if several else stage, n_microbatches=micro_batches, loss_fn=loss)
    got: dict[str, torch.Tensor] = {}
    losses: list[torch.Tensor] = []
    numbers = torch.arange(training.batch, device=rank.device)
    with full_precision():
        for step, (inputs, factors) in enumerate(training.batches(), 1):
            optimizer.zero_grad()
            given = (inputs.to(rank.device),) if rank.index == 0 else ()
            target = {"target": factors.to(rank.device), "losses": losses} if last else {}
            outputs = runs.step(*given, rows=numbers, **target)
            optimizer.step()
            got |= seen(module, step)
            got[f"step {step}: rows of micro-batches"] = torch.cat(module.rows[-micro_batches:]).cpu()
            if last:
                got[f"step {step}: outputs"] = copied(outputs)
                got[f"step {step}: losses"] = torch.stack([copied(one) for one in losses])
    what = f"{schedule} of {micro_batches} micro-batches, on {rank.device}"
    single = one_device(training)
    expected = stage_of(single, rank.index, last)
    for step, (_, factors) in enumerate(training.batches(), 1):
        expected[f"step {step}: rows of micro-batches"] = numbers.cpu()
        if last:
            parts = zip(single[f"step {step}: outputs"].chunk(micro_batches), factors.chunk(micro_batches), strict=True)
            expected[f"step {step}: losses"] = torch.stack([loss(made, own.double()) for made, own in parts])
    assert_same(got, expected, what, rank.index)


class _Stage(nn.Sequential):
    """Layers that note which rows of the batch each micro-batch has."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.rows: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # a stage of its own takes more
        self.rows.append(rows)
        made: torch.Tensor = super().forward(x)
        return made
