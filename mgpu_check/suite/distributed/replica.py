"""Train a rank's replica under DistributedDataParallel next to the same run on one device, in whole numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.gradients import assert_same, gradient_or_zeros
from mgpu_check.asserts.replicas import assert_replicas_agree
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.compare import difference
from mgpu_check.suite.common.whole_numbers.cases import WholeRun
from mgpu_check.suite.common.whole_numbers.models import settle
from mgpu_check.suite.common.whole_numbers.reference import (
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
from mgpu_check.suite.recipes.training import split, weighted


@dataclass(frozen=True)
class Place:
    """The place of a rank in the group that trains together.

    Attributes:
        index: the number of the rank in the group.
        size: the number of ranks in the group.
        group: None for the world.
    """

    rank: Rank
    index: int
    size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, rank: Rank) -> Place:
        """Return the place of a rank in the world."""
        return cls(rank, rank.index, rank.size)


def under_ddp(module: nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """Wrap `module`, which is on `device`, in DDP with these options; by default `device_ids` has this device."""
    with warnings.catch_warnings():
        # Newer versions of torch deprecate the name broadcast_buffers.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(module, **{"device_ids": [device] if device.type == "cuda" else None, **options})


class Replica:
    """A model under DDP on this rank, the same model on one device, and their comparison.

    Methods that train are collectives. The ranks start with different parameters and buffers, and DDP must give them
    those of the first rank.
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
            what: the variant of this run, for messages.
            prepare: freezes, casts or marks parts of the model before it is wrapped.
            forwards: the function that calls the model on a rank, or one function for each rank.
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
        """Wrap the module in DDP."""
        self.parallel = under_ddp(self.module, self.place.rank.device, process_group=self.place.group, **self.options)

    @property
    def forward(self) -> Forward:
        """The function that calls the model on this rank."""
        return self.forwards if callable(self.forwards) else self.forwards[self.place.index]

    def shards(self, batch: Rows) -> list[Rows]:
        """Split a batch among the ranks, as evenly as possible."""
        return list(zip(*(split(part, self.place.size) for part in batch), strict=True))

    def next_batch(self) -> Rows:
        """Return the batch of the next step, on the CPU."""
        self.number, batch = next(self.coming)
        return batch

    def on_device(self, rows: Rows) -> Rows:
        """Copy rows to the device of this rank."""
        x, targets = rows
        return x.to(self.place.rank.device), targets.to(self.place.rank.device)

    def backward(self, rows: Rows) -> torch.Tensor:
        """Run forward and backward on this rank's rows; return the outputs.

        The loss is scaled so that DDP's mean is the sum.
        """
        x, targets = self.on_device(rows)
        outputs = self.forward(self.parallel, x)
        (weighted(outputs, targets) * self.place.size).backward()
        return outputs

    def step(self, *, by_hand: Callable[[list[Rows]], list[Gradients]] | None = None, set_to_none: bool = True) -> None:
        """Take one step, and compare outputs, gradients and parameters.

        Args:
            by_hand: replaces the forward and backward passes; takes the shards of all ranks, and returns the exact
                parts of the gradients.
            set_to_none: as in `zero_grad`: drop the previous gradients, or zero them.
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
        """Compare gradients with the sum of the parts, and with the other ranks if they may be rounded."""
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
        """Compare one gradient, zeros if it is None, with the right one; `when` is for the message."""
        off = difference(gradient_or_zeros(parameter), expected, tolerance)
        rank = self.place.rank.index
        self.findings.require(off is None, f"{self.what}, {when}, rank {rank}, gradient of {name}: {off}", ranks=[rank])

    def judge_mean(self, parts: list[Gradients], divisor: int) -> None:
        """Compare gradients with the sum of the parts divided by `divisor`, in place of the number of ranks."""
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
            parts: the exact gradients of each shard.
            from_exact: step with the exact gradients, because DDP has scaled its own differently.
        """
        expected = total(parts)
        self.put_exact(expected, always=from_exact)
        self.optimizer.step()
        self.one.step(expected)
        self.judge_parameters()
        if not from_exact:
            # So far each rank has only been compared with its own single device.
            with self.findings.collected():
                where = f"{self.what}, parameters after step {self.number}"
                assert_replicas_agree(parameters_of(self.module), group=self.place.group, what=where)
        self.settle()

    def put_exact(self, expected: Gradients, *, always: bool = False) -> None:
        """Replace the gradients of DDP, already compared, by the exact ones if they may be rounded, or `always`.

        So the following steps start with whole numbers too.
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
            self.agree(parameters_of(self.module), parameters_of(self.one.held), f"parameters after step {self.number}")

    def judge_start(self) -> None:
        """Compare parameters and buffers with those of rank 0, right after the model was wrapped."""
        # Without broadcast_buffers each rank keeps its own buffers, even at the start.
        which = state_of if self.options.get("broadcast_buffers", True) else parameters_of
        with self.findings.collected():
            self.agree(which(self.module), which(self.one.held), "after wrapping")

    def agree(self, got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], which: str) -> None:
        """Compare results that must be equal."""
        assert_same(got, expected, f"{self.what}, {which}", self.place.rank.index, {"ranks": self.place.size})


def train(run: WholeRun, place: Rank | Place, findings: Findings, **how: Any) -> Replica:
    """Train all steps of `run`, and compare each step; return the replica. A collective."""
    replica = Replica(run, place, findings, **how)
    for _ in range(run.steps):
        replica.step()
    return replica
