"""One rank's replica under DistributedDataParallel, and beside it the same run on one device, in whole numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.checks.findings import Findings
from mgpu_check.checks.gradients import assert_same, gradient_or_zeros
from mgpu_check.checks.replicas import assert_replicas_agree
from mgpu_check.checks.whole import (
    Forward,
    Gradients,
    OneDevice,
    Prepare,
    Rows,
    as_it_is,
    assert_gradients_are,
    parameters_of,
    plainly,
    slack,
    state_of,
    terms_of,
    total,
)
from mgpu_check.numerics.compare import difference
from mgpu_check.rank_side.rank import Rank
from mgpu_check.recipes.training import split, weighted
from mgpu_check.recipes.whole import settle
from mgpu_check.specs.whole import WholeRun

__all__ = ["Place", "Replica", "train", "under_ddp"]


@dataclass(frozen=True)
class Place:
    """Where a rank is among those that train together: its number and their count; the group, None for the world."""

    rank: Rank
    index: int
    size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, rank: Rank) -> Place:
        """Return the place of a rank in the world."""
        return cls(rank, rank.index, rank.size)


def under_ddp(module: nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """Put `module`, which is on `device`, under DDP with these options; `device_ids` are that device, unless they are given."""
    with warnings.catch_warnings():
        # Newer versions of torch have another name for broadcast_buffers.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(module, **{"device_ids": [device] if device.type == "cuda" else None, **options})


class Replica:
    """A model under DDP on this rank, one device beside it, and the comparison of both. Methods that train are collectives.

    The ranks begin with different parameters and buffers: DDP must give them those of the first.
    """

    def __init__(
        self,
        run: WholeRun,
        place: Rank | Place,
        findings: Findings,
        *,
        what: str = "",
        prepare: Prepare = as_it_is,
        forwards: Sequence[Forward] | Forward = plainly,
        **options: Any,
    ) -> None:
        """Wrap the model of `run`.

        Args:
            findings: where what is wrong is kept.
            what: what is special about this run, for messages.
            prepare: freezes, casts or marks parts of the model, before it is wrapped.
            forwards: how ranks call the model: all in one way, or each in its own.
            options: those of DistributedDataParallel.
        """
        self.run, self.findings = run, findings
        self.place = place if isinstance(place, Place) else Place.of(place)
        self.forwards, self.options = forwards, options
        self.what = f"DDP of {run.model} on {self.place.size} ranks" + (f", {what}" if what else "")
        self.one = OneDevice(run, self.place.rank.device, prepare)
        self.module = run.build(self.place.index)
        prepare(self.module)
        self.module.to(self.place.rank.device)
        self.wrap()
        self.judge_start()
        self.optimizer = run.optimize(self.module)
        self.coming = iter(enumerate(run.batches(), start=1))
        self.number = 0

    def wrap(self) -> None:
        """Put the module under DDP."""
        self.parallel = under_ddp(self.module, self.place.rank.device, process_group=self.place.group, **self.options)

    @property
    def forward(self) -> Forward:
        """How this rank calls the model."""
        return self.forwards if callable(self.forwards) else self.forwards[self.place.index]

    def shards(self, batch: Rows) -> list[Rows]:
        """Split a batch among the ranks, as evenly as can be."""
        return list(zip(*(split(part, self.place.size) for part in batch), strict=True))

    def next_batch(self) -> Rows:
        """Return the batch of the next step, on the CPU."""
        self.number, batch = next(self.coming)
        return batch

    def on_device(self, rows: Rows) -> Rows:
        """Put rows on the device of this rank."""
        x, targets = rows
        return x.to(self.place.rank.device), targets.to(self.place.rank.device)

    def backward(self, rows: Rows) -> torch.Tensor:
        """Go forward and backward over this rank's rows; return the outputs. The loss is scaled so that the mean is the sum."""
        x, targets = self.on_device(rows)
        outputs = self.forward(self.parallel, x)
        (weighted(outputs, targets) * self.place.size).backward()
        return outputs

    def step(self, *, by_hand: Callable[[list[Rows]], list[Gradients]] | None = None, set_to_none: bool = True) -> None:
        """Take one step, and compare outputs, gradients and parameters.

        Args:
            by_hand: goes forward and backward over the shards of all ranks, of which this rank's is its own; returns the
                exact parts of the gradients.
            set_to_none: as of `zero_grad`: drop the gradients of the step before, or put zeros into them.
        """
        shards = self.shards(self.next_batch())
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if by_hand is not None:
            parts = by_hand(shards)
        else:
            own = shards[self.place.index]
            expected = self.one.outputs(own[0], self.forward)
            outputs = self.backward(own)
            with self.findings.collected():
                self.agree({"outputs": outputs}, {"outputs": expected}, "outputs")
            parts = self.one.parts(shards, self.forwards)
        self.judge_gradients(parts)
        self.finish(parts)

    def judge_gradients(self, parts: list[Gradients]) -> None:
        """Compare gradients with the sum of the parts, and with the other ranks where they may be rounded."""
        where = f"{self.what}, gradients of step {self.number}"
        with self.findings.collected():
            assert_gradients_are(self.module, parts, what=where, rank=self.place.rank.index, size=self.place.size)
        if self.place.size & (self.place.size - 1):
            with self.findings.collected():
                held = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
                assert_replicas_agree(held, group=self.place.group, what=where)

    def judge_gradient(
        self, name: str, parameter: nn.Parameter, expected: torch.Tensor, tolerance: torch.Tensor | float, when: str
    ) -> None:
        """Compare one gradient, zeros where there is none, with what it must be `when` it is looked at."""
        off = difference(gradient_or_zeros(parameter), expected, tolerance)
        rank = self.place.rank.index
        self.findings.require(off is None, f"{self.what}, {when}, rank {rank}, gradient of {name}: {off}", ranks=[rank])

    def judge_mean(self, parts: list[Gradients], divisor: int) -> None:
        """Compare gradients with the sum of the parts, divided by another number than that of the ranks."""
        size = self.place.size
        for name, parameter in self.module.named_parameters():
            terms = terms_of(parts, name)
            expected = torch.stack(terms).sum(0) * (size / divisor)
            # The divisor need not be a power of two, even if the number of ranks is.
            tolerance = 0.0 if divisor == size and not size & (size - 1) else slack(parameter.dtype, 3, terms) * size
            self.judge_gradient(name, parameter, expected, tolerance, f"step {self.number}")

    def finish(self, parts: list[Gradients], *, from_exact: bool = False) -> None:
        """Take the optimizer's step, compare parameters, and make them whole numbers again.

        Args:
            from_exact: step with the exact gradients, because those of DDP are scaled otherwise.
        """
        expected = total(parts)
        self.put_exact(expected, always=from_exact)
        self.optimizer.step()
        self.one.step(expected)
        self.judge_parameters()
        if not from_exact:
            # Each rank's optimizer has judged itself so far.
            with self.findings.collected():
                where = f"{self.what}, parameters after step {self.number}"
                assert_replicas_agree(parameters_of(self.module), group=self.place.group, what=where)
        self.settle()

    def put_exact(self, expected: Gradients, *, always: bool = False) -> None:
        """Put the exact gradients in place where those of DDP, which have been judged, may be rounded; or `always`.

        So the steps that follow begin with whole numbers, too.
        """
        narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.module.parameters())
        if always or narrow or self.place.size & (self.place.size - 1):
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None and (value := expected[name]) is not None:
                    parameter.grad.copy_(value)

    def settle(self) -> None:
        """Make the parameters of both models whole numbers again."""
        settle(self.module, self.run.most)
        self.one.settle()

    def judge_parameters(self) -> None:
        """Compare parameters after a step."""
        with self.findings.collected():
            self.agree(
                parameters_of(self.module),
                parameters_of(self.one.held),
                f"parameters after step {self.number}",
            )

    def judge_start(self) -> None:
        """Compare parameters and buffers with rank 0's, as they are when the model is wrapped."""
        # Without broadcast_buffers they are each rank's own, at the start, too.
        which = state_of if self.options.get("broadcast_buffers", True) else parameters_of
        with self.findings.collected():
            self.agree(which(self.module), which(self.one.held), "as it is wrapped")

    def agree(self, got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], which: str) -> None:
        """Compare results that must be equal.

        Raises:
            GradientMismatch: they are not.
        """
        assert_same(got, expected, f"{self.what}, {which}", self.place.rank.index, {"ranks": self.place.size})


def train(run: WholeRun, place: Rank | Place, findings: Findings, **how: Any) -> Replica:
    """Train as `run` says, and compare each step; return the replica. A collective."""
    replica = Replica(run, place, findings, **how)
    for _ in range(run.steps):
        replica.step()
    return replica
