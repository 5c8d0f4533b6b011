"""Check initial state, buffers, dtypes, arguments and checkpoints under DistributedDataParallel, by collectives."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mgpu_check.asserts.collectives import first_difference, same_bits
from mgpu_check.asserts.findings import Findings, require
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.agreement import difference
from mgpu_check.oracles.training import reference_training as oracle
from mgpu_check.oracles.training.cases import WholeRun
from mgpu_check.oracles.training.models import Everything
from mgpu_check.oracles.training.reference_training import CLASSES, FEATURES, STEPS, judged
from mgpu_check.oracles.training.training_steps import split
from mgpu_check.suite.distributed.training import Replica, train, under_ddp
from mgpu_check.torch_hooks.tensors import name_of

_STEPS_COUNTED = 4_099  # not representable in bfloat16 or float16


def assert_starts_from_the_first_rank(rank: Rank, seed: int) -> None:
    """Assert that a wrapped model holds rank 0's parameters and buffers, bit for bit, in all dtypes and sizes."""
    with judged() as findings:
        model = Everything(seed + 31 * rank.index).to(rank.device)
        under_ddp(model, rank.device)
        for name, expected in oracle.state_of(Everything(seed)).items():
            got = oracle.state_of(model)[name]
            if not same_bits(expected, got):
                at = first_difference(expected, got.cpu())
                message = f"DDP on {rank.size} ranks, after wrapping: {name} of rank {rank.index} differs from rank 0's"
                message += f": element {list(at)} is {got[at].item()}, expected {expected[at].item()}"
                findings.require(False, message, ranks=[rank.index])


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
            _judge_count(rank, findings, dtype)


def _judge_count(rank: Rank, findings: Findings, dtype: torch.dtype) -> None:
    """Check that Adam's state is loaded unchanged, with a number of steps that `dtype` cannot represent."""
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
