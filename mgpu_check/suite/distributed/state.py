"""Check initial state, buffers, dtypes, arguments, checkpoints and communication hooks of DDP, by collectives."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from mgpu_check.asserts.findings import Findings, require
from mgpu_check.asserts.models import gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.agreement import difference
from mgpu_check.oracles.training import reference_training as oracle
from mgpu_check.oracles.training.cases import WholeRun
from mgpu_check.oracles.training.models import Everything
from mgpu_check.oracles.training.reference_training import (
    CLASSES,
    FEATURES,
    STEPS,
    Gradients,
    Rows,
    judged,
    slack,
    terms_of,
)
from mgpu_check.oracles.training.training_steps import split
from mgpu_check.suite.distributed.training import SMALL_BUCKET, Member, Replica, own_group, train, under_ddp
from mgpu_check.torch_hooks.tensors import name_of

_STEPS_COUNTED = 4_099  # not representable in bfloat16 or float16


def assert_starts_from_the_first_rank(rank: Rank, seed: int) -> None:
    """Assert that a wrapped model holds rank 0's parameters and buffers, bit for bit, in all dtypes and sizes."""
    with judged() as findings:
        model = Everything(seed + 31 * rank.index).to(rank.device)
        under_ddp(model, rank.device)
        for name, expected in oracle.state_of(Everything(seed)).items():
            got = oracle.state_of(model)[name]
            text = f"{name} differs from rank 0's: {(off := difference(got, expected, 'bits'))}"
            require(findings, rank, off is None, f"DDP on {rank.size} ranks, after wrapping", text)


def assert_buffers_follow_the_first_rank(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that each step starts with rank 0's buffers, or with each rank's own without broadcast_buffers.

    Every second run has further options of DDP, under which buffers are broadcast too. Before every second step the
    module gets new tensors for its buffers. The averaged statistics of BatchNorm with momentum=None are checked too.
    """
    with judged() as findings:
        for number, run in enumerate(runs):
            static = (number + runs[0].seed) % 2 > 0
            others = {"static_graph": True, "gradient_as_bucket_view": True} if static else {}
            for together in (True, False):
                _count_rows(run, rank, findings, together, evaluated=bool(number % 2), **others)
        _average(rank, runs[0].seed, findings)


def _average(rank: Rank, seed: int, findings: Findings) -> None:
    """Check statistics that BatchNorm averages over steps, where each step starts with the statistics of rank 0."""
    layer = oracle.averaging().to(rank.device)
    parallel = under_ddp(layer, rank.device)
    of_rank_0, own = (oracle.drawn(2 + index % 3, seed + index) for index in (0, rank.index))
    for step in range(STEPS):
        parallel(own[step].to(rank.device)).sum().backward()
        deviation = oracle.wrong_statistics(layer, [*of_rank_0[:step], own[step]])
        require(findings, rank, not deviation, f"DDP of BatchNorm on {rank.size} ranks, momentum=None", deviation or "")


def _count_rows(
    run: WholeRun, rank: Rank, findings: Findings, together: bool, *, evaluated: bool, **others: Any
) -> None:
    options = {**others, "broadcast_buffers": together}
    label = ", ".join(f"{name}={value}" for name, value in options.items())
    replica = Replica(run, rank, findings, label=label, **options)
    own = {name: value.cpu().clone() for name, value in oracle.buffers_of(replica.module).items()}
    of_rank_0 = own
    for number in range(run.steps):
        x = run.batches()[number][0]
        shards = split(x, rank.size)
        before = of_rank_0 if together else own
        oracle.put_buffers(replica.one.exact, before)
        if number % 2:
            for module in replica.module.modules():
                for name, value in list(module.named_buffers(recurse=False)):
                    setattr(module, name, value.clone())
        replica.step()
        own, of_rank_0 = (
            oracle.counting_statistics(before, shards[rank.index]),
            oracle.counting_statistics(of_rank_0, shards[0]),
        )
        replica.agree(oracle.buffers_of(replica.module), own, f"buffers after step {number + 1}")
    if evaluated and run.batch:
        replica.parallel.eval()
        replica.one.exact.eval()
        oracle.put_buffers(replica.one.exact, of_rank_0 if together else own)
        x = run.batches()[0][0]
        with torch.no_grad():
            got = replica.parallel(x.to(rank.device))
        replica.agree({"outputs": got}, {"outputs": replica.one.outputs(x)}, "in evaluation")


def assert_mixed_dtypes_train(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that a model with parameters of two dtypes trains: each gradient has its parameter's dtype and value."""
    with judged() as findings:
        for run in runs:
            replica = train(run, rank, findings)
            for name, parameter in replica.module.named_parameters():
                dtype = None if parameter.grad is None else parameter.grad.dtype
                text = f"the gradient of {name} is of {dtype}, expected {parameter.dtype}"
                replica.require(dtype == parameter.dtype, text)


def assert_channels_last_trains(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that convolutions in channels_last train, and that parameters and gradients keep that layout."""

    def prepare(model: nn.Module) -> None:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    with judged() as findings:
        for run in runs:
            for view in (False, True):
                label = f"channels_last, gradient_as_bucket_view={view}"
                replica = train(run, rank, findings, label=label, prepare=prepare, gradient_as_bucket_view=view)
                for name, parameter in replica.module.named_parameters():
                    if parameter.dim() != 4 or parameter.grad is None:
                        continue
                    # The stride of a dimension of size 1 has no meaning, and kernels choose it freely.
                    long = [dim for dim, size in enumerate(parameter.shape) if size > 1]
                    strides, expected = ([tensor.stride(dim) for dim in long] for tensor in (parameter.grad, parameter))
                    message = f"{replica.label}: strides of the gradient of {name} are {strides}, expected {expected}"
                    findings.require(strides == expected, message, ranks=[rank.index])


class _PairOfModels(NamedTuple):
    values: torch.Tensor
    number: int


class _Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.unused = nn.Linear(1, 1)  # torch warns on each rank if find_unused_parameters finds none
        self.seen: dict[str, Any] = {}

    def forward(self, pair: tuple[torch.Tensor, Any], *, more: Mapping[str, Any], factor: int = 1) -> dict[str, Any]:
        x, words = pair
        self.seen = {"x": x, "list": more["list"][0], "words": words, "text": more["text"], "pair": more["list"][1]}
        out = self.layer(x) * factor
        return {"out": out, "nested": (None, [out.detach() + more["list"][0]]), "text": more["text"], "number": words}


def assert_arguments_arrive(rank: Rank, rows_of: Sequence[int], seed: int) -> None:
    """Assert that nested arguments from the CPU arrive whole on the rank's device.

    Positional and keyword arguments are tried, and tensors nested in keyword arguments alone. Outputs must keep their
    structure, and gradients must flow back to the arguments. The ranks have `rows_of` rows in turn.
    """
    with judged() as findings:
        generator = torch.Generator().manual_seed(seed + rank.index)
        rows = rows_of[rank.index % len(rows_of)]
        x = torch.randint(-4, 5, (rows, FEATURES), generator=generator).float()
        y = torch.randint(-4, 5, (rows, CLASSES), generator=generator)
        torch.manual_seed(seed)
        model = _Spread().to(rank.device)
        parallel = under_ddp(model, rank.device, find_unused_parameters=True)
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(value.mul(8).round())
        if rank.device.type != "cuda":
            x, y = x.to(rank.device), y.to(rank.device)
        x.requires_grad_()
        for named in (False, True):
            x.grad = None
            keywords: dict[str, Any] = {"more": {"list": [y, _PairOfModels(y, 7)], "text": "a word"}, "factor": 2}
            out = parallel(pair=(x, 5), **keywords) if named else parallel((x, 5), **keywords)
            out["out"].sum().backward()
            words = "tensors in keyword arguments alone" if named else "nested arguments"
            _judge_arguments(model, x, y, out, f"DDP on {rank.size} ranks, {words}", rank, findings)


def _judge_arguments(
    model: _Spread, x: torch.Tensor, y: torch.Tensor, out: Mapping[str, Any], label: str, rank: Rank, findings: Findings
) -> None:
    label += f", rank {rank.index}"
    weight, bias = model.layer.weight.detach(), model.layer.bias.detach()
    expected = (x.detach().cpu().double() @ weight.cpu().double().T + bias.cpu().double()) * 2
    received, nested = model.seen, out["nested"]
    with findings.collected():
        tensors = {"argument x": received["x"], "argument more['list']": received["list"], "output": out["out"]}
        oracle.assert_devices_are(tensors, weight.device, label)
    for name, (got, wanted) in {
        "argument x": (received["x"], x),
        "the gradient of argument x": (x.grad, 2 * weight.cpu().sum(0).expand(len(x), -1)),
        "argument more['list'][0]": (received["list"], y),
        "the type of argument more['list'][1]": (type(received["pair"]).__name__, _PairOfModels.__name__),
        "argument more['list'][1].values": (getattr(received["pair"], "values", None), y),
        "argument more['list'][1].number": (getattr(received["pair"], "number", None), 7),
        "argument words": (received["words"], 5),
        "argument more['text']": (received["text"], "a word"),
        "output out": (out["out"].double(), expected),
        "output nested[0]": (nested[0], None),
        "output nested[1][0]": (nested[1][0].double(), expected + y.cpu()),
        "output text": (out["text"], "a word"),
        "output number": (out["number"], 5),
    }.items():
        text = _unlike(got, wanted)
        findings.require(not text, f"{label}: {name} {text}", ranks=[rank.index])


def _unlike(got: Any, expected: Any) -> str | None:
    """Describe how an argument or output differs from the expected one; None if it does not."""
    if not isinstance(expected, torch.Tensor):
        return None if type(got) is type(expected) and got == expected else f"is {got!r}, expected {expected!r}"
    if not isinstance(got, torch.Tensor):
        return f"is {got!r}, expected {name_of(expected.dtype)}{list(expected.shape)}"
    text = difference(got, expected, "numbers")
    return f"({name_of(got.dtype)}{list(got.shape)} on {got.device}) is wrong: {text}" if text else None


def assert_evaluation_leaves_no_trace(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that evaluation between steps gives the outputs of one device and does not change later steps.
    In every second run only rank 0 evaluates."""
    with judged() as findings:
        for number, run in enumerate(runs):
            replica = Replica(run, rank, findings, label="evaluated between steps")
            for _ in range(run.steps):
                replica.step()
                x = run.batches()[0][0]
                # Without buffers evaluation does not communicate, so rank 0 may evaluate alone.
                if number % 2 and rank.index:
                    continue
                replica.parallel.eval()
                with torch.inference_mode() if run.seed % 2 else torch.no_grad():
                    got = replica.parallel(x.to(rank.device))
                modes = {name: module.training for name, module in replica.module.named_modules()}
                replica.parallel.train()
                replica.agree({"outputs": got.clone()}, {"outputs": replica.one.outputs(x)}, "in evaluation")
                text = f"in evaluation some modules were in training mode: {modes}"
                replica.require(not any(modes.values()) and not got.requires_grad, text)


def assert_checkpoint_goes_on(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that training continues exactly when rank 0 saves model and optimizer, and all ranks load them.
    An optimizer of narrow parameters has counted more steps than their dtype can represent."""
    with judged() as findings:
        for run in runs:
            replica = Replica(run, rank, findings, label="from a checkpoint")
            for number in range(run.steps):
                if number == 1:
                    _interrupt(replica)
                replica.step()
        for dtype in (torch.bfloat16, torch.float16):
            # Adam's state must be loaded unchanged, with a number of steps that the dtype cannot represent.
            parameter = nn.Parameter(torch.ones(3, dtype=dtype, device=rank.device))
            parameter.grad = torch.full_like(parameter, 0.375)
            original, resumed = (torch.optim.Adam([parameter], lr=0.5) for _ in range(2))
            original.step()
            original.state[parameter]["step"].fill_(_STEPS_COUNTED)
            saved = original.state_dict()
            resumed.load_state_dict(saved)
            for name, value in saved["state"][0].items():
                got = resumed.state[parameter][name]
                same = got.dtype == value.dtype and torch.equal(got.cpu(), value.cpu())
                text = f"{name} was saved as {value.tolist()}, but loaded as {got.tolist()}"
                require(findings, rank, same, f"Adam of {dtype} parameters", text)


def _interrupt(replica: Replica) -> None:
    """Save on rank 0, load on all ranks into a new model and a new optimizer, and put them into the replica."""
    rank = replica.member.rank
    saved: list[Any] = [None]
    if rank.index == 0:
        file = io.BytesIO()
        torch.save({"model": replica.parallel.state_dict(), "optimizer": replica.optimizer.state_dict()}, file)
        saved = [file.getvalue()]
    dist.broadcast_object_list(saved, src=0)
    loaded = torch.load(io.BytesIO(saved[0]), map_location=rank.device)
    with replica.findings.collected():
        oracle.assert_devices_are(loaded["model"], rank.device, f"{replica.label}, rank {rank.index}")
    replica.module = replica.run.build(9 + rank.index).to(rank.device)
    replica.wrap()
    replica.parallel.load_state_dict(loaded["model"])
    replica.optimizer = replica.run.optimize(replica.module)
    replica.optimizer.load_state_dict(loaded["optimizer"])


Hook = Callable[[Any, Any], Any]  # a communication hook: it takes a state, such as a process group, and a bucket

_COMPRESSING: tuple[tuple[Hook, torch.dtype], ...] = (
    (default_hooks.fp16_compress_hook, torch.float16),
    (default_hooks.bf16_compress_hook, torch.bfloat16),
)


def _wrapped() -> list[tuple[Hook, torch.dtype]]:
    float16, bfloat16 = default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper
    wrappers = ((float16, torch.float16), (bfloat16, torch.bfloat16))
    return [(wrap(default_hooks.allreduce_hook), dtype) for wrap, dtype in wrappers]


def assert_averaging_hook_exact(rank: Rank, runs: Sequence[WholeRun], long: Sequence[WholeRun]) -> None:
    """Assert that `allreduce_hook`, and a user's hook that sums and divides, give the gradients of DDP without a hook.
    `long` runs have more steps, and are for `allreduce_hook` only."""
    with judged() as findings:
        for name, hook, megabytes, trained in (
            ("allreduce_hook, small buckets", default_hooks.allreduce_hook, SMALL_BUCKET, runs),
            ("a hook, one bucket", _sum_then_divide, 25, runs),
            ("allreduce_hook, one bucket", default_hooks.allreduce_hook, 25, long),
        ):
            for run in trained:
                _averaged(run, Member.of(rank), findings, hook, label=name, bucket_cap_mb=megabytes)


def _averaged(run: WholeRun, member: Member, findings: Findings, hook: Hook, **options: Any) -> None:
    replica = Replica(run, member, findings, **options)
    parameter_ids: list[int] = []
    group = member.rank.group if member.group is None else member.group

    def noted(group: Any, bucket: Any) -> Any:
        parameters, gradients = bucket.parameters(), bucket.gradients()
        parameter_ids.extend(map(id, parameters))
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        shaped = [gradient.shape for gradient in gradients] == [parameter.shape for parameter in parameters]
        if not shaped or not torch.equal(flat, bucket.buffer()):
            parameter_ids.append(0)
        return hook(group, bucket)

    # DDP compares annotations with its own types, and does not resolve annotations that are strings:
    # torch/nn/parallel/distributed.py, _check_comm_hook, torch 2.13.
    noted.__annotations__.clear()
    replica.parallel.register_comm_hook(group, noted)
    for _ in range(run.steps):
        parameter_ids.clear()
        replica.step()
        wanted = sorted(id(parameter) for parameter in replica.module.parameters())
        text = f"the hook was called for {len(parameter_ids)} parameters, expected each of {len(wanted)} once, with"
        # In the order of the buffer, which the hook compares with the gradients.
        replica.require(sorted(parameter_ids) == wanted, f"{text} its gradient", f", step {replica.number}")


def _sum_then_divide(group: Any, bucket: Any) -> Any:
    size = group.size()
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / size)


def assert_compressed_gradients_rounded(rank: Rank, runs: Sequence[WholeRun]) -> None:
    """Assert that compressing hooks and wrappers round gradients to their dtype, and no further.

    The hooks are fp16_compress_hook, bf16_compress_hook and both wrappers. Data for float16 is small, because float16
    ends at 65504. The mean of gradients of this size must not overflow.
    """
    member = Member.of(rank)
    with judged() as findings:
        for run in runs:
            for hook, dtype in (*_COMPRESSING, *(_wrapped() if run is runs[0] else ())):
                _compressed(run, member, findings, hook, dtype)
        for hook, dtype in _COMPRESSING:
            _judge_largest(member, hook, dtype, findings)


def _compressed(
    run: WholeRun, member: Member, findings: Findings, hook: Hook, dtype: torch.dtype, suffix: str = ""
) -> None:
    replica = Replica(replace(run, small=dtype == torch.float16), member, findings, label=hook.__name__ + suffix)
    replica.parallel.register_comm_hook(member.group, hook)
    shards = _filling(replica, replica.shards(replica.next_batch()), dtype)
    replica.backward(shards[member.index])
    _judge_compressed(replica, replica.one.parts(shards), dtype)


def _filling(replica: Replica, shards: list[Rows], dtype: torch.dtype) -> list[Rows]:
    """Multiply targets, and so gradients, by an odd number, so that sums need all bits of `dtype` but stay exact."""
    shard_gradients = replica.one.parts(shards)
    largest = max(float(torch.stack(terms_of(shard_gradients, name)).abs().sum(0).max()) for name in shard_gradients[0])
    # A rank's own gradients are larger by the number of ranks until the hook divides, and float16 ends at 65504.
    limits = torch.finfo(dtype)
    most = int(min(2 / limits.eps, limits.max / replica.member.size) / max(largest, 1.0))
    factor = (most - 1) | 1 if most > 1 else 1
    return [(x, targets * factor) for x, targets in shards]


def _judge_compressed(replica: Replica, shard_gradients: list[Gradients], dtype: torch.dtype) -> None:
    for name, parameter in replica.module.named_parameters():
        terms = terms_of(shard_gradients, name)
        tolerance = slack(dtype, replica.member.size, terms)
        replica.judge_gradient(name, parameter, torch.stack(terms).sum(0), tolerance, "compressed")
        got, rank = gradient_or_zeros(parameter), replica.member.rank.index
        kept = got.dtype == parameter.dtype and torch.equal(got.to(dtype).to(got.dtype), got)
        message = f"{replica.label}, rank {rank}, gradient of {name}: it holds values that {dtype} cannot represent"
        replica.findings.require(kept, message, ranks=[rank])


def _judge_largest(member: Member, hook: Hook, dtype: torch.dtype, findings: Findings) -> None:
    """Check that the hook divides gradients before it sums them, if `dtype` holds each gradient but not the sum."""
    device = member.rank.device
    # Unless the divisor is a power of two, quotients may round up, and then their sum must not overflow.
    rounds = bool(member.size & (member.size - 1))
    largest = torch.finfo(dtype).max * (0.875 if rounds else 1.0)
    module = nn.Linear(1, 1, bias=False).to(device)
    parallel = under_ddp(module, device, process_group=member.group)
    parallel.register_comm_hook(member.group, hook)
    parallel(torch.full((1, 1), largest, device=device)).sum().backward()
    got = gradient_or_zeros(module.weight).item()
    off = (member.size + 2) * torch.finfo(dtype).eps * largest if rounds else 0.0
    subject, text = f"DDP on {member.size} ranks, {hook.__name__}", f"the mean of gradients of {largest:g} is {got:g}"
    require(findings, member.rank, abs(got - largest) <= off, subject, text)


def assert_hooks_keep_to_groups(rank: Rank, runs: Sequence[WholeRun], first_group: Sequence[int]) -> None:
    """Assert that hooks of models that train in a group of ranks average over exactly this group.
    All ranks outside `first_group` form the second group."""
    with judged() as findings, own_group(rank, first_group) as (members, member):
        suffix = f", in the group {members}"
        for run in (replace(original, seed=original.seed + members[0]) for original in runs):
            once = replace(run, steps=1)
            average, named = default_hooks.allreduce_hook, f"allreduce_hook{suffix}"
            _averaged(once, member, findings, average, label=named, bucket_cap_mb=SMALL_BUCKET)
            for hook, dtype in (*_COMPRESSING, *_wrapped()[:1]):
                _compressed(run, member, findings, hook, dtype, suffix)
        for hook, dtype in _COMPRESSING:
            _judge_largest(member, hook, dtype, findings)
