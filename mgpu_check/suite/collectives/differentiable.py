"""Check differentiable collectives: their results and gradients, on small whole numbers whose sums are exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional  # they have no public name yet
from torch.distributed.nn import functional as differentiable

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.collectives.teams import ROWS, CallTally, Team, judged_by, numbers_of

_Parts = Sequence[torch.Tensor]


def assert_differentiable_match(rank: Rank, seed: int, members: tuple[int, ...] = ()) -> None:
    """Assert that differentiable collectives give the results and gradients of a computation in one process.

    The loss is the sum over all ranks of weights · result. The gradient of a rank's input must be that of this sum.
    """

    def judge(team: Team, account: CallTally) -> None:
        for what, right_of, run in _differentiable(team, seed):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                _differentiate(team, seed, account, what, right_of, run)

    judged_by(rank, members, judge)


def _differentiate(
    team: Team,
    seed: int,
    account: CallTally,
    what: str,
    right_of: Callable[[_Parts], list[torch.Tensor]],
    run: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    parts = [numbers_of(other, team.size, seed, torch.float32).requires_grad_() for other in range(team.size)]
    results = right_of(parts)
    weights = [_weights(result, other) for other, result in enumerate(results)]
    torch.stack([(weight * result).sum() for weight, result in zip(weights, results, strict=True)]).sum().backward()
    me, device = team.place, team.rank.device
    mine = parts[me].detach().to(device).requires_grad_()
    got = run(mine)
    account.compare(what, got, results[me].detach().contiguous())
    (weights[me].to(device) * got).sum().backward()
    gradient, right = mine.grad, parts[me].grad
    assert gradient is not None and right is not None
    account.compare(f"the gradient of {what}", gradient, right)


def _weights(result: torch.Tensor, place: int) -> torch.Tensor:
    """Return small whole numbers that differ between elements and places, so that a gradient in another order shows."""
    return torch.arange(result.numel()).view(result.shape) % 5 + 1.0 + place


_Case = tuple[str, Callable[[_Parts], list[torch.Tensor]], Callable[[torch.Tensor], torch.Tensor]]


def _differentiable(team: Team, seed: int) -> Iterator[_Case]:
    size, group = team.size, team.group

    def shares(parts: _Parts) -> list[torch.Tensor]:
        total = torch.stack(list(parts)).sum(0)
        return list(total.chunk(size))

    def exchanged(parts: _Parts) -> list[torch.Tensor]:
        return [torch.cat([part.chunk(size)[to] for part in parts]) for to in range(size)]

    yield (
        "differentiable all_reduce",
        lambda parts: [torch.stack(list(parts)).sum(0)] * size,
        lambda mine: differentiable.all_reduce(mine.clone(), dist.ReduceOp.SUM, group),
    )
    yield (
        "differentiable all_gather",
        lambda parts: [torch.cat(list(parts))] * size,
        lambda mine: torch.cat(differentiable.all_gather(mine, group)),
    )
    for root in team.roots(seed):
        yield from _rooted(root, team)
    yield (
        "differentiable reduce_scatter",
        shares,
        lambda mine: differentiable.reduce_scatter(
            torch.empty_like(mine[: len(mine) // size]), [part.contiguous() for part in mine.chunk(size)], group=group
        ),
    )
    yield (
        "differentiable all_to_all_single",
        exchanged,
        lambda mine: differentiable.all_to_all_single(
            torch.empty_like(mine), mine.clone(), [ROWS] * size, [ROWS] * size, group=group
        ),
    )
    yield (
        "differentiable all_to_all",
        exchanged,
        lambda mine: torch.cat(
            differentiable.all_to_all(
                [torch.empty_like(part) for part in mine.chunk(size)], list(mine.chunk(size)), group
            )
        ),
    )
    yield (
        "all_gather_tensor_autograd",
        lambda parts: [torch.cat(list(parts), 1)] * size,
        lambda mine: functional.all_gather_tensor_autograd(mine, 1, group),
    )
    yield (
        "reduce_scatter_tensor_autograd",
        shares,
        lambda mine: functional.reduce_scatter_tensor_autograd(mine, "sum", 0, group),
    )
    yield from _largest(team)
    rows = [ROWS] * size
    yield (
        "all_to_all_single_autograd",
        exchanged,
        lambda mine: functional.all_to_all_single_autograd(mine, rows, rows, group),
    )


def _largest(team: Team) -> Iterator[_Case]:
    """Yield the collectives that reduce by MAX. Their gradients are undocumented, so only the results count."""
    op, group = dist.ReduceOp.MAX, team.group

    def whole(parts: _Parts) -> torch.Tensor:
        return torch.stack([part.detach() for part in parts]).amax(0)

    yield (
        "differentiable all_reduce MAX",
        lambda parts: [whole(parts) + 0 * part for part in parts],
        lambda mine: differentiable.all_reduce(mine.detach().clone(), op, group) + 0 * mine,
    )
    yield (
        "differentiable reduce_scatter MAX",
        lambda parts: [
            chunk + 0 * part[: len(chunk)] for part, chunk in zip(parts, whole(parts).chunk(team.size), strict=True)
        ],
        lambda mine: (
            differentiable.reduce_scatter(
                torch.empty_like(mine[: len(mine) // team.size]),
                [part.contiguous() for part in mine.detach().chunk(team.size)],
                op,
                group,
            )
            + 0 * mine[: len(mine) // team.size]
        ),
    )


def _rooted(root: int, team: Team) -> Iterator[_Case]:
    """Yield the collectives with a root. Results on other ranks are undocumented, so these are multiplied by 0."""
    size, group = team.size, team.group
    here = int(team.place == root)

    def at_root(whole: Callable[[_Parts], torch.Tensor]) -> Callable[[_Parts], list[torch.Tensor]]:
        return lambda parts: [whole(parts) * (other == root) for other in range(size)]

    yield (
        f"differentiable broadcast from {root}",
        lambda parts: [parts[root] + 0 * part for part in parts],
        lambda mine: differentiable.broadcast(mine.clone(), root, group),
    )
    yield (
        f"differentiable reduce to {root}",
        at_root(lambda parts: torch.stack(list(parts)).sum(0)),
        lambda mine: differentiable.reduce(mine, root, dist.ReduceOp.SUM, group) * here,
    )
    yield (
        f"differentiable reduce MAX to {root}, without a gradient",
        at_root(lambda parts: torch.stack([part.detach() for part in parts]).amax(0) + 0 * sum(parts)),
        lambda mine: differentiable.reduce(mine.detach(), root, dist.ReduceOp.MAX, group) * here + 0 * mine,
    )
    yield (
        f"differentiable gather to {root}",
        at_root(lambda parts: torch.cat(list(parts))),
        lambda mine: torch.cat(differentiable.gather(mine, root, group)) * here,
    )
    yield (
        f"differentiable scatter from {root}",
        lambda parts: [
            chunk + 0 * part[: len(chunk)] for part, chunk in zip(parts, parts[root].chunk(size), strict=True)
        ],
        lambda mine: differentiable.scatter(list(mine.chunk(size)), root, group),
    )
