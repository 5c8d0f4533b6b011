"""Compare training under DistributedDataParallel with one device, bit for bit, in whole numbers.

`Replica` trains next to the same run on one device. All checks are collectives. Each trains its runs one after the
other, and raises only after the last, so that no rank waits for one that has failed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.asserts.findings import Findings, require
from mgpu_check.asserts.models import assert_replicas_agree, assert_same, gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.differences import difference
from mgpu_check.oracles.pairs import drawn_rows, words_of
from mgpu_check.oracles.training import reference_training as oracle
from mgpu_check.oracles.training.cases import WholeRun
from mgpu_check.oracles.training.reference_training import Forward, Gradients, OneDevice, Prepare, Rows, judged
from mgpu_check.oracles.training.training_steps import split, weighted


@dataclass(frozen=True)
class Member:
    """A rank as a member of the group that trains together; `group` is None for the world."""

    rank: Rank
    index: int
    size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, rank: Rank) -> Member:
        return cls(rank, rank.index, rank.size)


def under_ddp(module: nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """Wrap `module`, which is on `device`, in DDP with these options; by default `device_ids` has this device."""
    with warnings.catch_warnings():
        # The name broadcast_buffers is deprecated: torch/nn/parallel/distributed.py, __init__, torch 2.13.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(module, **{"device_ids": [device] if device.type == "cuda" else None, **options})


class Replica:
    """A model under DDP on this rank, the same model on one device, and their comparison.

    A check makes a replica for each run, calls `step` for each batch, or the methods that a step consists of, and drops
    it. Methods that train are collectives, and keep errors in the findings of the check. The ranks start with different
    parameters and buffers, and DDP must give them those of the first rank.
    """

    def __init__(
        self,
        run: WholeRun,
        member: Rank | Member,
        findings: Findings,
        *,
        label: str = "",
        prepare: Prepare = oracle.as_it_is,
        forwards: Sequence[Forward] | Forward = oracle.plainly,
        **options: Any,
    ) -> None:
        """Wrap the model of `run`, which `prepare` may change first; `forwards` calls it, or one for each rank."""
        self.run, self.findings = run, findings
        self.member = member if isinstance(member, Member) else Member.of(member)
        self.forwards, self.options = forwards, options
        self.label = f"DDP of {run.model} on {self.member.size} ranks" + (f", {label}" if label else "")
        self.one = OneDevice(run, self.member.rank.device, prepare)
        self.module = run.build(self.member.index)
        prepare(self.module)
        self.module.to(self.member.rank.device)
        self.wrap()
        # Without broadcast_buffers each rank keeps its own buffers, even at the start.
        which = oracle.state_of if options.get("broadcast_buffers", True) else oracle.parameters_of
        self.agree(which(self.module), which(self.one.held), "after wrapping")
        self.optimizer = run.optimize(self.module)
        self.coming = iter(enumerate(run.batches(), start=1))
        self.number = 0

    def wrap(self) -> None:
        self.parallel = under_ddp(self.module, self.member.rank.device, process_group=self.member.group, **self.options)

    def require(self, holds: bool, text: str, when: str = "") -> None:
        """Keep a finding about this replica, unless `holds`."""
        require(self.findings, self.member.rank, holds, self.label + when, text)

    @property
    def forward(self) -> Forward:
        return self.forwards if callable(self.forwards) else self.forwards[self.member.index]

    def shards(self, batch: Rows) -> list[Rows]:
        return list(zip(*(split(tensor, self.member.size) for tensor in batch), strict=True))

    def next_batch(self) -> Rows:
        """Return the batch of the next step, on the CPU."""
        self.number, batch = next(self.coming)
        return batch

    def on_device(self, rows: Rows) -> Rows:
        x, targets = rows
        return x.to(self.member.rank.device), targets.to(self.member.rank.device)

    def backward(self, rows: Rows) -> torch.Tensor:
        """Run forward and backward on this rank's rows, with a loss whose mean is the sum; return the outputs."""
        x, targets = self.on_device(rows)
        outputs = self.forward(self.parallel, x)
        (weighted(outputs, targets) * self.member.size).backward()
        return outputs

    def step(self, *, by_hand: Callable[[list[Rows]], list[Gradients]] | None = None, set_to_none: bool = True) -> None:
        """Take one step, and compare outputs, gradients and parameters.

        `by_hand` replaces the forward and backward passes; it takes the shards of all ranks, and returns the exact
        parts of the gradients.
        """
        shards = self.shards(self.next_batch())
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if by_hand is not None:
            shard_gradients = by_hand(shards)
        else:
            own = shards[self.member.index]
            expected = self.one.outputs(own[0], self.forward)
            outputs = self.backward(own)
            self.agree({"outputs": outputs}, {"outputs": expected}, "outputs")
            shard_gradients = self.one.parts(shards, self.forwards)
        self.judge_gradients(shard_gradients)
        self.finish(shard_gradients)

    def reduced(self) -> list[Gradients]:
        """Run the passes of the next step; return the exact gradients of each shard."""
        shards = self.shards(self.next_batch())
        self.optimizer.zero_grad()
        self.backward(shards[self.member.index])
        return self.one.parts(shards)

    def judge_gradients(self, shard_gradients: list[Gradients]) -> None:
        """Compare gradients with the sum of the parts, and with the other ranks if they may be rounded."""
        label = f"{self.label}, gradients of step {self.number}"
        with self.findings.collected():
            rank, size = self.member.rank.index, self.member.size
            oracle.assert_gradients_are(self.module, shard_gradients, label=label, rank=rank, size=size)
        if self.member.size & (self.member.size - 1):
            self.agree_with_others(self.gradients(), f"gradients of step {self.number}")

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def agree_with_others(self, tensors: Mapping[str, torch.Tensor] | nn.Module, which: str) -> None:
        with self.findings.collected():
            assert_replicas_agree(tensors, group=self.member.group, what=f"{self.label}, {which}")

    def judge_gradient(
        self, name: str, parameter: nn.Parameter, expected: torch.Tensor, tolerance: torch.Tensor | float, when: str
    ) -> None:
        """Compare one gradient, zeros if it is None, with the right one; `when` is for the message."""
        off = difference(gradient_or_zeros(parameter), expected, tolerance)
        rank = self.member.rank.index
        message = f"{self.label}, {when}, rank {rank}, gradient of {name}: {off}"
        self.findings.require(off is None, message, ranks=[rank])

    def finish(self, shard_gradients: list[Gradients]) -> None:
        """Take the optimizer's step, compare parameters, and make them whole numbers again."""
        expected = oracle.total(shard_gradients)
        self.put_exact(expected)
        self.optimizer.step()
        self.one.step(expected)
        self.judge_parameters()
        # So far each rank has only been compared with its own single device.
        self.agree_with_others(oracle.parameters_of(self.module), f"parameters after step {self.number}")
        self.settle()

    def put_exact(self, expected: Gradients) -> None:
        """Replace gradients of DDP, already compared, that may be rounded, so that steps start with whole numbers."""
        narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.module.parameters())
        if narrow or self.member.size & (self.member.size - 1):
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None and (value := expected[name]) is not None:
                    parameter.grad.copy_(value)

    def settle(self) -> None:
        oracle.settle(self.module, self.run.most)
        self.one.settle()

    def judge_parameters(self) -> None:
        got, expected = oracle.parameters_of(self.module), oracle.parameters_of(self.one.held)
        self.agree(got, expected, f"parameters after step {self.number}")

    def agree(self, got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], which: str) -> None:
        with self.findings.collected():
            assert_same(got, expected, f"{self.label}, {which}", self.member.rank.index, {"ranks": self.member.size})


def train(run: WholeRun, member: Rank | Member, findings: Findings, **how: Any) -> Replica:
    """Train all steps of `run`, and compare each step; return the replica. A collective."""
    replica = Replica(run, member, findings, **how)
    for _ in range(run.steps):
        replica.step()
    return replica


_LARGE = (1 << 18) + 4099  # elements of float32 with more than 1 MiB

SMALL_BUCKET = 0.0001  # MiB, about 100 bytes: so small that nearly every parameter has its own bucket


def assert_models_train(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that each run under DDP has the outputs, gradients and parameters of one device in every step."""
    with judged() as findings:
        for run in runs:
            train(run, rank, findings)
            if findings.enough(rank):
                break


def assert_buckets_reduced(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that gradients in many buckets, as copies and as views, equal those of one device.
    The order of buckets changes after the first step, when DDP rebuilds them. With views DDP gets no `device_ids`."""
    with judged() as findings:
        _judge_large_bucket(rank, findings)
        for run in runs:
            for view in (False, True):
                options: dict[str, Any] = {"bucket_cap_mb": SMALL_BUCKET, "gradient_as_bucket_view": view}
                label = ", ".join(f"{name}={value}" for name, value in options.items())
                train(run, rank, findings, label=label, **options, **({"device_ids": None} if view else {}))


_OPTIONS: Mapping[str, Sequence[Any]] = {
    "gradient_as_bucket_view": (False, True),
    "find_unused_parameters": (False, True),
    "static_graph": (False, True),
    "bucket_cap_mb": (None, SMALL_BUCKET),
    "bucket_cap_mb_list": (None, (SMALL_BUCKET, 1)),
    "device_ids": ("own", None),
    "output_device": (None, "own"),
    "device_mesh": (None, "own"),
    "init_sync": (True, False),
    "dim": (0, 1),
    "check_reduction": (False, True),
    "batched_grad_copy": (False, True),
    "skip_all_reduce_unused_params": (False, True),
    "forward_sync_buffers": (None, True, False),
}
"""Options of DistributedDataParallel with their values, the default first; "own" is the rank's device, or a mesh of all
ranks. Without `init_sync` all ranks start with the parameters and buffers of the first."""


def _together(row: Mapping[str, Any]) -> bool:
    unused = row.get("find_unused_parameters")  # what skips unused parameters must know them
    if row.get("device_ids", "own") is None and row.get("output_device"):
        return False
    return not (row.get("static_graph") and unused) and not (row.get("skip_all_reduce_unused_params") and not unused)


def assert_options_agree(rank: Rank, run: WholeRun, *, more: bool) -> None:
    """Assert that a run under DDP trains as on one device with each pair of options.
    With `more` all rows of options are tried, else a quarter of them, by the seed of the run."""
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    options = {name: values for name, values in _OPTIONS.items() if name in accepted}
    with judged() as findings:
        for row in drawn_rows(options, _together, seed=run.seed, more=more):
            arguments = {name: value for name, value in row.items() if value not in ("own", _OPTIONS[name][0])}
            if row.get("output_device"):
                arguments["output_device"] = rank.device
            if row.get("device_mesh"):
                arguments["device_mesh"] = init_device_mesh("cuda", (rank.size,))
            if not row.get("init_sync", True):
                first = run.build(0).state_dict()
                arguments["prepare"] = functools.partial(nn.Module.load_state_dict, state_dict=first)
            train(run, rank, findings, label=f"options {words_of(row, _OPTIONS)}", **arguments)
            if findings.enough(rank):
                break


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_LARGE))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() + self.bias.sum()


def _judge_large_bucket(rank: Rank, findings: Findings) -> None:
    """Check the mean of gradients in one bucket above 1 MiB, element by element, in two steps."""
    places = torch.arange(_LARGE) % 251
    model = under_ddp(_Weighted().to(rank.device), rank.device)
    expected = places + (rank.size - 1) / 2
    for step in range(2):
        model.zero_grad()
        model((places + rank.index).float().to(rank.device)).backward()
        gradient = gradient_or_zeros(model.module.weight).cpu()
        # DDP multiplies by the rounded inverse of the world size, then adds.
        mismatches = (gradient - expected).abs() > expected * 2.0**-20
        at = int(mismatches.int().argmax())
        subject = f"DDP on {rank.size} ranks, a bucket of {_LARGE} elements, step {step}"
        text = f"{int(mismatches.sum())} elements of the gradient are wrong, the first at {at}: {gradient[at].item()}"
        require(findings, rank, not bool(mismatches.any()), subject, f"{text}, expected {expected[at].item()}")


def assert_unused_parameters_reduced(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that find_unused_parameters averages parameters that some ranks have used, and skips those of no rank.
    Even ranks use head 0 and odd ranks head 1; the heads swap with each step, and head 2 is never used."""
    with judged() as findings:
        for run in runs:
            for view in (False, True):
                options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
                label = f"find_unused_parameters, gradient_as_bucket_view={view}"
                replica = Replica(run, rank, findings, label=label, **options)
                for number in range(run.steps):
                    replica.forwards = [_head((index + number) % 2) for index in range(rank.size)]
                    replica.step()


def _head(number: int) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    return lambda model, x: torch.as_tensor(model(x, head=number))


def assert_static_graph_trains(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that static_graph trains a layer that is used twice and recomputed, next to a layer that is never used."""
    with judged() as findings:
        for run in runs:
            train(run, rank, findings, label="static_graph", static_graph=True)


def assert_frozen_parameters_kept(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that frozen parameters get and keep rank 0's values, and that ignored parameters stay each rank's own."""
    with judged() as findings:
        for run in runs:
            train(run, rank, findings, label="first layer frozen", prepare=oracle.freeze_first)
            # A parameter that DDP ignores must keep the rank's own value and gradient.
            own = run.build(rank.index).to(rank.device)
            name, parameter = list(own.named_parameters())[-1]
            before = parameter.detach().clone()
            own.register_buffer("apart", torch.full((3,), float(rank.index), device=rank.device))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(own, [name, "apart"])
            parallel = under_ddp(own, rank.device)
            parallel(torch.full((rank.index + 1, 16), 1.0, device=rank.device)).sum().backward()
            subject = f"DDP of {run.model} on {rank.size} ranks, {name} ignored"
            require(findings, rank, torch.equal(parameter, before), subject, f"{name} has changed")
            kept = bool((own.get_buffer("apart") == rank.index).all())
            require(findings, rank, kept, f"{subject} with a buffer", "the buffer has changed")
            # The last parameter is a bias, so its gradient is the number of this rank's rows.
            is_own = parameter.grad is not None and bool((parameter.grad == rank.index + 1).all())
            text = f"its gradient is {parameter.grad}, expected {rank.index + 1}, that of this rank alone"
            require(findings, rank, is_own, subject, text)


def assert_groups_apart(rank: Rank, runs: Sequence[WholeRun], first_group: Sequence[int]) -> None:
    """Assert that `first_group` of the ranks and all others train independently, each like a device with its run."""
    with judged() as findings, own_group(rank, first_group) as (members, member):
        for run in runs:
            train(replace(run, seed=run.seed + members[0]), member, findings, label=f"process_group of {members}")


@contextlib.contextmanager
def own_group(rank: Rank, first_group: Sequence[int]) -> Iterator[tuple[list[int], Member]]:
    """Make `first_group`, and a group of all others; yield the members of the own one, and this rank. A collective."""
    chosen = sorted({member % rank.size for member in first_group})
    both = [chosen, [index for index in range(rank.size) if index not in chosen]]
    groups = [dist.new_group(members) if members else None for members in both]
    members, group = next(pair for pair in zip(both, groups, strict=True) if rank.index in pair[0])
    yield members, Member(rank, members.index(rank.index), len(members), group)
    dist.destroy_process_group(group)


def assert_accumulation_exact(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that gradients accumulate over micro-batches: local ones within no_sync, averaged ones after the last.
    An exception within no_sync must end it too. Every second step zeroes the gradient tensors of the step before."""
    with judged() as findings:
        for run in runs:
            view = bool(run.seed % 2)  # seeds follow each other
            label = f"no_sync for the first of two micro-batches, gradient_as_bucket_view={view}"
            replica = Replica(run, rank, findings, label=label, gradient_as_bucket_view=view)
            for _ in range(run.steps):
                replica.step(by_hand=functools.partial(_accumulate, replica), set_to_none=replica.number % 2 == 0)


def _accumulate(replica: Replica, shards: list[Rows]) -> list[Gradients]:
    x, targets = shards[replica.member.index]
    half = len(x) // 2
    with replica.parallel.no_sync():
        with replica.parallel.no_sync():
            pass  # ends only the inner no_sync
        replica.backward((x[:half], targets[:half]))
    own = replica.one.parts([(x[:half], targets[:half])])[0]
    when = f"step {replica.number}, within no_sync"
    for name, parameter in replica.module.named_parameters():
        exact = own[name]
        assert exact is not None
        replica.judge_gradient(name, parameter, exact * replica.member.size, 0.0, when)
    with contextlib.suppress(_AbandonedBatch), replica.parallel.no_sync():
        raise _AbandonedBatch
    replica.backward((x[half:], targets[half:]))
    return replica.one.parts(shards)


class _AbandonedBatch(Exception):
    """A micro-batch that is abandoned, as when memory runs out."""


def assert_gradient_hooks_apply(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that hooks of parameters, which get the rank's own gradient, and of modules are called once a step."""
    with judged() as findings:
        for run in runs:
            replica = Replica(run, rank, findings, label="a hook that doubles a gradient")
            name, parameter = next(replica.module.named_parameters())
            calls = Counter(dict.fromkeys(("forward hook", "full backward hook", "forward hook of DDP"), 0))
            parameter.register_hook(lambda gradient: gradient * 2)
            inner = list(replica.module.children())[-1]
            inner.register_forward_hook(functools.partial(_count, calls, "forward hook"))
            inner.register_full_backward_hook(functools.partial(_count, calls, "full backward hook"))
            replica.parallel.register_forward_hook(functools.partial(_count, calls, "forward hook of DDP"))
            for _ in range(run.steps):
                replica.step(by_hand=functools.partial(_doubled, replica, name))
            for hook, count in calls.items():
                replica.require(count == run.steps, f"the {hook} was called {count} times in {run.steps} steps")


def _count(calls: Counter[str], name: str, *_: object) -> None:
    calls[name] += 1


def _doubled(replica: Replica, name: str, shards: list[Rows]) -> list[Gradients]:
    replica.backward(shards[replica.member.index])
    shard_gradients = replica.one.parts(shards)
    for gradients in shard_gradients:
        exact = gradients[name]
        gradients[name] = None if exact is None else exact * 2
    return shard_gradients


_SCALE = 64.0


def assert_autocast_trains(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that steps under autocast compute in its dtype and give the gradients of one device, on small numbers."""
    with judged() as findings:
        for number, run in enumerate(runs):
            dtype = (torch.bfloat16, torch.float16)[number % 2]
            replica = Replica(run, rank, findings, label=f"autocast to {dtype}")
            kinds: list[torch.dtype] = []

            def call(
                model: nn.Module, x: torch.Tensor, dtype: torch.dtype = dtype, kinds: list[torch.dtype] = kinds
            ) -> torch.Tensor:
                if x.dtype == torch.float64:
                    return torch.as_tensor(model(x))
                with torch.autocast(x.device.type, dtype):
                    outputs = torch.as_tensor(model(x))
                kinds.append(outputs.dtype)
                return outputs.float()

            replica.forwards = call
            for _ in range(run.steps):
                replica.step()
            replica.require(all(kind == dtype for kind in kinds), f"outputs are of {kinds}, expected {dtype}")


def assert_scaler_skips_together(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that a GradScaler keeps gradients, and that an infinity on a rank makes all skip and halve the scale.
    If one of two optimizers has infinite gradients, only the other may step."""
    with judged() as findings:
        _judge_two_optimizers(rank, findings)
        for run in runs:
            replica = Replica(run, rank, findings, label="GradScaler")
            scaler = torch.amp.GradScaler(rank.device.type, init_scale=_SCALE, growth_interval=1)
            expected = _SCALE
            for number in range(run.steps):
                shards = replica.shards(replica.next_batch())
                spoilt = number % 2 == 0
                replica.optimizer.zero_grad()
                x, targets = replica.on_device(shards[rank.index])
                loss = weighted(replica.parallel(x), targets) * rank.size
                if spoilt and rank.index == rank.size - 1:
                    loss = loss + next(replica.module.parameters()).sum() * math.inf
                scaler.scale(loss).backward()
                scaler.unscale_(replica.optimizer)
                if spoilt:
                    scaler.step(replica.optimizer)
                    replica.judge_parameters()
                else:
                    shard_gradients = replica.one.parts(shards)
                    replica.judge_gradients(shard_gradients)
                    replica.put_exact(oracle.total(shard_gradients))
                    scaler.step(replica.optimizer)
                    replica.one.step(oracle.total(shard_gradients))
                    replica.judge_parameters()
                    replica.settle()
                scaler.update()
                expected *= 0.5 if spoilt else 2.0
                got = scaler.get_scale()
                replica.require(got == expected, f"the scale is {got}, expected {expected}", f", step {replica.number}")


def _judge_two_optimizers(rank: Rank, findings: Findings) -> None:
    """Check two optimizers with one scaler, which scales a list or tuple of losses; each in turn has an infinity."""
    for spoilt in (0, 1):
        parameters = [nn.Parameter(torch.ones(3, device=rank.device)) for _ in range(2)]
        optimizers = [torch.optim.SGD([parameter], lr=0.5) for parameter in parameters]
        scaler = torch.amp.GradScaler(rank.device.type, init_scale=_SCALE)
        losses = [value.sum() * (math.inf if number == spoilt else 1.0) for number, value in enumerate(parameters)]
        for scaled in scaler.scale(losses if spoilt else tuple(losses)):
            scaled.backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        got = (parameters[spoilt][0].item(), parameters[1 - spoilt][0].item(), scaler.get_scale())
        expected = (1.0, 0.5, _SCALE / 2)
        subject = f"GradScaler with two optimizers, infinite gradients in number {spoilt}"
        text = f"its parameter, the other's, and the scale are {got}, expected {expected}"
        require(findings, rank, got == expected, subject, text)


def assert_clipping_takes_the_whole_norm(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that `clip_grad_norm_` after the mean gives the norm of the whole batch's gradient, and scales by it.

    A sum of n positive terms has a relative error of at most n unit roundoffs (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2). A root, a division and a product follow.
    """
    with judged() as findings:
        for number, run in enumerate(runs):
            order = (2.0, 1.0, math.inf)[number % 3]
            replica = Replica(run, rank, findings, label=f"clip_grad_norm_ of order {order:g}")
            shard_gradients = replica.reduced()
            replica.judge_gradients(shard_gradients)
            norm = float(nn.utils.clip_grad_norm_(replica.module.parameters(), 1.0, norm_type=order))
            summed = {name: value for name, value in oracle.total(shard_gradients).items() if value is not None}
            flat = torch.cat([value.flatten() for value in summed.values()])
            exact = float(torch.linalg.vector_norm(flat, order))
            # If the mean rounds, gradients are off by (ranks + 2) roundoffs of the summed magnitudes.
            values = [value for gradients in shard_gradients for value in gradients.values() if value is not None]
            magnitudes = float(torch.cat([value.flatten() for value in values]).abs().sum())
            size, eps = replica.member.size, torch.finfo(torch.float32).eps
            rounded = (size + 2) * eps * magnitudes if size & (size - 1) else 0.0
            bound = (len(flat) + 4) * eps * exact + rounded
            replica.require(abs(norm - exact) <= bound, f"the norm is {norm:.9g}, expected {exact:.9g} ± {bound:.2g}")
            # torch divides by the norm plus 1e-6, and never scales up: torch/nn/utils/clip_grad.py, torch 2.13.
            scale = min(1.0, 1.0 / (exact + 1e-6))
            for name, parameter in replica.module.named_parameters():
                tolerance = ((bound / max(exact, 1.0)) + 8 * eps) * summed[name].abs() * scale + rounded * scale
                replica.judge_gradient(name, parameter, summed[name] * scale, tolerance, "clipped")


class _Summing(nn.Module):
    """A layer that adds up its inputs in a buffer, as batch normalization keeps its statistics."""

    weight: torch.Tensor
    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5, -0.25, 1.0]], dtype=torch.float64))
        self.register_buffer("sums", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += x.sum(0)
        return x @ self.weight.t()


def assert_uneven_ranks_join(rank: Rank, seed: int) -> None:
    """Assert that ranks with more batches than others train in `join` as one device that has the batches of all ranks,
    with the buffers of the highest rank that still trains. Either the first or the last rank has the most batches."""
    rate, everybody = 2.0**-6, range(rank.size)

    def batch(index: int, step: int) -> torch.Tensor:
        return ((torch.arange(6.0, dtype=torch.float64) * 7 + 5 * index + 3 * step + seed) % 11 - 5).view(2, 3) / 4

    with Findings() as findings:
        for most_on_last, by_all in ((False, True), (True, False)):
            counts = [index + 1 if most_on_last else rank.size - index for index in everybody]
            model = _Summing().to(rank.device)
            replica = under_ddp(model, rank.device)
            with replica.join(divide_by_initial_world_size=by_all):
                for step in range(counts[rank.index]):
                    model.zero_grad()
                    (replica(batch(rank.index, step).to(rank.device)) ** 2).sum().backward()
                    with torch.no_grad():
                        assert model.weight.grad is not None
                        model.weight -= rate * model.weight.grad
            single, own = _Summing(), dict.fromkeys(everybody, torch.zeros(3, dtype=torch.float64))
            for step in range(rank.size):
                training = [index for index in everybody if step < counts[index]]
                own |= {index: own[training[-1]] + batch(index, step).sum(0) for index in training}
                total = sum((single(batch(index, step)) ** 2).sum() for index in training)
                (gradient,) = torch.autograd.grad(torch.as_tensor(total), single.weight)
                with torch.no_grad():
                    single.weight -= rate * gradient / (rank.size if by_all else len(training))
                    single.sums.copy_(own[training[-1]])
            for (name, value), expected in zip(model.state_dict().items(), single.state_dict().values(), strict=True):
                text = f"join with batches {counts}, divide_by_initial_world_size={by_all}: {name} is"
                close = torch.allclose(value.cpu(), expected, rtol=1e-12, atol=1e-12)
                message = f"{text} {value.tolist()}, expected {expected.tolist()}"
                findings.require(close, message, ranks=(rank.index,))
