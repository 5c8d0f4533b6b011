"""Run collectives on exact data and compare every iteration on every rank bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.collectives.data import Terms
from mgpu_check.suite.collectives.runner import runner
from mgpu_check.suite.common.contents import CHUNK, HOST, bytes_of_content, compare, tag_of
from mgpu_check.torch_hooks.table import TRANSFERS, Transfer
from mgpu_check.torch_hooks.tensors import as_bits

_WINDOW = 64
"""Range of the shift between iterations, in elements, so that stale data of the previous iteration is wrong."""
_BURST = 4
_MOST_WRONG = 3
_LOOKED_AT = 64
_MANY = 4
"""Fewest elements with one inverted bit that are no coincidence."""


@dataclass(frozen=True)
class RepeatedCollective:
    """A collective that is called repeatedly, with different data each time.

    Attributes:
        operation: a name in `TRANSFERS`, or "send_recv": each rank sends to one rank and receives from another; the
            distance grows with each iteration.
        dtype: the name of the dtype.
        bytes: the size of the larger of a rank's input and output; rounded down if it must have equal parts.
        members: the ranks of the group, ascending; empty for all ranks.
        reduction: "sum", "avg", "product", "min" or "max"; used by operations that reduce.
        root: the position of the root in the group.
        burst: the number of iterations to queue before their results are compared.
    """

    operation: str
    dtype: str
    bytes: int
    members: tuple[int, ...] = ()
    reduction: str = "sum"
    root: int = 0
    iterations: int = 1
    burst: int = _BURST
    seed: int = 0

    def __str__(self) -> str:
        how = f" {self.reduction}" if self.transfer is not None and self.transfer.reduces else ""
        root = f", root {self.root}" if self.transfer is not None and self.transfer.root else ""
        return (
            f"{self.operation}{how}, {self.dtype}, {self.bytes} bytes{root}, {self.iterations} times, seed {self.seed}"
        )

    @property
    def transfer(self) -> Transfer | None:
        """The row of the operation; None for "send_recv"."""
        return TRANSFERS.get(self.operation)

    def elements(self, count: int) -> int:
        """Return the number of elements of the larger tensor in a group of `count` ranks: at least one per rank."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        whole = self.bytes // dtype.itemsize
        # Keep the exact size if nothing has parts: a library may fail at one exact size only.
        parts = self.transfer is not None and (self.transfer.divides or self.transfer.joins)
        return max(count, whole // count * count if parts else whole)


@dataclass(frozen=True)
class Cases:
    """Collectives to call one after the other. A world leaves out the cases whose members it lacks."""

    all: tuple[RepeatedCollective, ...]

    def __str__(self) -> str:
        more = f", and {len(self.all) - 1} more" if self.all[1:] else ""
        return f"{self.all[0]}{more}" if self.all else "nothing"


@dataclass(frozen=True)
class WrongIteration:
    """A wrong result of one iteration on one rank.

    Attributes:
        count: the number of wrong elements, or bytes of a copy.
        of: the number of all elements, or bytes of a copy.
        first: the place of the first wrong element, or byte of a copy.
        looks: a description of the wrong data.
        sources: the ranks of the world whose data is wrong or missing, as far as the result shows.
    """

    iteration: int
    count: int
    of: int
    first: int
    looks: str
    sources: tuple[int, ...] = ()
    got: str = ""
    expected: str = ""


@dataclass(frozen=True)
class View:
    """The results of a collective on one rank.

    Attributes:
        case: the number of the case in the call.
        checked: the number of iterations with a result on this rank; some operations give a result to the root only.
        failed: the number of iterations with a wrong result on this rank.
        wrong: the first of the wrong results.
    """

    case: int
    rank: int
    members: tuple[int, ...]
    bytes: int
    checked: int
    failed: int = 0
    wrong: tuple[WrongIteration, ...] = ()


def views_of(rank: Rank, cases: Sequence[RepeatedCollective]) -> list[View]:
    """Run the cases whose group contains this rank, and return its results."""
    everybody = tuple(range(rank.size))
    fitting = {number: case for number, case in enumerate(cases) if set(case.members) <= set(everybody)}
    views = []
    with groups_of(rank, (case.members for case in fitting.values())) as groups:
        for number, case in fitting.items():
            members = case.members or everybody
            if rank.index in members:
                views.append(_Examination(rank, number, case, members, groups[case.members]).run())
    return views


@contextlib.contextmanager
def groups_of(
    rank: Rank, wanted: Iterable[tuple[int, ...]], *, backend: str | None = None
) -> Iterator[dict[tuple[int, ...], dist.ProcessGroup | None]]:
    """Make groups by their members, in the same order on all ranks, and destroy them at the end of the context.

    A group of all ranks, also written as no members, is None if it needs no `backend`. After an error the groups stay,
    because other ranks may still use them.
    """
    everybody = tuple(range(rank.size))
    groups = {
        members: None
        if members in ((), everybody) and backend is None
        else dist.new_group(list(members) or None, backend=backend)
        for members in sorted(set(wanted))
    }
    yield groups
    for members, group in groups.items():
        if group is not None and rank.index in (members or everybody):
            dist.destroy_process_group(group)


@dataclass
class _IterationResult:
    """The result of an iteration, to be compared later.

    Attributes:
        start: the first element of the data in this iteration.
        pieces: for a copy, the position in the group of each source, and the first element of its data.
    """

    iteration: int
    start: int
    tensor: torch.Tensor | None
    pieces: list[tuple[int, int]] = field(default_factory=list)


class _Examination:
    def __init__(
        self,
        rank: Rank,
        number: int,
        case: RepeatedCollective,
        members: tuple[int, ...],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.case, self.number, self.members, self.group = case, number, members, group
        self.rank, self.device = rank, rank.device
        self.count, self.place = len(members), members.index(rank.index)
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.elements = case.elements(self.count)
        self.length = self.elements + _WINDOW
        self.terms = Terms(case.reduction, self.dtype, self.count, case.seed)
        self.reduces = case.transfer is not None and case.transfer.reduces
        chunk = max(CHUNK // 4, torch.cuda.mem_get_info(self.device)[0] // 512)
        if self.reduces:
            self.own = self.terms.filled(
                lambda index: self.terms.of_rank(self.place, index), self.length, self.device, chunk
            )
            self.right = self.terms.filled(self.terms.result, self.length, self.device, chunk)
        else:
            self.own = self.content(self.place, 0, self.length)
        self.wrong: list[WrongIteration] = []
        self.checked = self.failed = 0

    def content(self, place: int, start: int, end: int) -> torch.Tensor:
        """Return the elements `start` to `end` of a member's data for a copy."""
        tag = tag_of(self.members[place], HOST, self.case.seed)
        width = self.dtype.itemsize
        return bytes_of_content(tag, start * width, end * width, self.device).clone().view(self.dtype)

    def run(self) -> View:
        pending: list[_IterationResult] = []
        for iteration in range(self.case.iterations):
            pending.append(self.once(iteration, iteration * 13 % _WINDOW))
            if len(pending) >= self.case.burst or iteration == self.case.iterations - 1:
                for result in pending:
                    self.look(result)
                pending.clear()
        size = self.elements * self.dtype.itemsize
        return View(
            self.number, self.rank.index, self.members, size, self.checked, self.failed, tuple(self.wrong[:_MOST_WRONG])
        )

    def once(self, iteration: int, start: int) -> _IterationResult:
        """Call the collective once."""
        case, part = self.case, self.elements // self.count
        root = case.root % self.count
        window = self.own[start : start + self.elements]
        result = _IterationResult(iteration, start, None)
        if case.operation == "send_recv":
            step = iteration % max(1, self.count - 1) + 1
            sender = (self.place - step) % self.count
            result.tensor, result.pieces = torch.empty_like(window), [(sender, start)]
            self.exchange(window, result.tensor, (self.place + step) % self.count, sender)
            return result
        made = runner(case.operation, case.reduction, window, self.group, self.count, self.place, self.members[root])
        made.call()
        result.tensor = made.output
        assert case.transfer is not None
        first = start + self.place * part if case.transfer.divides else start
        if self.reduces:
            result.start = first
        else:
            result.pieces = [(source, first) for source in case.transfer.sources(self.place, self.count, root)]
        return result

    def exchange(self, given: torch.Tensor, taken: torch.Tensor, to: int, sender: int) -> None:
        if self.count == 1:
            taken.copy_(given)
            return
        both = [
            dist.P2POp(dist.isend, given, self.members[to], self.group),
            dist.P2POp(dist.irecv, taken, self.members[sender], self.group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def look(self, result: _IterationResult) -> None:
        """Compare a result on the device, and examine it closer only if it is wrong."""
        if result.tensor is None:
            return
        self.checked += 1
        found = self.reduced(result) if self.reduces else self.copied(result)
        if found is not None:
            self.failed += 1
            self.wrong.append(found)

    def reduced(self, result: _IterationResult) -> WrongIteration | None:
        assert result.tensor is not None
        got, start = result.tensor, result.start
        right = self.right[start : start + got.numel()]
        if torch.equal(as_bits(got), as_bits(right)):
            return None
        wrong = as_bits(got) != as_bits(right)
        if self.terms.tolerance:
            off = (got.double() - right.double()).abs()
            allowed = self.terms.tolerance * self.magnitude(start, start + got.numel())
            wrong = ~(off <= allowed)
        if not bool(wrong.any()):
            return None
        places = wrong.nonzero().flatten()[:_LOOKED_AT].cpu()
        index, some = places + start, got[places.to(self.device)].cpu()
        should = right[places.to(self.device)].cpu()
        looks, sources = self.describe(index, some, should, result.iteration)
        shown = [", ".join(map(str, values[:4].tolist())) for values in (some, should)]
        return WrongIteration(
            result.iteration, int(wrong.sum()), got.numel(), int(places[0]), looks, sources, shown[0], shown[1]
        )

    def magnitude(self, start: int, end: int) -> torch.Tensor:
        index = torch.arange(start, end, device=self.device)
        return torch.stack([self.terms.of_rank(place, index).double().abs() for place in range(self.count)]).amax(0)

    def describe(
        self, index: torch.Tensor, got: torch.Tensor, right: torch.Tensor, iteration: int
    ) -> tuple[str, tuple[int, ...]]:
        if not bool(as_bits(got).any()):
            return "it holds zeros", ()
        if (who := self.terms.who(index, got)) is not None:
            source = self.members[who[1]]
            # A single element may fit by chance, because the terms of ranks differ in few bits.
            return f"it {who[0]} rank {source}", (source,) if len(index) > 1 else ()
        shift = (iteration * 13 % _WINDOW) - ((iteration - 1) * 13 % _WINDOW)
        if iteration and torch.equal(as_bits(self.terms.result((index - shift).clamp_min(0))), as_bits(got)):
            return "it holds the result of the iteration before", ()
        if not bool(got.double().isfinite().all()):
            return "it holds values that are not finite", ()
        flips = set((as_bits(got) ^ as_bits(right)).tolist())
        flip = flips.pop()
        # One bit of a few elements is inverted by chance, too, as that of 257 and 256.
        if not flips and len(index) >= _MANY and (flip % 2 ** (8 * got.element_size())).bit_count() == 1:
            return "a bit is inverted", ()
        return "it holds other values", ()

    def copied(self, result: _IterationResult) -> WrongIteration | None:
        assert result.tensor is not None
        got = result.tensor
        part = got.numel() // len(result.pieces)
        wrong: list[WrongIteration] = []
        for number, (place, start) in enumerate(result.pieces):
            piece = got[number * part : (number + 1) * part].view(torch.uint8)
            should = self.content(place, start, start + part).view(torch.uint8)
            source = self.members[place]
            names = {tag_of(member, HOST, self.case.seed): f"the data of rank {member}" for member in self.members}
            if (off := compare(piece, should, names)) is not None:
                wrong.append(
                    WrongIteration(
                        result.iteration, off.count, piece.numel(), off.first, off.looks, (source,),
                        off.evidence["got"], off.evidence["expected"],
                    )
                )  # fmt: skip
        if not wrong:
            return None
        first = wrong[0]
        sources = tuple(source for one in wrong for source in one.sources)
        of = got.numel() * got.element_size()
        return WrongIteration(
            first.iteration, sum(one.count for one in wrong), of, first.first, first.looks, sources, first.got,
            first.expected,
        )  # fmt: skip
