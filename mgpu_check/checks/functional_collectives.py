"""Collectives in other forms: functional, differentiable, coalesced. All data are small whole numbers, whose sums are exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional  # they have no public name yet
from torch.distributed.nn import functional as differentiable

from mgpu_check.checks.bits import same_bits
from mgpu_check.checks.collective_findings import WrongResult, raise_findings
from mgpu_check.checks.collective_runner import of_one_tensor
from mgpu_check.numerics.bounds import significand_bits
from mgpu_check.rank_side.rank import Rank
from mgpu_check.torch_hooks.tensors import name_of

__all__ = ["assert_coalesced_match", "assert_differentiable_match", "assert_functional_match"]

_ROWS, _COLUMNS = 3, 4
_Parts = Sequence[torch.Tensor]


def _given(rank: int, size: int, seed: int, dtype: torch.dtype, rows: int = _ROWS) -> torch.Tensor:
    """Return what a rank gives: (rows * size, columns * size) whole numbers, so small that `dtype` adds those of all ranks exactly."""
    count = rows * size * _COLUMNS * size
    span = max(2, min(97, (2 ** min(significand_bits(dtype), 31) - 1) // size))
    values = (torch.arange(count) * 7 + rank * 3 + seed) % span
    given: torch.Tensor = values.view(rows * size, -1).to(dtype)
    return given


class _Account:
    def __init__(self, rank: Rank) -> None:
        self.rank, self.findings, self.calls = rank, list[WrongResult](), 0

    def compare(self, what: str, got: Any, right: torch.Tensor) -> None:
        self.calls += 1
        if isinstance(got, functional.AsyncCollectiveTensor):
            got = got.trigger_wait()
        here = got.detach().cpu()
        if same_bits(right, here):
            return
        if right.shape != here.shape or right.dtype != here.dtype:
            shapes = [f"{tuple(one.shape)} {name_of(one.dtype)}" for one in (here, right)]
            self.findings.append(WrongResult(what, f"got {shapes[0]}, expected {shapes[1]}"))
            return
        wrong = (here != right).reshape(-1)
        self.findings.append(WrongResult.of(what, here.reshape(-1), right.reshape(-1), wrong))

    def done(self) -> None:
        __tracebackhide__ = True
        raise_findings(self.findings, self.calls, self.rank)


def assert_functional_match(rank: Rank, dtype: torch.dtype, seed: int) -> None:
    """Assert that each functional collective returns what its model does, and leaves its input as it was.

    Raises:
        CollectiveMismatch: with all that went wrong on this rank.
    """
    __tracebackhide__ = True
    size, me, account = rank.size, rank.index, _Account(rank)
    group: Any = dist.group.WORLD
    parts = [_given(other, size, seed, dtype) for other in range(size)]
    mine = parts[me].to(rank.device)
    stacked = torch.stack(parts)
    total = stacked.sum(0, dtype=dtype)
    reductions = {"sum": total, "min": stacked.amin(0), "max": stacked.amax(0)}
    for op, right in reductions.items():
        account.compare(f"functional all_reduce {op}, {dtype}", functional.all_reduce(mine, op, group), right)
    root = seed % size
    account.compare(f"functional broadcast from {root}", functional.broadcast(mine, root, group), parts[root])
    for dim in (0, 1):
        got = functional.all_gather_tensor(mine, dim, group)
        account.compare(f"functional all_gather_tensor, dimension {dim}, {dtype}", got, torch.cat(parts, dim))
        got = functional.reduce_scatter_tensor(mine, "sum", dim, group)
        account.compare(
            f"functional reduce_scatter_tensor, dimension {dim}, {dtype}", got, total.chunk(size, dim)[me].contiguous()
        )
    to = [[(giver + getter + seed) % 3 for getter in range(size)] for giver in range(size)]
    sends = [parts[giver][: sum(to[giver])] for giver in range(size)]
    right = torch.cat([sends[giver].split(to[giver])[me] for giver in range(size)])
    got = functional.all_to_all_single(
        sends[me].to(rank.device), [to[giver][me] for giver in range(size)], to[me], group
    )
    account.compare(f"functional all_to_all_single, uneven, {dtype}", got, right)
    several = [mine, mine[:, :1].contiguous()]
    for number, got in enumerate(functional.all_reduce_coalesced(several, "sum", group)):
        account.compare(
            f"functional all_reduce_coalesced, tensor {number}", got, total if number == 0 else total[:, :1]
        )
    for number, got in enumerate(functional.all_gather_into_tensor_coalesced(several, group)):
        whole = torch.cat(parts)
        account.compare(
            f"functional all_gather_into_tensor_coalesced, tensor {number}", got, whole if number == 0 else whole[:, :1]
        )
    scattered = functional.reduce_scatter_tensor_coalesced(several, "sum", [0, 0], group)
    for number, got in enumerate(scattered):
        share = total.chunk(size)[me]
        account.compare(
            f"functional reduce_scatter_tensor_coalesced, tensor {number}", got, share if number == 0 else share[:, :1]
        )
    account.compare("the input of functional collectives", mine, parts[me])
    account.done()


def assert_differentiable_match(rank: Rank, seed: int) -> None:
    """Assert that differentiable collectives give the results, and the gradients, of one process that does it all.

    The loss of all ranks together is the sum over ranks of weights · result; the gradient of a rank's input is that of this sum.

    Raises:
        CollectiveMismatch: with all that went wrong on this rank.
    """
    __tracebackhide__ = True
    account = _Account(rank)
    for what, right_of, run in _differentiable(rank, seed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            _differentiate(rank, seed, account, what, right_of, run)
    account.done()


def _differentiate(
    rank: Rank,
    seed: int,
    account: _Account,
    what: str,
    right_of: Callable[[_Parts], list[torch.Tensor]],
    run: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    parts = [_given(other, rank.size, seed, torch.float32).requires_grad_() for other in range(rank.size)]
    results = right_of(parts)
    weights = [torch.full_like(result, 1.0 + other) for other, result in enumerate(results)]
    torch.stack([(weight * result).sum() for weight, result in zip(weights, results, strict=True)]).sum().backward()
    mine = parts[rank.index].detach().to(rank.device).requires_grad_()
    got = run(mine)
    account.compare(what, got, results[rank.index].detach().contiguous())
    (weights[rank.index].to(rank.device) * got).sum().backward()
    gradient, right = mine.grad, parts[rank.index].grad
    assert gradient is not None and right is not None
    account.compare(f"the gradient of {what}", gradient, right)


_Case = tuple[str, Callable[[_Parts], list[torch.Tensor]], Callable[[torch.Tensor], torch.Tensor]]


def _differentiable(rank: Rank, seed: int) -> Iterator[_Case]:
    size = rank.size
    world: Any = dist.group.WORLD

    def shares(parts: _Parts) -> list[torch.Tensor]:
        total = torch.stack(list(parts)).sum(0)
        return list(total.chunk(size))

    def exchanged(parts: _Parts) -> list[torch.Tensor]:
        return [torch.cat([part.chunk(size)[to] for part in parts]) for to in range(size)]

    yield (
        "differentiable all_reduce",
        lambda parts: [torch.stack(list(parts)).sum(0)] * size,
        lambda mine: differentiable.all_reduce(mine.clone(), dist.ReduceOp.SUM, world),
    )
    yield (
        "differentiable all_gather",
        lambda parts: [torch.cat(list(parts))] * size,
        lambda mine: torch.cat(differentiable.all_gather(mine, world)),
    )
    for root in sorted({seed % size, (seed + 1) % size}):
        yield from _rooted(root, rank, world)
    yield (
        "differentiable reduce_scatter",
        shares,
        lambda mine: differentiable.reduce_scatter(
            torch.empty_like(mine[: len(mine) // size]), [part.contiguous() for part in mine.chunk(size)], group=world
        ),
    )
    yield (
        "differentiable all_to_all_single",
        exchanged,
        lambda mine: differentiable.all_to_all_single(torch.empty_like(mine), mine.clone(), group=world),
    )
    yield (
        "differentiable all_to_all",
        exchanged,
        lambda mine: torch.cat(
            differentiable.all_to_all(
                [torch.empty_like(part) for part in mine.chunk(size)], list(mine.chunk(size)), world
            )
        ),
    )
    yield (
        "all_gather_tensor_autograd",
        lambda parts: [torch.cat(list(parts), 1)] * size,
        lambda mine: functional.all_gather_tensor_autograd(mine, 1, world),
    )
    yield (
        "reduce_scatter_tensor_autograd",
        shares,
        lambda mine: functional.reduce_scatter_tensor_autograd(mine, "sum", 0, world),
    )
    rows = [_ROWS] * size
    yield (
        "all_to_all_single_autograd",
        exchanged,
        lambda mine: functional.all_to_all_single_autograd(mine, rows, rows, world),
    )


def _rooted(root: int, rank: Rank, world: Any) -> Iterator[_Case]:
    """Yield the collectives that have a root; what one leaves on the other ranks is not documented, so zero stands for it there."""
    size = rank.size
    here = int(rank.index == root)

    def at_root(whole: Callable[[_Parts], torch.Tensor]) -> Callable[[_Parts], list[torch.Tensor]]:
        return lambda parts: [whole(parts) * (other == root) for other in range(size)]

    yield (
        f"differentiable broadcast from {root}",
        lambda parts: [parts[root] + 0 * part for part in parts],
        lambda mine: differentiable.broadcast(mine.clone(), root, world),
    )
    yield (
        f"differentiable reduce to {root}",
        at_root(lambda parts: torch.stack(list(parts)).sum(0)),
        lambda mine: differentiable.reduce(mine, root, dist.ReduceOp.SUM, world) * here,
    )
    yield (
        f"differentiable gather to {root}",
        at_root(lambda parts: torch.cat(list(parts))),
        lambda mine: torch.cat(differentiable.gather(mine, root, world)) * here,
    )
    yield (
        f"differentiable scatter from {root}",
        lambda parts: [
            chunk + 0 * part[: len(chunk)] for part, chunk in zip(parts, parts[root].chunk(size), strict=True)
        ],
        lambda mine: differentiable.scatter(list(mine.chunk(size)), root, world),
    )


def assert_coalesced_match(rank: Rank, seed: int) -> None:
    """Assert that coalesced collectives treat each tensor as one by one they would.

    Raises:
        CollectiveMismatch: with all that went wrong on this rank.
    """
    __tracebackhide__ = True
    size, me, account = rank.size, rank.index, _Account(rank)
    dtype = (torch.float32, torch.int64, torch.bfloat16)[seed % 3]
    parts = [
        [_given(other, size, seed + number, dtype, rows=number + 1) for number in range(3)] for other in range(size)
    ]
    for asynchronous in (False, True):
        late = ", async" if asynchronous else ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            held = [part.to(rank.device) for part in parts[me]]
            _wait(dist.all_reduce_coalesced(held, async_op=asynchronous))
            for number, got in enumerate(held):
                right = torch.stack([parts[other][number] for other in range(size)]).sum(0, dtype=dtype)
                account.compare(f"all_reduce_coalesced{late}, tensor {number}, {dtype}", got, right)
    for asynchronous in (False, True):
        _in_one_call(account, seed, asynchronous)
    # NCCL has none for lists, and gloo takes tensors of the CPU.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        lists = [[torch.empty_like(part) for part in parts[me]] for _ in range(size)]
        dist.all_gather_coalesced(lists, parts[me])
        for other in range(size):
            for number, got in enumerate(lists[other]):
                account.compare(f"all_gather_coalesced, tensor {number} of rank {other}", got, parts[other][number])
    account.done()


def _in_one_call(account: _Account, seed: int, asynchronous: bool) -> None:
    """Make two collectives of each kind, of tensors of one shape, in a coalescing manager."""
    rank, world = account.rank, dist.group.WORLD
    size, me = rank.size, rank.index
    parts = [[_given(other, size, seed + 5 * number, torch.float32) for number in range(2)] for other in range(size)]
    whole = [torch.cat([parts[other][number] for other in range(size)]) for number in range(2)]
    total = [torch.stack([parts[other][number] for other in range(size)]).sum(0) for number in range(2)]
    mine = [part.to(rank.device) for part in parts[me]]
    makes: dict[str, tuple[list[torch.Tensor], list[torch.Tensor], Callable[[torch.Tensor, torch.Tensor], Any]]] = {
        "all_reduce": ([part.clone() for part in mine], total, lambda got, given: dist.all_reduce(got)),
        "all_gather_into_tensor": (
            [torch.empty_like(one, device=rank.device) for one in whole],
            whole,
            lambda got, given: of_one_tensor("all_gather")(got, given),
        ),
        "reduce_scatter_tensor": (
            [torch.empty_like(part[:_ROWS]) for part in mine],
            [one.chunk(size)[me] for one in total],
            lambda got, given: of_one_tensor("reduce_scatter")(got, given),
        ),
    }
    late = ", async" if asynchronous else ""
    for name, (taken, right, call) in makes.items():
        # It has no public name yet, and is what libraries use.
        with dist.distributed_c10d._coalescing_manager(world, rank.device, async_ops=asynchronous) as manager:
            for got, given in zip(taken, mine, strict=True):
                call(got, given)
        if asynchronous:
            manager.wait()
        for number, (got, expected) in enumerate(zip(taken, right, strict=True)):
            account.compare(f"{name} in a coalescing manager{late}, tensor {number}", got, expected.contiguous())


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
