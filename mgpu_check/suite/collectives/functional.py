"""Check functional and coalesced collectives, on small whole numbers whose sums are exact."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional  # they have no public name yet
from torch.torch_version import TorchVersion

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.collectives.runner import coalescing, named
from mgpu_check.suite.collectives.teams import CallTally, Team, judged_by, numbers_of
from mgpu_check.version import torch_version

_SEVERAL = 6
"""The number of tensors in a coalesced call."""
ANY_LAYOUT = TorchVersion(torch_version()) >= "2.13"
"""Earlier versions of torch refuse transposed inputs of all_gather_tensor and reduce_scatter_tensor."""
_Parts = Sequence[torch.Tensor]
_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "MAX": lambda stacked: stacked.amax(0),
    "MIN": lambda stacked: stacked.amin(0),
}


def _reductions(parts: _Parts, seed: int) -> dict[str, tuple[_Parts, torch.Tensor]]:
    """Return the inputs and the result of "sum" and of two other reductions, which the seed selects.

    The mean is left out if it may round. The factors of the product are 1, but for one member.
    """
    dtype, size = parts[0].dtype, len(parts)
    stacked = torch.stack(list(parts))
    found = {op.lower(): (parts, reduced(stacked)) for op, reduced in _REDUCTIONS.items()}
    factors = [part if place == seed % size else torch.ones_like(part) for place, part in enumerate(parts)]
    found["product"] = factors, parts[seed % size]
    if dtype.is_floating_point and not size & (size - 1):
        found["avg"] = parts, found["sum"][1] / size
    others = [op for op in found if op != "sum"]
    return {op: found[op] for op in ("sum", others[seed % len(others)], others[(seed + 1) % len(others)])}


def assert_functional_match(rank: Rank, dtype: torch.dtype, seed: int, members: tuple[int, ...] = ()) -> None:
    """Assert that each functional collective returns the result of its model, and does not change its input."""
    judged_by(rank, members, lambda team, account: _functional(team, account, dtype, seed))


def _functional(team: Team, account: CallTally, dtype: torch.dtype, seed: int) -> None:
    size, me, group = team.size, team.place, team.group
    parts = [numbers_of(other, size, seed, dtype) for other in range(size)]
    mine = parts[me].to(team.rank.device)
    by_columns = _by_columns(mine)
    reductions = _reductions(parts, seed)
    given = {op: inputs[me].to(team.rank.device) for op, (inputs, _) in reductions.items()}
    turn = seed // len(given)  # as the seed also selects the reductions
    given = {op: _by_columns(one) if (turn + at) % 2 else one for at, (op, one) in enumerate(given.items())}
    for op, (_, right) in reductions.items():
        account.compare(f"functional all_reduce {op}, {dtype}", functional.all_reduce(given[op], op, group), right)
    layouts = {"": mine, " of a transposed input": by_columns}
    for root, (layout, own) in itertools.product(team.roots(seed)[:1], layouts.items()):
        what = f"functional broadcast{layout} from {root}"
        account.compare(what, functional.broadcast(own, root, group), parts[root])
    for dim in (0, 1):
        for layout, own in itertools.islice(layouts.items(), 2 if ANY_LAYOUT else 1):
            what = f"functional all_gather_tensor{layout}, dimension {dim}, {dtype}"
            account.compare(what, functional.all_gather_tensor(own, dim, group), torch.cat(parts, dim))
        for op, (_, right) in reductions.items():
            own = given[op] if ANY_LAYOUT else given[op].contiguous()
            got = functional.reduce_scatter_tensor(own, op, dim, group)
            what = f"functional reduce_scatter_tensor {op}, dimension {dim}, {dtype}"
            account.compare(what, got, right.chunk(size, dim)[me].contiguous())
    turned = [(place + 1 + seed) % size for place in range(size)]
    got = functional.permute_tensor(mine.reshape(-1), turned, group)
    account.compare(f"functional permute_tensor, {dtype}", got, parts[turned.index(me)].reshape(-1))
    to = [[(giver + getter + seed) % 3 for getter in range(size)] for giver in range(size)]
    sends = [parts[giver][: sum(to[giver])] for giver in range(size)]
    right = torch.cat([sends[giver].split(to[giver])[me] for giver in range(size)])
    got = functional.all_to_all_single(
        sends[me].to(team.rank.device), [to[giver][me] for giver in range(size)], to[me], group
    )
    account.compare(f"functional all_to_all_single, uneven, {dtype}", got, right)
    widths = [mine.shape[1], *(number % 3 + 1 for number in range(_SEVERAL - 1))]
    several = {op: [one[:, :width].contiguous() for width in widths] for op, one in given.items()}
    coalesced: dict[str, tuple[Sequence[Any], torch.Tensor]] = {
        "all_gather_into_tensor_coalesced": (
            functional.all_gather_into_tensor_coalesced(several["sum"], group),
            torch.cat(parts),
        )
    }
    for op, (_, right) in reductions.items():
        coalesced[f"all_reduce_coalesced {op}"] = functional.all_reduce_coalesced(several[op], op, group), right
        coalesced[f"reduce_scatter_tensor_coalesced {op}"] = (
            functional.reduce_scatter_tensor_coalesced(several[op], op, [0] * _SEVERAL, group),
            right.chunk(size)[me],
        )
    for name, (results, right) in coalesced.items():
        for number, (got, width) in enumerate(zip(results, widths, strict=True)):
            account.compare(f"functional {name}, tensor {number}", got, right[:, :width])
    account.compare("the input of functional collectives", mine, parts[me])
    account.compare("the transposed input of functional collectives", by_columns, parts[me])


def _by_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Return a copy whose columns lie one after another."""
    return matrix.t().contiguous().t()


def assert_coalesced_match(rank: Rank, dtype: torch.dtype, seed: int, members: tuple[int, ...] = ()) -> None:
    """Assert that coalesced collectives give the same results as separate calls for each tensor."""
    judged_by(rank, members, lambda team, account: _coalesced(team, account, dtype, seed))


def _coalesced(team: Team, account: CallTally, dtype: torch.dtype, seed: int) -> None:
    size, me, group = team.size, team.place, team.group
    parts = [
        [numbers_of(other, size, seed + number, dtype, rows=number % 3 + 1) for number in range(_SEVERAL)]
        for other in range(size)
    ]
    for asynchronous in (False, True):
        late = ", async" if asynchronous else ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            held = [part.to(team.rank.device) for part in parts[me]]
            _wait(dist.all_reduce_coalesced(held, group=group, async_op=asynchronous))
            for number, got in enumerate(held):
                right = torch.stack([parts[other][number] for other in range(size)]).sum(0, dtype=dtype)
                account.compare(f"all_reduce_coalesced{late}, tensor {number}, {dtype}", got, right)
    for asynchronous, op in ((False, "SUM"), (True, "SUM"), (bool(seed % 2), ("MAX", "MIN")[seed // 2 % 2])):
        _in_one_call(team, account, seed, asynchronous, op)
    # On the CPU, by gloo: NCCL does not support all_gather_coalesced of lists.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        lists = [[torch.empty_like(part) for part in parts[me]] for _ in range(size)]
        dist.all_gather_coalesced(lists, parts[me], group=group)
        for other in range(size):
            for number, got in enumerate(lists[other]):
                what = f"all_gather_coalesced, tensor {number} of rank {team.members[other]}"
                account.compare(what, got, parts[other][number])


def _in_one_call(team: Team, account: CallTally, seed: int, asynchronous: bool, op: str) -> None:
    """Check several collectives of each kind in a coalescing manager; each shape occurs twice."""
    size, me, group, device = team.size, team.place, team.group, team.rank.device
    parts = [
        [numbers_of(other, size, seed + 5 * number, torch.float32, rows=number // 2 + 1) for number in range(_SEVERAL)]
        for other in range(size)
    ]
    several = list(zip(*parts, strict=True))
    whole = [torch.cat(given) for given in several]
    total = [_REDUCTIONS[op](torch.stack(given)) for given in several]
    reduced, older = {"op": getattr(dist.ReduceOp, op), "group": group}, seed % 4 > 1
    mine = [part.to(device) for part in parts[me]]
    makes: dict[str, tuple[list[torch.Tensor], list[torch.Tensor], Callable[[torch.Tensor, torch.Tensor], Any]]] = {
        "all_reduce": ([part.clone() for part in mine], total, lambda got, given: dist.all_reduce(got, **reduced)),
        "all_gather_into_tensor": (
            [torch.empty_like(one, device=device) for one in whole],
            whole,
            lambda got, given: named("all_gather_into_tensor", older=older)(got, given, group=group),
        ),
        "reduce_scatter_tensor": (
            [torch.empty_like(part[: len(part) // size]) for part in mine],
            [one.chunk(size)[me] for one in total],
            lambda got, given: named("reduce_scatter_tensor", older=older)(got, given, **reduced),
        ),
    }
    late = ", async" if asynchronous else ""
    for name, (taken, right, call) in makes.items():
        with coalescing(group, device, asynchronous=asynchronous) as manager:
            for got, given in zip(taken, mine, strict=True):
                call(got, given)
        if asynchronous:
            manager.wait()
        for number, (got, expected) in enumerate(zip(taken, right, strict=True)):
            what = f"{name} {op} in a coalescing manager{late}, tensor {number}"
            account.compare(what, got, expected.contiguous())


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
