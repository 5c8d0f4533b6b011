"""Repeat collectives on data made on the devices, and compare each result: bit for bit, or by a statistic of rounding.

Exact data differ for each rank and element. Terms are integers times a power of two, which all ranks share in an
element. The terms of a sum are so small that each partial sum is exact, and each rank has its own band of values in an
element. In a product one rank has many bits, and the others hold ±1 or ±2.

A statistic finds rounding of sums that leans to one side. In each element one rank holds an integer M with all the bits
of the dtype, and each other rank holds a fraction k / 2^j, with k uniform in 1 .. 2^j - 1. The ranks take turns with M.
The bits are so few that fractions sum exactly. In any order of summation, each rounding is of an integer plus a sum of
such fractions.

As k and 2^j - k are equally likely, rounding to nearest errs up and down alike. So the mean error over elements, in
units in the last place, is 0. Each error is at most (n - 1) / 2 for n ranks. By Hoeffding's inequality the mean of N
elements is beyond ±t with probability at most 2 exp(-2 N t² / (n - 1)²) (W. Hoeffding, *Probability inequalities for
sums of bounded random variables*, JASA 58, 1963, Theorem 2). Truncation errs by -1/2 per rounding, and each element has
at least one rounding. The limit t = 1/4 is midway, and N is chosen so that a wrong verdict of either kind has a
probability below 1e-9.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.reduction import significand_bits, unit_roundoff
from mgpu_check.oracles.collectives.cases import WrongResult, form_of, raise_findings
from mgpu_check.oracles.generated_data import CHUNK, HOST, WrongBytes, bytes_of_content, compare, tag_of
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, TRANSFERS, Transfer, is_list
from mgpu_check.torch_hooks.tensors import as_bits, name_of

Tensors = Sequence[torch.Tensor]


def collective_named(name: str, *, older: bool = False) -> Callable[..., Any]:
    """Return a collective under the name that this version of torch does not deprecate, or under the older name."""
    return (not older and getattr(dist, COLLECTIVES[name].newer, None)) or getattr(dist, name)


def coalescing(group: Any, device: torch.device, *, asynchronous: bool) -> Any:
    """Return the context that puts collectives of a device together; it is waited for if it is asynchronous."""
    # A private name: torch has no public one (torch/distributed/distributed_c10d.py, torch 2.13).
    return dist.distributed_c10d._coalescing_manager(group, device, async_ops=asynchronous)


def called(
    name: str, inputs: Tensors, outputs: Tensors, *splits: list[int] | None, older: bool = False, **options: Any
) -> Any:
    """Call a collective of `torch.distributed`.

    Args:
        inputs: the tensors that this rank gives; none if only the root gives any.
        outputs: the tensors for the result of this rank; none if only the root gets one. For a collective in place they
            are the same tensors.
        splits: the sizes of parts, for `all_to_all_single`.
        older: whether to use the older name of a function that torch has renamed.
        options: the root, the operation of a reduction, and all that every collective has.
    """
    row = COLLECTIVES[name]
    operands = {row.given: inputs, row.taken: outputs}
    tensors = [
        (list(operands[parameter]) or None) if is_list(parameter) else operands[parameter][0]
        for parameter in _order(name)
    ]
    return collective_named(name, older=older)(*tensors, *splits, **options)


@functools.cache
def _order(name: str) -> list[str]:
    """Return the parameters for tensors in the order of the function: most programs give them by position."""
    parameters = inspect.signature(getattr(dist, name)).parameters
    return [parameter for parameter in parameters if parameter in COLLECTIVES[name].tensors]


def parts_of(parameter: str, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return a tensor as a parameter of a collective takes it: whole, or as a part for each of `count` ranks."""
    return list(tensor.chunk(count)) if is_list(parameter) else [tensor]


@dataclass(frozen=True)
class Runner:
    """A collective that is ready to be called; `output` has its result, or None on ranks that get no result."""

    call: Callable[[], object]
    output: torch.Tensor | None


def runner(
    transfer: str,
    reduction: str,
    contribution: torch.Tensor,
    group: dist.ProcessGroup | None,
    count: int,
    root: int,
) -> Runner:
    """Prepare a collective, a name in `TRANSFERS`, with new memory for its result.

    `contribution` has as many elements as the largest tensor of this rank. `group` is None for all ranks, and `root` a
    rank of the world.
    """
    name, how, me = form_of(transfer), TRANSFERS[transfer], dist.get_rank()
    row, chunk_length = COLLECTIVES[name], contribution.numel() // count
    options: dict[str, Any] = {"group": group}
    if how.root:
        options[how.root] = root
    if how.reduces:
        options["op"] = dist.ReduceOp.AVG if reduction == "avg" else getattr(dist.ReduceOp, reduction.upper())
    if row.in_place:
        buffer = contribution.clone()
        return Runner(lambda: called(name, [buffer], [buffer], **options), buffer if how.takes(me, root) else None)
    source = contribution if how.divides else contribution[:chunk_length]
    inputs = parts_of(row.given, source, count) if how.gives(me, root) else []
    result = contribution.new_empty(len(contribution) if how.joins else chunk_length) if how.takes(me, root) else None
    outputs = [] if result is None else parts_of(row.taken, result, count)
    return Runner(lambda: called(name, inputs, outputs, **options), result)


_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))
_MOST_BITS = 50  # of a hash, which float64 has too
_POWERS = range(-4, 4)

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": operator.add,
    "avg": operator.add,
    "product": operator.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@dataclass(frozen=True)
class Terms:
    reduction: str  # "sum", "avg", "product", "min" or "max"
    dtype: torch.dtype
    count: int  # of ranks
    seed: int

    @property
    def tolerance(self) -> float:
        """The largest error of a right result, relative to its terms' largest magnitude; 0 if every order is exact.
        For a mean, libraries multiply each term by 1 / count, which rounds unless count is a power of two."""
        if self.reduction != "avg" or self.count & (self.count - 1) == 0:
            return 0.0
        return 2 * (self.count + 1) * unit_roundoff(self.dtype)

    def of_rank(self, rank: int, index: torch.Tensor) -> torch.Tensor:
        """Return the terms of one rank at the elements `index` (int64), in the dtype of the reduction."""
        return self._scaled(self._term(rank, *self._drawn(index)), index)

    def result(self, index: torch.Tensor) -> torch.Tensor:
        """Return the exact result at the elements `index`; a mean is rounded once."""
        drawn = self._drawn(index)
        total = functools.reduce(_COMBINE[self.reduction], (self._term(rank, *drawn) for rank in range(self.count)))
        if self.reduction == "avg":
            return (self._scaled(total, index, torch.float64) / self.count).to(self.dtype)
        return self._scaled(total, index)

    def _drawn(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a pseudorandom number for each element, equal on all ranks, and the element's index modulo `count`."""
        drawn = index * _MIX[0] + (self.seed * 2 + 1) * 0x632BE59B
        drawn.bitwise_xor_((drawn >> 29).bitwise_and_((1 << 35) - 1)).mul_(_MIX[1])
        return (drawn >> 13).bitwise_and_((1 << _MOST_BITS) - 1), index % self.count

    def _term(self, rank: int, drawn: torch.Tensor, holder: torch.Tensor) -> torch.Tensor:
        bits = min(significand_bits(self.dtype), _MOST_BITS)
        signed = self.dtype.is_floating_point or self.dtype.is_signed
        if self.reduction == "product":
            many = drawn % (2**bits - 1) + 1
            few = 2 if rank in (1, 2) else 1
            term = torch.where(holder == rank, many, few)
        else:
            most = (2**bits - 1) // self.count
            band = most // self.count
            position = (holder + rank) % self.count
            term = position * band + 1 + drawn % band if band else position % max(1, most) + 1
        if not signed:
            return term
        return torch.where((drawn >> rank % 16 + 3).bitwise_and_(1) == 1, -term, term)

    def _scaled(self, term: torch.Tensor, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.dtype
        if not dtype.is_floating_point or self.reduction == "product":
            return term.to(dtype)
        # From a table: exp2 on a device may be off by a unit in the last place.
        powers = torch.tensor([2.0**power for power in _POWERS], dtype=torch.float64, device=index.device)
        return (term.double() * powers[(index >> 3).bitwise_and_(len(_POWERS) - 1)]).to(dtype)

    def who(self, index: torch.Tensor, got: torch.Tensor) -> tuple[str, int] | None:
        """Infer from wrong elements which rank's term is missing, doubled, or alone; None if none of these fits.
        `index` has the indices of some wrong elements; it is on the CPU, as is `got`."""
        if self.reduction not in ("sum", "avg"):
            return self._alone(index, got)
        times = self.count if self.reduction == "avg" else 1
        total = functools.reduce(operator.add, (self.of_rank(rank, index).double() for rank in range(self.count)))
        observed = got.double() * times
        for rank in range(self.count):
            term = self.of_rank(rank, index).double()
            if torch.equal(observed, total - term):
                return "lacks the term of", rank
            if torch.equal(observed, total + term):
                return "has twice the term of", rank
        return self._alone(index, got)

    def _alone(self, index: torch.Tensor, got: torch.Tensor) -> tuple[str, int] | None:
        for rank in range(self.count):
            if torch.equal(as_bits(self.of_rank(rank, index)), as_bits(got)):
                return "is only the term of", rank
        return None

    def filled(
        self, make: Callable[[torch.Tensor], torch.Tensor], length: int, device: torch.device, chunk: int
    ) -> torch.Tensor:
        """Return `make` applied to the indices below `length`, `chunk` of them at a time."""
        terms = torch.empty(length, dtype=self.dtype, device=device)
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            terms[start:end] = make(torch.arange(start, end, device=device))
        return terms


_WINDOW = 64
"""Range of the shift between iterations, in elements, so that stale data of the previous iteration is wrong."""
_BURST = 4
_MOST_WRONG = 3
_LOOKED_AT = 64
_MANY = 4  # fewest elements with one inverted bit that are no coincidence


@dataclass(frozen=True)
class RepeatedCollective:
    """A collective that is called repeatedly, with different data each time."""

    # a name in `TRANSFERS`, or "send_recv": each rank sends to one rank and receives from another; the distance grows
    # with each iteration
    operation: str
    dtype: str  # the name of the dtype
    bytes: int  # the size of the larger of a rank's input and output; rounded down if it must have equal parts
    members: tuple[int, ...] = ()  # the ranks of the group, ascending; empty for all ranks
    reduction: str = "sum"  # "sum", "avg", "product", "min" or "max"; used by operations that reduce
    root: int = 0  # the position of the root in the group
    iterations: int = 1
    burst: int = _BURST  # the number of iterations to queue before their results are compared
    seed: int = 0

    def __str__(self) -> str:
        how = f" {self.reduction}" if self.transfer is not None and self.transfer.reduces else ""
        root = f", root {self.root}" if self.transfer is not None and self.transfer.root else ""
        data = f"{self.dtype}, {self.bytes} bytes{root}"
        return f"{self.operation}{how}, {data}, {self.iterations} times, seed {self.seed}"

    @property
    def transfer(self) -> Transfer | None:
        """The row of the operation; None for "send_recv"."""
        return TRANSFERS.get(self.operation)

    def elements(self, count: int) -> int:
        """Return the number of elements of the larger tensor in a group of `count` ranks: at least one per rank."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        total = self.bytes // dtype.itemsize
        # Keep the exact size if nothing has parts: a library may fail at one exact size only.
        divided = self.transfer is not None and (self.transfer.divides or self.transfer.joins)
        return max(count, total // count * count if divided else total)


@dataclass(frozen=True)
class Cases:
    """Collectives to call one after the other. A world leaves out the cases whose members it lacks."""

    all: tuple[RepeatedCollective, ...]

    def __str__(self) -> str:
        rest = f", and {len(self.all) - 1} more" if self.all[1:] else ""
        return f"{self.all[0]}{rest}" if self.all else "nothing"


@dataclass(frozen=True)
class WrongIteration:
    iteration: int
    count: int  # the number of wrong elements, or bytes of a copy
    of: int  # the number of all elements, or bytes of a copy
    first: int  # the place of the first wrong element, or byte of a copy
    looks: str  # a description of the wrong data
    sources: tuple[int, ...] = ()  # the ranks of the world whose data is wrong or missing, as far as the result shows
    got: str = ""
    expected: str = ""


@dataclass(frozen=True)
class View:
    case: int  # the number of the case in the call
    rank: int
    members: tuple[int, ...]
    bytes: int
    checked: int  # the number of iterations with a result on this rank; some operations give a result to the root only
    failed: int = 0  # the number of iterations with a wrong result on this rank
    wrong: tuple[WrongIteration, ...] = ()  # the first of the wrong results


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
    """The result of an iteration, to be compared later."""

    iteration: int
    start: int  # the first element of the data in this iteration
    tensor: torch.Tensor | None
    # for a copy, the position in the group of each source, and the first element of its data
    pieces: list[tuple[int, int]] = field(default_factory=list)


class _Examination:
    """The calls of one case on this rank. `views_of` makes it when the group exists, and runs it once."""

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
        self.count, self.position = len(members), members.index(rank.index)
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.elements = case.elements(self.count)
        self.length = self.elements + _WINDOW
        self.terms = Terms(case.reduction, self.dtype, self.count, case.seed)
        self.reduces = case.transfer is not None and case.transfer.reduces
        chunk = max(CHUNK // 4, torch.cuda.mem_get_info(self.device)[0] // 512)
        if self.reduces:
            own = functools.partial(self.terms.of_rank, self.position)
            self.own, self.right = (
                self.terms.filled(make, self.length, self.device, chunk) for make in (own, self.terms.result)
            )
        else:
            self.own = self.content(self.position, 0, self.length)
        self.wrong: list[WrongIteration] = []
        self.checked = self.failed = 0

    def content(self, position: int, start: int, end: int) -> torch.Tensor:
        """Return the elements `start` to `end` of a member's data for a copy."""
        tag = tag_of(self.members[position], HOST, self.case.seed)
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
        size, wrong = self.elements * self.dtype.itemsize, tuple(self.wrong[:_MOST_WRONG])
        return View(self.number, self.rank.index, self.members, size, self.checked, self.failed, wrong)

    def once(self, iteration: int, start: int) -> _IterationResult:
        case, chunk_length = self.case, self.elements // self.count
        root = case.root % self.count
        window = self.own[start : start + self.elements]
        result = _IterationResult(iteration, start, None)
        if case.operation == "send_recv":
            step = iteration % max(1, self.count - 1) + 1
            sender = (self.position - step) % self.count
            result.tensor, result.pieces = torch.empty_like(window), [(sender, start)]
            self.exchange(window, result.tensor, (self.position + step) % self.count, sender)
            return result
        collective = runner(case.operation, case.reduction, window, self.group, self.count, self.members[root])
        collective.call()
        result.tensor = collective.output
        assert case.transfer is not None
        offset = start + self.position * chunk_length if case.transfer.divides else start
        if self.reduces:
            result.start = offset
        else:
            result.pieces = [(source, offset) for source in case.transfer.sources(self.position, self.count, root)]
        return result

    def exchange(self, sent: torch.Tensor, received: torch.Tensor, to: int, sender: int) -> None:
        if self.count == 1:
            received.copy_(sent)
            return
        both = [
            dist.P2POp(dist.isend, sent, self.members[to], self.group),
            dist.P2POp(dist.irecv, received, self.members[sender], self.group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def look(self, result: _IterationResult) -> None:
        """Compare a result on the device, and examine it closer only if it is wrong."""
        if result.tensor is None:
            return
        self.checked += 1
        failure = (self.reduced if self.reduces else self.copied)(result, result.tensor)
        if failure is not None:
            self.failed += 1
            self.wrong.append(failure)

    def reduced(self, result: _IterationResult, got: torch.Tensor) -> WrongIteration | None:
        start = result.start
        expected = self.right[start : start + got.numel()]
        if torch.equal(as_bits(got), as_bits(expected)):
            return None
        mismatches = as_bits(got) != as_bits(expected)
        if self.terms.tolerance:
            index = torch.arange(start, start + got.numel(), device=self.device)
            magnitudes = [self.terms.of_rank(rank, index).double().abs() for rank in range(self.count)]
            off = (got.double() - expected.double()).abs()
            mismatches = ~(off <= self.terms.tolerance * torch.stack(magnitudes).amax(0))
        if not bool(mismatches.any()):
            return None
        places = mismatches.nonzero().flatten()[:_LOOKED_AT]
        index, samples, should = (places + start).cpu(), got[places].cpu(), expected[places].cpu()
        looks, sources = self.describe(index, samples, should, result.iteration)
        shown = [", ".join(map(str, values[:4].tolist())) for values in (samples, should)]
        count, at = int(mismatches.sum()), int(places[0])
        return WrongIteration(result.iteration, count, got.numel(), at, looks, sources, *shown)

    def describe(
        self, index: torch.Tensor, got: torch.Tensor, expected: torch.Tensor, iteration: int
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
        flips = set((as_bits(got) ^ as_bits(expected)).tolist())
        flip = flips.pop()
        # One bit of a few elements is inverted by chance, too, as that of 257 and 256.
        if not flips and len(index) >= _MANY and (flip % 2 ** (8 * got.element_size())).bit_count() == 1:
            return "a bit is inverted", ()
        return "it holds other values", ()

    def copied(self, result: _IterationResult, got: torch.Tensor) -> WrongIteration | None:
        chunk_length = got.numel() // len(result.pieces)
        failures: list[tuple[int, WrongBytes]] = []
        descriptions = {tag_of(member, HOST, self.case.seed): f"the data of rank {member}" for member in self.members}
        for number, (position, start) in enumerate(result.pieces):
            piece = got[number * chunk_length : (number + 1) * chunk_length].view(torch.uint8)
            should = self.content(position, start, start + chunk_length).view(torch.uint8)
            if (off := compare(piece, should, descriptions)) is not None:
                failures.append((self.members[position], off))
        if not failures:
            return None
        head, sources = failures[0][1], tuple(source for source, _ in failures)
        count, values = sum(off.count for _, off in failures), (head.evidence["got"], head.evidence["expected"])
        return WrongIteration(result.iteration, count, got.nbytes, head.first, head.looks, sources, *values)


LIMIT = 0.25
"""Limit of the mean error, in units in the last place: midway between rounding to nearest (0) and truncation (1/2)."""
_PROBABILITY = 1e-9


def elements_for(count: int) -> int:
    """Return how many sums of `count` terms make a wrong verdict less likely than 1e-9."""
    return math.ceil(math.log(2 / _PROBABILITY) * max(1, count - 1) ** 2 / (2 * LIMIT**2))


def most_ranks(dtype: torch.dtype) -> int:
    """Return the largest number of ranks whose sum leaves a bit of a dtype for fractions."""
    return int(2 ** (significand_bits(dtype) - 2) - 1)


def terms_of(count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Return the terms of each of `count` ranks.

    Raises:
        ValueError: the dtype has too few bits for `count` ranks.
    """
    bits = significand_bits(dtype)
    fraction_bits = min(8, bits - 1 - count.bit_length())
    if count > most_ranks(dtype):
        raise ValueError(f"terms_of: count={count} fractions do not add up exactly in {dtype}; use fewer ranks")
    elements = elements_for(count)
    generator = torch.Generator().manual_seed(seed)
    low, high = 2 ** (bits - 1), 2**bits - count
    large = torch.randint(low, high, (elements,), generator=generator, dtype=torch.int64).double()
    sign = 1.0 - 2.0 * torch.randint(0, 2, (elements,), generator=generator)
    holder = torch.arange(elements) % count
    terms = []
    for rank in range(count):
        fraction = torch.randint(1, 2**fraction_bits, (elements,), generator=generator).double() / 2**fraction_bits
        terms.append((sign * torch.where(holder == rank, large, fraction)).to(dtype))
    return terms


def mean_error(got: torch.Tensor, terms: Sequence[torch.Tensor]) -> float:
    """Return the mean error of results in units in the last place; errors away from zero are positive. All values are
    below 2^bits + count, so float64 holds the difference exactly, if the large term is subtracted first."""
    holder = torch.stack([term.double().abs() for term in terms]).argmax(0)
    stacked = torch.stack([term.double() for term in terms])
    large = stacked.gather(0, holder[None])[0]
    fractions = stacked.scatter(0, holder[None], 0.0).sum(0)
    error = ((got.double() - large) - fractions) * torch.sign(large)
    return float(error.mean())


def assert_rounding_is_unbiased(rank: Rank, transfer: str, dtype: torch.dtype, placement: str, seed: int) -> None:
    """Assert that the rounding of a collective's sums leans neither towards zero nor away from it. `transfer` is a name
    in `TRANSFERS` that reduces; the root is the last rank."""
    terms = terms_of(rank.size, dtype, seed)
    mine = terms[rank.index].to(rank.device if placement == "device" else "cpu", copy=True)
    contribution = mine.repeat(rank.size) if TRANSFERS[transfer].divides else mine
    collective = runner(transfer, "sum", contribution, None, rank.size, rank.size - 1)
    collective.call()
    if collective.output is None:
        return
    mean = mean_error(collective.output.cpu(), terms)
    if not abs(mean) <= LIMIT:
        side = "towards zero" if mean < 0 else "away from zero"
        label = f"{form_of(transfer)} SUM, {name_of(dtype)}, {placement} tensors, seed {seed}"
        error = f"the mean error of {mine.numel()} sums is {mean:.3f} units in the last place, expected 0 ± {LIMIT}"
        raise_findings([WrongResult(label, f"rounding leans {side}: {error}")], 1, rank)
