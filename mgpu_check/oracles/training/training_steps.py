"""Training steps on one and several devices: by hand, with DataParallel, and with DistributedDataParallel.

The loss is always the mean over the *global* batch: the sum over each shard, divided by the size of the whole batch.
So shards of different sizes, including empty ones, have the correct weight.

The reference is training on one device, as a function of named tensors, in any precision. Training on several devices
is compared with it, within a measured tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.models import assert_gradients_agree, assert_replicas_agree, gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import GradientMismatch
from mgpu_check.numerics.differences import difference
from mgpu_check.numerics.steps import MeasuredStep, Step, full_precision, measure_step, measure_step_provisionally
from mgpu_check.oracles.training import gradient_exchange as reducing
from mgpu_check.oracles.training import models
from mgpu_check.oracles.training.cases import TrainingSpec

Forward = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
Shard = tuple[torch.Tensor, torch.Tensor]
Split = Callable[[torch.Tensor, int], Sequence[torch.Tensor]]


def forward_of(module: nn.Module) -> Forward:
    """Return the forward pass of `module` as a function of inputs and parameters."""
    return lambda inputs, parameters: functional_call(module, dict(parameters), (inputs,))


def weighted(outputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the sum of `outputs` * `factors`, two tensors of one shape, as a scalar: the loss of exact training.
    The gradient of each output is its factor, so it does not round."""
    return (outputs * factors).sum()


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the cross entropy over the samples: logits (batch, classes), labels (batch,) -> ()."""
    return F.cross_entropy(logits, labels, reduction="sum")


def weight(batch_size: int, replicas: int = 1) -> float:
    """Return the factor for a summed loss, such that averaging over `replicas` gives the gradients of the mean loss."""
    return replicas / batch_size


def split(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split `tensor` along the first dimension into `count` shards of almost equal size; some may be empty."""
    return list(tensor.tensor_split(count))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Take one step on one device, or with `nn.DataParallel`, which gathers all outputs on the first device."""
    optimizer.zero_grad()
    (summed_loss(model(inputs), labels) * weight(len(inputs))).backward()
    optimizer.step()


def accumulated_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, shards: Sequence[Shard], batch_size: int, ranks: int = 1
) -> None:
    """Take one step with gradients accumulated over micro-batches; DDP synchronizes only in the last one.

    `shards` are the micro-batches of this rank; a single one means no accumulation. The whole batch has `batch_size`
    samples, over all ranks and micro-batches, and DDP averages over `ranks`.
    """
    optimizer.zero_grad()
    for index, (inputs, labels) in enumerate(shards):
        with unsynchronized(model) if index + 1 < len(shards) else nullcontext():
            (summed_loss(model(inputs), labels) * weight(batch_size, ranks)).backward()
    optimizer.step()


def unsynchronized(model: nn.Module) -> AbstractContextManager[None]:
    """Within the context, do not synchronize the gradients of a DDP module; do nothing for other modules."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def shardwise_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, shards: Sequence[Shard]
) -> list[dict[str, torch.Tensor]]:
    """Take one step on one device that processes the batch shard by shard, as several devices do.

    This is the correct reference if the samples of a shard interact, as in BatchNorm: each shard is normalised by its
    own statistics. Every shard starts from the same buffers. The model keeps the buffers of the first shard, as
    DataParallel keeps those of its first device, and DDP those of rank 0. Return the buffers after each shard, in
    order; they correspond to those of the ranks of DDP.
    """
    optimizer.zero_grad()
    batch_size = sum(len(inputs) for inputs, _ in shards)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers_of_shards = []
    for inputs, labels in shards:
        _set_buffers(model, before)
        (summed_loss(model(inputs), labels) * weight(batch_size)).backward()
        buffers_of_shards.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    # torch 2.13: the first replica of DataParallel shares its buffers with the module (torch/nn/parallel/
    # data_parallel.py), and DDP broadcasts those of rank 0 (torch/nn/parallel/distributed.py, _sync_buffers).
    _set_buffers(model, buffers_of_shards[0])
    optimizer.step()
    return buffers_of_shards


def _set_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    # Through .data: the backward pass of BatchNorm refuses statistics whose version counter has changed (torch 2.13).
    for name, buffer in model.named_buffers():
        buffer.data.copy_(values[name])


def replicate(parameters: Mapping[str, torch.Tensor], devices: Sequence[torch.device]) -> list[dict[str, torch.Tensor]]:
    """Copy the parameters to each device, as leaf tensors that require gradients."""
    return [
        {name: value.detach().clone().to(device).requires_grad_() for name, value in parameters.items()}
        for device in devices
    ]


def train_batch(
    forward: Forward,
    replicas: Sequence[Mapping[str, torch.Tensor]],
    inputs: torch.Tensor,
    labels: torch.Tensor,
    rate: float,
) -> None:
    """Take one step by hand, on one device per replica of the parameters.

    Splits the batch, sums the loss over each shard, sums the gradients with `allreduce`, and takes the same step of SGD
    on every replica.
    """
    devices = [next(iter(replica.values())).device for replica in replicas]
    shards = zip(split(inputs, len(devices)), split(labels, len(devices)), devices, replicas, strict=True)
    losses = [summed_loss(forward(x.to(device), own), y.to(device)) for x, y, device, own in shards]
    for own_loss in losses:
        own_loss.backward()
    with torch.no_grad():
        for name in replicas[0]:
            reducing.allreduce([gradient_of(replica[name]) for replica in replicas])
        for replica in replicas:
            sgd(replica, rate, len(inputs))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "the loss does not depend on this tensor"
    return parameter.grad


def sgd(parameters: Mapping[str, torch.Tensor], rate: float, batch_size: int) -> None:
    """Take a step of SGD in place. Gradients are sums over `batch_size` samples, and are divided by it in place.
    Call `clear` before the next backward pass."""
    with torch.no_grad():
        for parameter in parameters.values():
            gradient = gradient_of(parameter)
            gradient /= batch_size
            parameter -= rate * gradient


def clear(parameters: Mapping[str, torch.Tensor]) -> None:
    for parameter in parameters.values():
        parameter.grad = None


def as_inputs(model: nn.Module, batches: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """Return all inputs of a training by name: the state of `model`, and each batch."""
    named = {f"state {name}": value.detach().clone() for name, value in model.state_dict().items()}
    for step, (inputs, labels) in enumerate(batches):
        named |= {f"inputs {step}": inputs, f"labels {step}": labels}
    return named


def observed(model: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors to compare after a step: "gradient of <parameter>", and "<parameter>" after the update."""
    parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else model
    gradients = {f"gradient of {name}": gradient_or_zeros(value).clone() for name, value in parameters.items()}
    return gradients | {name: value.detach().clone() for name, value in parameters.items()}


def on_one_device(
    build: Callable[[], nn.Module],
    steps: int,
    *,
    rate: float,
    momentum: float = 0.0,
    shards: int = 1,
    divide: Split = split,
    evaluation: bool = False,
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return a function from the tensors of `as_inputs` to those of `observed`: `steps` steps of SGD on one device.

    Args:
        build: creates the model; state, dtype and device are replaced by those of the inputs.
        steps: number of steps; each has its own batch.
        shards: number of shards per batch, see `shardwise_step`. In training mode, the result also has the
            buffers of each shard after the last step, as "<buffer> of rank <shard>".
        divide: how to divide a batch into shards.
        evaluation: train in evaluation mode: BatchNorm uses its running statistics and does not update them.
    """

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model = _model(build, inputs).train(not evaluation)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        buffers_of_shards: list[dict[str, torch.Tensor]] = []
        for step in range(steps):
            images, labels = inputs[f"inputs {step}"], inputs[f"labels {step}"]
            pairs = list(zip(divide(images, shards), divide(labels, shards), strict=True))
            buffers_of_shards = shardwise_step(model, optimizer, pairs)
        buffers = {
            f"{name} of rank {shard}": value
            for shard, values in enumerate([] if evaluation else buffers_of_shards)
            for name, value in values.items()
            if value.is_floating_point()
        }
        return observed(model) | buffers

    return run


def _model(build: Callable[[], nn.Module], inputs: Mapping[str, torch.Tensor]) -> nn.Module:
    states = {name.removeprefix("state "): value for name, value in inputs.items() if name.startswith("state ")}
    reference = next(iter(states.values()))
    with torch.random.fork_rng(devices=[]):
        model = build().to(device=reference.device, dtype=reference.dtype)
    model.load_state_dict(states)
    return model


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
            train_step(model, optimizer, inputs.to(home), labels.to(home))
        shards = len(torch.arange(training.batch).chunk(len(devices)))
        measured = _measured(training, as_inputs(start, batches), home, shards, torch.chunk)
        got = observed(model.module) | _statistics(model.module, " of rank 0")
        _assert_as_measured(
            got,
            measured,
            leave_out=lambda name: " of rank " in name and not name.endswith(" of rank 0"),
            constants={"devices": len(devices), "batch size": training.batch},
            what=f"DataParallel on {len(devices)} devices",
        )


def assert_step_by_hand_agrees(training: TrainingSpec, devices: Sequence[torch.device]) -> None:
    """Assert that the hand-written step (`train_batch`) over `devices` trains as one device does.
    SGD has no momentum here, even if the spec has one."""
    training = TrainingSpec(training.model, training.batch, training.steps, seed=training.seed)
    with full_precision():
        start, batches = training.initial(), training.batches()

        replicas = replicate(dict(start.named_parameters()), devices)
        for inputs, labels in batches:
            for replica in replicas:
                clear(replica)
            forward = models.lenet if training.model == "lenet" else forward_of(start)
            train_batch(forward, replicas, inputs, labels, training.rate)
        results = [observed(replica) for replica in replicas]
        assert_replicas_agree(results, what=f"step by hand on {len(devices)} devices")
        measured = _measured(training, as_inputs(start, batches), devices[0], len(devices), split)
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
        results = observed(model)
        # Run all collectives first, so that a rank that raises does not leave others waiting.
        gathered = {} if evaluation else _gather_statistics(model, rank)
        assert_replicas_agree(results, group=rank.group, what=f"DDP after {_steps(training.steps)}")
        if evaluation:
            before, after = _statistics(start), _statistics(model)
            exactly = dict.fromkeys(before, 0.0)
            assert_gradients_agree(after, before, tolerance=exactly, rank=rank.index, what="evaluation")
        if rank.index:
            return
        inputs = as_inputs(start, training.batches())
        measured = _measured(training, inputs, rank.device, rank.size, split, evaluation=evaluation)
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
        x = split(inputs, rank.size)[rank.index].to(rank.device)
        y = split(labels, rank.size)[rank.index].to(rank.device)
        windows = list(zip(split(x, training.windows), split(y, training.windows), strict=True))
        accumulated_step(parallel, optimizer, windows, training.batch, rank.size)
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
    divide: Split,
    *,
    evaluation: bool = False,
) -> _Measure:
    """Run on one device; return an object that measures the results and their tolerances in float32."""
    options: dict[str, Any] = {"rate": training.rate, "momentum": training.momentum, "divide": divide}
    run = partial(on_one_device, training.build, training.steps, evaluation=evaluation, **options)
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
