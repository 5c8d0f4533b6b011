"""Train in whole numbers on one device, as the reference that every parallel form must match bit for bit.

Gradients are computed in float64 on the CPU, shard by shard, where they are exact; so a wrong device cannot affect
them. The optimizer's step, which may round, runs on the device itself, with exact gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.models import assert_gradients_agree
from mgpu_check.errors import GradientMismatch
from mgpu_check.suite.common.whole_numbers.cases import WholeRun
from mgpu_check.suite.common.whole_numbers.models import CLASSES, PER_BATCH, settle
from mgpu_check.suite.recipes.training_steps import weighted

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Rows = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets of some rows of a batch."""
Gradients = dict[str, torch.Tensor | None]
Prepare = Callable[[nn.Module], object]
"""Freezes, marks or casts parts of a model."""


def plainly(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call `model` with the inputs only."""
    return torch.as_tensor(model(x))


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Compute float32 without TF32, and without cuDNN, whose Winograd convolutions round even whole numbers."""
    from mgpu_check.numerics.steps import full_precision

    with full_precision(), torch.backends.cudnn.flags(enabled=False):
        yield


@contextlib.contextmanager
def judged() -> Iterator[Findings]:
    """Compute exactly, collect findings, and raise the first at the end.

    Raises:
        GradientMismatch, ReplicaMismatch: the first finding.
    """
    with Findings() as findings, exact_arithmetic():
        yield findings


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters by name, detached, in the memory of the model."""
    return {name: value.detach() for name, value in model.named_parameters()}


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers by name, detached, in the memory of the model."""
    return {name: value.detach() for name, value in model.named_buffers()}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, detached, in the memory of the model."""
    return parameters_of(model) | buffers_of(model)


def put_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy `values`, by name, into the buffers of `model`."""
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(values[name])


def freeze_first(model: nn.Module) -> None:
    """Freeze the parameters of the first layer."""
    for parameter in next(model.children()).parameters():
        parameter.requires_grad_(False)


def as_it_is(model: nn.Module) -> None:
    """Prepare nothing."""


def counted(before: Mapping[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the statistics of `recipes.whole.Counting` after another batch with the rows `x`."""
    return {
        "rows": before["rows"] + PER_BATCH + len(x),
        "sums": before["sums"] + x[:, :CLASSES].sum(0),
        "seen": before["seen"] ^ (x[:, :2].sum(0) > 0),
    }


def assert_devices_are(tensors: Mapping[str, torch.Tensor], device: torch.device, what: str) -> None:
    """Assert that each tensor is on `device`.

    Raises:
        GradientMismatch: a tensor is on another device; names the tensor and both devices.
    """
    for name, value in tensors.items():
        if value.device != device:
            raise GradientMismatch(
                f"{what}: {name} is on {value.device}, expected on {device}", ranks=[device.index or 0]
            )


class OneDevice:
    """A run on one device: exact gradients from the CPU, steps of the optimizer on `device`."""

    def __init__(self, run: WholeRun, device: torch.device, prepare: Prepare = as_it_is) -> None:
        """Build the initial model; `prepare` freezes, marks or casts parts of it."""
        self.run = run
        self.held = run.build()
        prepare(self.held)
        self.held.to(device)
        self.exact = run.build()
        prepare(self.exact)
        # All arithmetic in float64; `double` does not convert integer and boolean buffers.
        self.exact.double()
        self.optimizer = run.optimize(self.held)

    def outputs(self, x: torch.Tensor, forward: Forward = plainly) -> torch.Tensor:
        """Return the exact outputs, float64 on the CPU; buffers do not change."""
        with self._buffers_kept(), torch.no_grad():
            return forward(self.exact, x.double())

    def parts(self, shards: Sequence[Rows], forwards: Sequence[Forward] | Forward = plainly) -> list[Gradients]:
        """Return the exact gradients of each shard's summed loss; None for a parameter that the loss does not use."""
        found: list[Gradients] = []
        for index, (x, targets) in enumerate(shards):
            forward = forwards if callable(forwards) else forwards[index]
            self.exact.zero_grad()
            with self._buffers_kept():
                weighted(forward(self.exact, x.double()), targets.double()).backward()
            found.append({name: value.grad for name, value in self.exact.named_parameters()})
        return found

    @contextlib.contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        before = {name: value.clone() for name, value in self.exact.named_buffers()}
        yield
        put_buffers(self.exact, before)

    def step(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Take one step of the optimizer with these gradients."""
        for name, parameter in self.held.named_parameters():
            value = gradients[name]
            parameter.grad = None if value is None else value.to(parameter.device, parameter.dtype)
        self.optimizer.step()

    def settle(self) -> None:
        """Make parameters whole numbers again, after their comparison."""
        settle(self.held, self.run.most)
        with torch.no_grad():
            for exact, held in zip(self.exact.parameters(), self.held.parameters(), strict=True):
                exact.copy_(held.cpu())


def terms_of(parts: Sequence[Gradients], name: str) -> list[torch.Tensor]:
    """Return the gradients of one parameter from the shards that have one."""
    return [value for part in parts if (value := part[name]) is not None]


def total(parts: Sequence[Gradients]) -> Gradients:
    """Sum the gradients of shards; None for a parameter without a gradient in any shard."""
    there = {name: terms_of(parts, name) for name in parts[0]}
    return {name: torch.stack(values).sum(0) if values else None for name, values in there.items()}


def slack(dtype: torch.dtype, size: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return, for each element, the tolerance of the mean of `size` ranks around the exact sum of their `parts`.

    Each rank's part is scaled by the number of ranks, and the mean divides by it, which is exact for a power of two. A
    sum of whole numbers is exact if the significand of `dtype` holds the sum of their magnitudes. Other elements have
    at most size + 2 roundings (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
    """
    magnitudes = torch.stack([part.abs() for part in parts]).sum(0)
    eps = torch.finfo(dtype).eps
    bound = (size + 2) * eps * magnitudes
    return bound if size & (size - 1) else torch.where(magnitudes <= 2 / eps, 0.0, bound)


def assert_gradients_are(
    model: nn.Module, parts: Sequence[Gradients], *, what: str, rank: int | None = None, size: int = 1
) -> None:
    """Assert that the gradients of `model` are the sums of `parts`, and None if no part has a gradient.

    Args:
        model: the model with the gradients.
        parts: the exact gradients of each shard.
        what: the name of the gradients, for the message.
        rank: the rank that holds `model`.
        size: the number of ranks whose gradients were averaged; 1 if they were summed without a mean.

    Raises:
        GradientMismatch: names parameter, element and values.
    """
    got = {name: value.grad for name, value in model.named_parameters()}
    ranks = () if rank is None else (rank,)
    where = what if rank is None else f"{what}, rank {rank}"
    expected = total(parts)
    for name, value in expected.items():
        if (got[name] is None) != (value is None):
            text = "has no gradient, expected one" if value is not None else "has a gradient, but no shard uses it"
            raise GradientMismatch(f"{where}: {name} {text}", ranks=ranks)
    there = {name: value for name, value in got.items() if value is not None}
    wanted = {name: value for name, value in expected.items() if value is not None}
    split = {
        name: [torch.zeros_like(value) if (own := part[name]) is None else own for part in parts]
        for name, value in wanted.items()
    }
    assert_gradients_agree(
        there,
        wanted,
        tolerance={name: slack(value.dtype, size, split[name]) for name, value in there.items()},
        rank=rank,
        parts=split,
        constants={"ranks": size, "shards": len(parts)},
        what=what,
    )
