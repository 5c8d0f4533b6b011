"""Compare training on several devices with the same run on one: DataParallel, DDP, and by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.models import assert_gradients_agree, assert_replicas_agree
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import GradientMismatch
from mgpu_check.numerics.differences import difference
from mgpu_check.numerics.steps import MeasuredStep, Step, full_precision, measure_step, measure_step_provisionally
from mgpu_check.oracles.training import models
from mgpu_check.oracles.training import training_steps as steps
from mgpu_check.oracles.training.cases import TrainingSpec

_PAIRS, _MORE_PAIRS, _MAGNIFIED = 2, 5, 4.0


def assert_data_parallel_agrees(training: TrainingSpec, devices: Sequence[torch.device]) -> None:
    """Assert that `nn.DataParallel` over `devices` trains as the first of them alone does.

    With BatchNorm the run on one device processes each batch in the shards of DataParallel, because the samples of a
    shard are normalised together. Statistics must be those of the first shard, because the other replicas drop theirs.
    """
    home = devices[0]
    with full_precision():
        start, batches = training.initial(), training.batches()
        model = DataParallel(training.initial().to(home), device_ids=[device.index for device in devices])
        optimizer = torch.optim.SGD(model.parameters(), lr=training.rate, momentum=training.momentum)
        for inputs, labels in batches:
            steps.train_step(model, optimizer, inputs.to(home), labels.to(home))
        shards = len(torch.arange(training.batch).chunk(len(devices)))
        measured = _measured(training, steps.as_inputs(start, batches), home, shards, torch.chunk)
        got = steps.observed(model.module) | _statistics(model.module, " of rank 0")
        _assert_as_measured(
            got,
            measured,
            leave_out=lambda name: " of rank " in name and not name.endswith(" of rank 0"),
            constants={"devices": len(devices), "batch size": training.batch},
            what=f"DataParallel on {len(devices)} devices",
        )


def assert_step_by_hand_agrees(training: TrainingSpec, devices: Sequence[torch.device]) -> None:
    """Assert that the hand-written step (`training_steps.train_batch`) over `devices` trains as one device does.
    SGD has no momentum here, even if the spec has one."""
    training = TrainingSpec(training.model, training.batch, training.steps, seed=training.seed)
    with full_precision():
        start, batches = training.initial(), training.batches()

        replicas = steps.replicate(dict(start.named_parameters()), devices)
        for inputs, labels in batches:
            for replica in replicas:
                steps.clear(replica)
            forward = models.lenet if training.model == "lenet" else steps.forward_of(start)
            steps.train_batch(forward, replicas, inputs, labels, training.rate)
        results = [steps.observed(replica) for replica in replicas]
        assert_replicas_agree(results, what=f"step by hand on {len(devices)} devices")
        measured = _measured(training, steps.as_inputs(start, batches), devices[0], len(devices), steps.split)
        _assert_as_measured(
            results[0],
            measured,
            constants={"devices": len(devices), "batch size": training.batch},
            what=f"step by hand on {len(devices)} devices",
        )


def assert_distributed_agrees(training: TrainingSpec, rank: Rank, *, evaluation: bool = False, **options: Any) -> None:
    """Assert, on every rank, that DDP with these options trains as one device does. A collective.

    Ranks start with different parameters, because DDP must give them those of rank 0. Gradients and parameters must
    agree on all ranks bit for bit, and rank 0 compares its own with one device. With BatchNorm, in training, the run on
    one device processes each batch in the shards of the ranks, and the statistics of each rank are compared too.

    Raises:
        ReplicaMismatch: on the ranks whose gradients or parameters differ from those of most others.
        GradientMismatch: on rank 0, if a result is off by more than the tolerance measured on this run; on any rank, if
            evaluation changes statistics.
    """
    with full_precision():
        model, start = _train(training, rank, evaluation, **options)
        results = steps.observed(model)
        # Run all collectives first, so that a rank that raises does not leave others waiting.
        gathered = {} if evaluation else _gather_statistics(model, rank)
        assert_replicas_agree(results, group=rank.group, what=f"DDP after {_steps(training.steps)}")
        if evaluation:
            before, after = _statistics(start), _statistics(model)
            exactly = dict.fromkeys(before, 0.0)
            assert_gradients_agree(after, before, tolerance=exactly, rank=rank.index, what="evaluation")
        if rank.index:
            return
        inputs = steps.as_inputs(start, training.batches())
        measured = _measured(training, inputs, rank.device, rank.size, steps.split, evaluation=evaluation)
        _assert_as_measured(
            results | gathered,
            measured,
            rank=0,
            constants={"world size": rank.size, "batch size": training.batch, "micro-batches": training.windows},
            what=f"DDP on {rank.size} ranks",
        )


def assert_distributed_replicas_agree(training: TrainingSpec, rank: Rank) -> None:
    """Assert, on every rank, that DDP keeps all parameters equal bit for bit, from the start on. A collective."""

    with Findings() as findings:

        def compare(step: int, model: nn.Module) -> None:
            with findings.collected():
                assert_replicas_agree(model, group=rank.group, what=f"DDP, parameters after {_steps(step)}")

        _train(training, rank, False, after=compare)


def _train(
    training: TrainingSpec,
    rank: Rank,
    evaluation: bool,
    after: Callable[[int, nn.Module], None] = lambda step, model: None,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """Train this rank's part under DDP; return the trained model, and the initial model of rank 0."""
    own = training.initial(rank.index).to(rank.device)
    device_ids = [rank.device] if rank.device.type == "cuda" else None
    parallel = DistributedDataParallel(own, device_ids=device_ids, **options).train(not evaluation)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=training.rate, momentum=training.momentum)
    after(0, own)
    for step, (inputs, labels) in enumerate(training.batches(), start=1):
        x = steps.split(inputs, rank.size)[rank.index].to(rank.device)
        y = steps.split(labels, rank.size)[rank.index].to(rank.device)
        windows = list(zip(steps.split(x, training.windows), steps.split(y, training.windows), strict=True))
        steps.accumulated_step(parallel, optimizer, windows, training.batch, rank.size)
        after(step, own)
    return own, training.initial()


@dataclass(frozen=True)
class _Measure:
    """Measures a step on one device, provisionally or in full; see `measure_step` for the attributes. `_measured` makes
    it, and `_assert_as_measured` measures in full only if the provisional tolerance does not suffice."""

    step: Step
    inputs: Mapping[str, torch.Tensor]
    singles: Sequence[Mapping[str, torch.Tensor]]

    def provisionally(self) -> MeasuredStep[str]:
        return measure_step_provisionally(self.step, self.inputs, self.singles[-1])

    def in_full(self, **options: Any) -> MeasuredStep[str]:
        return measure_step(self.step, self.inputs, singles=self.singles, **options)


def _within(got: Mapping[str, torch.Tensor], measured: MeasuredStep[str]) -> bool:
    return got.keys() == measured.reference.keys() and all(
        got[name].shape == value.shape and difference(got[name], value, measured.tolerance[name]) is None
        for name, value in measured.reference.items()
    )


def _measured(
    training: TrainingSpec,
    inputs: Mapping[str, torch.Tensor],
    device: torch.device,
    shards: int,
    divide: steps.Split,
    *,
    evaluation: bool = False,
) -> _Measure:
    """Run on one device; return an object that measures the results and their tolerances in float32."""
    options: dict[str, Any] = {"rate": training.rate, "momentum": training.momentum, "divide": divide}
    run = partial(steps.on_one_device, training.build, training.steps, evaluation=evaluation, **options)
    placed = {name: value.to(device) for name, value in inputs.items()}
    # With BatchNorm, samples of a shard affect each other, so only the run in shards is the same computation.
    together = training.model in ("convnet", "resnet18") and not evaluation
    undivided, sharded = run(shards=shards if together else 1), run(shards=shards)
    singles = [sharded(placed)] if together or shards == 1 else [undivided(placed), sharded(placed)]
    return _Measure(undivided, inputs, singles)


def _assert_as_measured(
    got: Mapping[str, torch.Tensor],
    measure: _Measure,
    leave_out: Callable[[str], bool] = lambda name: False,
    **kwargs: Any,
) -> None:
    """Assert that the results agree with the measurement; if they do not, measure more precisely before raising.

    The provisional measurement in float32 takes a third of the time, and suffices for most right results. With few
    perturbations the full measurement may miss a ReLU that is within rounding errors of its border: two pairs miss it
    in about one of a hundred cases. More and larger perturbations do not miss it, and do not excuse errors of other
    causes.
    """
    enough = measure.provisionally()
    if _within(got, enough.without(filter(leave_out, enough.reference))):
        return
    measured = measure.in_full(pairs=_PAIRS)
    measured = measured.without(filter(leave_out, measured.reference))
    try:
        assert_gradients_agree(got, measured, **kwargs)
    except GradientMismatch:
        remeasured = measure.in_full(pairs=_MORE_PAIRS, seed=1, magnified=_MAGNIFIED)
        assert_gradients_agree(got, measured.wider(remeasured), **kwargs)


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _statistics(model: nn.Module, suffix: str = "") -> dict[str, torch.Tensor]:
    return {name + suffix: value.clone() for name, value in model.named_buffers() if value.is_floating_point()}


def _gather_statistics(model: nn.Module, rank: Rank) -> dict[str, torch.Tensor]:
    """Gather the statistics of all ranks on each rank. A collective."""
    gathered: dict[str, torch.Tensor] = {}
    for name, value in _statistics(model).items():
        rows = [torch.empty_like(value) for _ in range(rank.size)]
        dist.all_gather(rows, value)
        gathered |= {f"{name} of rank {index}": row for index, row in enumerate(rows)}
    return gathered
