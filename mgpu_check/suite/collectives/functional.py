"""Check functional, coalesced and differentiable collectives, on small whole numbers whose sums are exact.

The ranks of a group call them as a team. Of differentiable collectives the gradients are compared too.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional  # they have no public name yet
from torch.distributed.nn import functional as differentiable
from torch.torch_version import TorchVersion

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.asserts.findings import run_all
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.reduction import significand_bits
from mgpu_check.oracles.collectives.cases import WrongResult, raise_findings
from mgpu_check.oracles.collectives.repeated_calls import coalescing, collective_named, groups_of
from mgpu_check.suite.collectives.calls import some_groups
from mgpu_check.torch_hooks.tensors import name_of
from mgpu_check.version import torch_version

ROWS, _COLUMNS = 3, 4


def numbers_of(position: int, size: int, seed: int, dtype: torch.dtype, rows: int = ROWS) -> torch.Tensor:
    """Return a member's input, (rows * size, columns * size): whole numbers so small that `dtype` sums them exactly."""
    count = rows * size * _COLUMNS * size
    span = max(2, min(97, (2 ** min(significand_bits(dtype), 31) - 1) // size))
    values = (torch.arange(count) * 7 + position * 3 + seed) % span
    return values.view(rows * size, -1).to(dtype)


@dataclass(frozen=True)
class Team:
    """The ranks that call collectives together, in ascending order: all ranks, or a group that contains this rank."""

    rank: Rank
    members: tuple[int, ...]
    group: Any

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def position(self) -> int:
        return self.members.index(self.rank.index)

    def roots(self, seed: int) -> list[int]:
        """Return up to two members whose place in the group equals their rank, as functions read roots as either."""
        able = [member for position, member in enumerate(self.members) if member == position]
        return sorted({able[(seed + turn) % len(able)] for turn in (0, 1)}) if able else []


def judged(rank: Rank, members: tuple[int, ...], judge: Callable[[Team, CallTally], None]) -> None:
    """Make a group of the members, let them run `judge` in it, and raise the errors. A collective of all ranks."""
    account = CallTally(f", group {list(members)}" if members else "")
    members = members or tuple(range(rank.size))
    with groups_of(rank, [members]) as groups:
        if rank.index in members:
            judge(Team(rank, members, groups[members] or dist.group.WORLD), account)
    raise_findings(account.findings, account.calls, rank)


class CallTally:
    """Counts the calls of a team, and keeps their wrong results."""

    def __init__(self, suffix: str) -> None:
        self.suffix, self.findings, self.calls = suffix, list[WrongResult](), 0

    def compare(self, label: str, got: Any, expected: torch.Tensor) -> None:
        self.calls += 1
        label += self.suffix
        if isinstance(got, functional.AsyncCollectiveTensor):
            got = got.trigger_wait()
        local = got.detach().cpu()
        if same_bits(expected, local):
            return
        if expected.shape != local.shape or expected.dtype != local.dtype:
            shapes = [f"{tuple(tensor.shape)} {name_of(tensor.dtype)}" for tensor in (local, expected)]
            self.findings.append(WrongResult(label, f"got {shapes[0]}, expected {shapes[1]}"))
            return
        mismatches = (local != expected).reshape(-1)
        self.findings.append(WrongResult.of(label, local.reshape(-1), expected.reshape(-1), mismatches))


_SEVERAL = 6  # the number of tensors in a coalesced call
ANY_LAYOUT = TorchVersion(torch_version()) >= "2.13"
"""Earlier versions of torch refuse transposed inputs of all_gather_tensor and reduce_scatter_tensor."""
_Matrices = Sequence[torch.Tensor]
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "MAX": lambda stacked: stacked.amax(0),
    "MIN": lambda stacked: stacked.amin(0),
}


def _reductions(matrices: _Matrices, seed: int) -> dict[str, tuple[_Matrices, torch.Tensor]]:
    """Return the inputs and the result of "sum" and of two other reductions, which the seed selects.
    The mean is left out if it may round. The factors of the product are 1, but for one member."""
    dtype, size = matrices[0].dtype, len(matrices)
    stacked = torch.stack(list(matrices))
    reductions = {op.lower(): (matrices, reduced(stacked)) for op, reduced in REDUCTIONS.items()}
    factors = [torch.ones_like(matrix) for matrix in matrices]
    factors[seed % size] = matrices[seed % size]
    reductions["product"] = factors, matrices[seed % size]
    if dtype.is_floating_point and not size & (size - 1):
        reductions["avg"] = matrices, reductions["sum"][1] / size
    others = [op for op in reductions if op != "sum"]
    return {op: reductions[op] for op in ("sum", others[seed % len(others)], others[(seed + 1) % len(others)])}


def judge_functional(team: Team, account: CallTally, dtype: torch.dtype, seed: int) -> None:
    """Judge whether each functional collective returns the result of its model, and does not change its input."""
    size, me, group = team.size, team.position, team.group
    matrices = [numbers_of(position, size, seed, dtype) for position in range(size)]
    mine = matrices[me].to(team.rank.device)
    by_columns = mine.t().contiguous().t()
    reductions = _reductions(matrices, seed)
    inputs = {op: operands[me].to(team.rank.device) for op, (operands, _) in reductions.items()}
    turn = seed // len(inputs)  # as the seed also selects the reductions
    for at, (op, tensor) in enumerate(inputs.items()):
        inputs[op] = tensor.t().contiguous().t() if (turn + at) % 2 else tensor
    for op, (_, expected) in reductions.items():
        account.compare(f"functional all_reduce {op}, {dtype}", functional.all_reduce(inputs[op], op, group), expected)
    layouts = {"": mine, " of a transposed input": by_columns}
    for root, (layout, own) in itertools.product(team.roots(seed)[:1], layouts.items()):
        label = f"functional broadcast{layout} from {root}"
        account.compare(label, functional.broadcast(own, root, group), matrices[root])
    for dim in (0, 1):
        for layout, own in itertools.islice(layouts.items(), 2 if ANY_LAYOUT else 1):
            label = f"functional all_gather_tensor{layout}, dimension {dim}, {dtype}"
            account.compare(label, functional.all_gather_tensor(own, dim, group), torch.cat(matrices, dim))
        for op, (_, expected) in reductions.items():
            own = inputs[op] if ANY_LAYOUT else inputs[op].contiguous()
            got = functional.reduce_scatter_tensor(own, op, dim, group)
            label = f"functional reduce_scatter_tensor {op}, dimension {dim}, {dtype}"
            account.compare(label, got, expected.chunk(size, dim)[me].contiguous())
    turned = [(start + 1 + seed) % size for start in range(size)]
    got = functional.permute_tensor(mine.reshape(-1), turned, group)
    account.compare(f"functional permute_tensor, {dtype}", got, matrices[turned.index(me)].reshape(-1))
    to = [[(giver + getter + seed) % 3 for getter in range(size)] for giver in range(size)]
    sends = [matrices[giver][: sum(to[giver])] for giver in range(size)]
    expected = torch.cat([sends[giver].split(to[giver])[me] for giver in range(size)])
    gets = [to[giver][me] for giver in range(size)]
    got = functional.all_to_all_single(sends[me].to(team.rank.device), gets, to[me], group)
    account.compare(f"functional all_to_all_single, uneven, {dtype}", got, expected)
    widths = [mine.shape[1], *(number % 3 + 1 for number in range(_SEVERAL - 1))]
    several = {op: [tensor[:, :width].contiguous() for width in widths] for op, tensor in inputs.items()}
    gathered: Any = functional.all_gather_into_tensor_coalesced(several["sum"], group)
    coalesced = {"all_gather_into_tensor_coalesced": (gathered, torch.cat(matrices))}
    for op, (_, expected) in reductions.items():
        coalesced[f"all_reduce_coalesced {op}"] = functional.all_reduce_coalesced(several[op], op, group), expected
        scattered = functional.reduce_scatter_tensor_coalesced(several[op], op, [0] * _SEVERAL, group)
        coalesced[f"reduce_scatter_tensor_coalesced {op}"] = scattered, expected.chunk(size)[me]
    for name, (results, expected) in coalesced.items():
        for number, (got, width) in enumerate(zip(results, widths, strict=True)):
            account.compare(f"functional {name}, tensor {number}", got, expected[:, :width])
    account.compare("the input of functional collectives", mine, matrices[me])
    account.compare("the transposed input of functional collectives", by_columns, matrices[me])


def judge_coalesced(team: Team, account: CallTally, seed: int) -> None:
    """Judge whether coalesced collectives give the same results as separate calls for each tensor."""
    for op, asynchronous, older in (
        ("SUM", False, False),
        ("SUM", True, True),
        ("MAX", False, True),
        ("MIN", True, False),
    ):
        _in_one_call(team, account, seed, op, asynchronous=asynchronous, older=older)


def _in_one_call(team: Team, account: CallTally, seed: int, op: str, *, asynchronous: bool, older: bool) -> None:
    """Check several collectives of each kind in a coalescing manager; each shape occurs twice."""
    size, me, group, device = team.size, team.position, team.group, team.rank.device
    several = [
        [numbers_of(position, size, seed + 5 * number, torch.float32, number // 2 + 1) for position in range(size)]
        for number in range(_SEVERAL)
    ]
    gathered = [torch.cat(source) for source in several]
    total = [REDUCTIONS[op](torch.stack(source)) for source in several]
    reduced = {"op": getattr(dist.ReduceOp, op), "group": group}
    mine = [source[me].to(device) for source in several]
    makes: dict[str, tuple[list[torch.Tensor], list[torch.Tensor], Callable[[torch.Tensor, torch.Tensor], Any]]] = {
        "all_reduce": ([matrix.clone() for matrix in mine], total, lambda got, source: dist.all_reduce(got, **reduced)),
        "all_gather_into_tensor": (
            [torch.empty_like(tensor, device=device) for tensor in gathered],
            gathered,
            lambda got, source: collective_named("all_gather_into_tensor", older=older)(got, source, group=group),
        ),
        "reduce_scatter_tensor": (
            [torch.empty_like(matrix[: len(matrix) // size]) for matrix in mine],
            [tensor.chunk(size)[me] for tensor in total],
            lambda got, source: collective_named("reduce_scatter_tensor", older=older)(got, source, **reduced),
        ),
    }
    late = ", async" if asynchronous else ""
    for name, (outputs, results, call) in makes.items():
        with coalescing(group, device, asynchronous=asynchronous) as manager:
            for got, source in zip(outputs, mine, strict=True):
                call(got, source)
        if asynchronous:
            manager.wait()
        for number, (got, expected) in enumerate(zip(outputs, results, strict=True)):
            account.compare(f"{name} {op} in a coalescing manager{late}, tensor {number}", got, expected.contiguous())


def assert_differentiable_match(rank: Rank, seed: int, members: tuple[int, ...] = ()) -> None:
    """Assert that differentiable collectives give the results and gradients of a computation in one process.
    The loss is the sum over all ranks of weights · result. The gradient of a rank's input must be that of this sum."""

    def judge(team: Team, account: CallTally) -> None:
        me, size, device = team.position, team.size, team.rank.device
        for label, right_of, run in _differentiable(team, seed):
            matrices = [numbers_of(position, size, seed, torch.float32).requires_grad_() for position in range(size)]
            results = right_of(matrices)
            # Small whole numbers that differ between elements and places, so that a gradient in another order shows.
            weights = [torch.arange(result.numel()).view(result.shape) % 5 + 1.0 for result in results]
            terms = [((weight + place) * results[place]).sum() for place, weight in enumerate(weights)]
            torch.stack(terms).sum().backward()
            mine = matrices[me].detach().to(device).requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                got = run(mine)
                account.compare(label, got, results[me].detach().contiguous())
                ((weights[me] + me).to(device) * got).sum().backward()
            gradient, expected = mine.grad, matrices[me].grad
            assert gradient is not None and expected is not None
            account.compare(f"the gradient of {label}", gradient, expected)

    judged(rank, members, judge)


_Case = tuple[str, Callable[[_Matrices], list[torch.Tensor]], Callable[[torch.Tensor], torch.Tensor]]


def _differentiable(team: Team, seed: int) -> list[_Case]:
    """Return the name of each differentiable collective, the results of its model on all ranks, and its call.
    Gradients of MAX are undocumented, so only its results count. Results on other ranks than a root are undocumented,
    so they are multiplied by 0."""
    size, group, rows, largest = team.size, team.group, [ROWS] * team.size, dist.ReduceOp.MAX

    def total(matrices: _Matrices) -> torch.Tensor:
        return torch.stack(list(matrices)).sum(0)

    def maximum(matrices: _Matrices) -> torch.Tensor:
        return torch.stack([matrix.detach() for matrix in matrices]).amax(0)

    def shares(matrices: _Matrices) -> list[torch.Tensor]:
        return list(total(matrices).chunk(size))

    def exchanged(matrices: _Matrices) -> list[torch.Tensor]:
        return [torch.cat([matrix.chunk(size)[to] for matrix in matrices]) for to in range(size)]

    def chunks(mine: torch.Tensor) -> list[torch.Tensor]:
        return [chunk.contiguous() for chunk in mine.chunk(size)]

    def depending(results: _Matrices, matrices: _Matrices) -> list[torch.Tensor]:
        return [result + 0 * matrix[: len(result)] for result, matrix in zip(results, matrices, strict=True)]

    cases: list[_Case] = [
        ("differentiable all_reduce", lambda matrices: [total(matrices)] * size,
         lambda mine: differentiable.all_reduce(mine.clone(), dist.ReduceOp.SUM, group)),
        ("differentiable all_gather", lambda matrices: [torch.cat(list(matrices))] * size,
         lambda mine: torch.cat(differentiable.all_gather(mine, group))),
        ("differentiable reduce_scatter", shares,
         lambda mine: differentiable.reduce_scatter(torch.empty_like(mine[:ROWS]), chunks(mine), group=group)),
        ("differentiable all_to_all_single", exchanged, lambda mine: differentiable.all_to_all_single(
            torch.empty_like(mine), mine.clone(), rows, rows, group=group)),
        ("differentiable all_to_all", exchanged, lambda mine: torch.cat(differentiable.all_to_all(
            [torch.empty_like(chunk) for chunk in mine.chunk(size)], list(mine.chunk(size)), group))),
        ("all_gather_tensor_autograd", lambda matrices: [torch.cat(list(matrices), 1)] * size,
         lambda mine: functional.all_gather_tensor_autograd(mine, 1, group)),
        ("reduce_scatter_tensor_autograd", shares,
         lambda mine: functional.reduce_scatter_tensor_autograd(mine, "sum", 0, group)),
        ("differentiable all_reduce MAX", lambda matrices: depending([maximum(matrices)] * size, matrices),
         lambda mine: differentiable.all_reduce(mine.detach().clone(), largest, group) + 0 * mine),
        ("differentiable reduce_scatter MAX",
         lambda matrices: depending(maximum(matrices).chunk(size), matrices),
         lambda mine: 0 * mine[:ROWS] + differentiable.reduce_scatter(
            torch.empty_like(mine[:ROWS]), chunks(mine.detach()), largest, group)),
        ("all_to_all_single_autograd", exchanged,
         lambda mine: functional.all_to_all_single_autograd(mine, rows, rows, group)),
    ]  # fmt: skip
    for root in team.roots(seed):
        cases += _rooted(root, team, total, maximum, depending)
    return cases


def _rooted(root: int, team: Team, total: Any, maximum: Any, depending: Any) -> list[_Case]:
    size, group, on_root = team.size, team.group, int(team.position == root)

    def at_root(result_of: Callable[[_Matrices], torch.Tensor]) -> Callable[[_Matrices], list[torch.Tensor]]:
        return lambda matrices: [result_of(matrices) * (position == root) for position in range(size)]

    return [
        (f"differentiable broadcast from {root}", lambda matrices: depending([matrices[root]] * size, matrices),
         lambda mine: differentiable.broadcast(mine.clone(), root, group)),
        (f"differentiable reduce to {root}", at_root(total),
         lambda mine: differentiable.reduce(mine, root, dist.ReduceOp.SUM, group) * on_root),
        (f"differentiable reduce MAX to {root}, without a gradient",
         at_root(lambda matrices: maximum(matrices) + 0 * sum(matrices)),
         lambda mine: differentiable.reduce(mine.detach(), root, dist.ReduceOp.MAX, group) * on_root + 0 * mine),
        (f"differentiable gather to {root}", at_root(lambda matrices: torch.cat(list(matrices))),
         lambda mine: torch.cat(differentiable.gather(mine, root, group)) * on_root),
        (f"differentiable scatter from {root}",
         lambda matrices: depending(matrices[root].chunk(size), matrices),
         lambda mine: differentiable.scatter(list(mine.chunk(size)), root, group)),
    ]  # fmt: skip


def assert_functional_match_in_groups(rank: Rank, seed: int) -> None:
    """Assert that functional collectives match their models: for several dtypes, and in a group."""
    cases: list[tuple[tuple[int, ...], torch.dtype]]
    cases = [((), dtype) for dtype in (torch.float32, torch.int64, torch.bfloat16)]
    cases += [(members, torch.float32) for members in some_groups(rank, seed)[seed % 2 :][:1]]
    judges = (
        (members, partial(judge_functional, dtype=dtype, seed=seed + 2 * number))  # two further reductions for each
        for number, (members, dtype) in enumerate(cases)
    )
    run_all(partial(judged, rank, members, judge) for members, judge in judges)


def assert_differentiable_match_in_groups(rank: Rank, seed: int) -> None:
    """Assert that differentiable collectives match their models: of all ranks, and in groups."""
    run_all(partial(assert_differentiable_match, rank, seed, members) for members in ((), *some_groups(rank, seed)))


def assert_coalesced_match_in_groups(rank: Rank, seed: int) -> None:
    """Assert that coalesced collectives match separate calls: of all ranks, and in a group."""
    judge = partial(judge_coalesced, seed=seed)
    run_all(partial(judged, rank, members, judge) for members in ((), *some_groups(rank, seed)[:1]))
