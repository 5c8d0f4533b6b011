"""Call collectives with guarded tensors, and compare the memory afterwards with a model on the CPU.

The tensors of a call lie in one piece of memory, with guards before, between and after them. The whole memory is
compared, so the comparison finds writes beyond a tensor, between its elements, and to one that should only be read.

Values are made on the CPU, and so are the right results of reductions. They come in blocks: one tensor per member of
the group. A call repeats its block to the length that it needs.

The subgroups that torch makes must have the right members, in order.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.asserts.findings import Findings, on_any_rank, run_all
from mgpu_check.asserts.known_defects import is_known
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import CollectiveMismatch
from mgpu_check.numerics.reduction import exact_factors, exact_parts, random_parts, reduced, unit_roundoff
from mgpu_check.oracles.collectives.cases import FUNCTIONS, CollectiveCall, WrongResult, left_out, raise_findings
from mgpu_check.oracles.collectives.repeated_calls import (
    assert_rounding_is_unbiased,
    called,
    coalescing,
    groups_of,
    most_ranks,
)
from mgpu_check.torch_hooks.collective_table import TRANSFERS, is_list
from mgpu_check.torch_hooks.tensors import as_bits, as_real, digest_of

_EXACT, _RANDOM, _BITS = 251, 4093, 1021
"""Lengths of blocks: primes, so that different parts begin at different elements of the block."""

_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PREMUL_SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_OF_BOOLEANS = {
    "SUM": torch.bitwise_or,
    "PRODUCT": torch.bitwise_and,
    "MIN": torch.bitwise_and,
    "MAX": torch.bitwise_or,
}
"""Reductions of booleans: in NCCL and gloo true + true is true."""


def differing(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements whose bits differ in two contiguous tensors of the same shape and dtype."""
    mismatches = as_bits(got) != as_bits(expected)
    return mismatches.any(-1) if got.is_complex() else mismatches


def factor_of(seed: int) -> float:
    """Return the factor of a PREMUL_SUM: a power of two, so that nothing rounds."""
    return (0.5, 2.0, 4.0, 0.25)[seed % 4]


@dataclass(frozen=True)
class Right:
    """The results that a reduction may give, element by element."""

    # the only right result, or the rounded exact one if results may be off; in the dtype of the terms
    value: torch.Tensor
    # the exact result in float64 or complex128; None if results must have the bits of `value`. Any NaN equals any other
    # NaN.
    exact: torch.Tensor | None = None
    tolerance: torch.Tensor | None = None  # float64; for complex numbers, of real and imaginary part
    # the terms of MIN and MAX of floats, else empty. In an element with a NaN among its terms, NaN and each term are
    # right, and zeros of both signs are equal. IEEE 754-2008 (minNum) and -2019 (minimum) treat NaN differently, and
    # the result of a library depends on its order of comparisons.
    terms: tuple[torch.Tensor, ...] = ()

    def wrong(self, got: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
        """Return a mask of the wrong elements of a result; `index` has their places in the block."""
        value = self.value[index]
        if self.exact is not None and self.tolerance is not None:
            off = as_real(got).double() - as_real(self.exact[index])
            fine = (off.abs() <= self.tolerance[index]) | (as_bits(got) == as_bits(value))
        else:
            fine = as_bits(got) == as_bits(value)
            if value.dtype.is_floating_point or value.is_complex():
                fine |= as_real(got).isnan() & as_real(value).isnan()
        if value.is_complex():
            return ~fine.all(-1)
        if self.terms:
            terms = torch.stack([term[index] for term in self.terms])
            loose = terms.isnan().any(0) & (got.isnan() | (got == terms).any(0))
            fine |= loose | ((got == 0) & (value == 0))
        return ~fine


@functools.lru_cache(maxsize=256)
def given_blocks(values: str, op: str, dtype: torch.dtype, count: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return a block of values for each of `count` ranks: vectors of equal length, on the CPU."""
    if values == "borders":
        both = [given_blocks(subset, op, dtype, count, seed) for subset in ("exact", "extremes")]
        return tuple(torch.cat(pieces) for pieces in zip(*both, strict=True))
    if values == "bits":
        return tuple(_bits(dtype, seed * 131 + position) for position in range(count))
    if dtype.is_complex:
        real_dtype = torch.float32 if dtype is torch.complex64 else torch.float64
        pair = [given_blocks(values, op, real_dtype, count, 2 * seed + component) for component in (0, 1)]
        return tuple(torch.complex(real, imaginary.roll(1)) for real, imaginary in zip(*pair, strict=True))
    if dtype is torch.bool:
        patterns = torch.arange(_EXACT * count).view(count, -1) * 0x9E3779B9 + seed * 7919
        pieces = [(patterns[position] >> 11) % 3 == position % 3 for position in range(count)]
        # One true, one false, none true and all true tell "or" from "and", and show which rank is missing.
        alone = torch.eye(count, dtype=torch.bool)
        cases = torch.cat([alone, ~alone, torch.zeros_like(alone[:1]), torch.ones_like(alone[:1])])
        return tuple(torch.cat([cases[:, position], piece]) for position, piece in enumerate(pieces))
    if values == "extremes":
        return _crossed(_extremes(dtype, op, count), count, dtype)
    if values == "special":
        return _crossed(_special(dtype, op), count, dtype)
    if values == "random" or op in ("BAND", "BOR", "BXOR"):
        return tuple(random_parts((_RANDOM,), dtype, count=count, seed=seed))
    make = exact_factors if op == "PRODUCT" else exact_parts
    return tuple(make((_EXACT,), dtype, count=count, seed=seed))


@functools.lru_cache(maxsize=256)
def right_block(values: str, op: str, dtype: torch.dtype, count: int, seed: int) -> Right:
    """Return the results that the reduction of `given_blocks` may give.

    Two terms have one correctly rounded sum or product. More terms have the bounds of `mgpu_check.numerics.reduction`
    (Higham, sections 3.1 and 4.2), for real and imaginary parts separately. For a mean, libraries may divide the terms
    or the sum, which costs one more rounding per term.
    """
    blocks = given_blocks(values, op, dtype, count, seed)
    # Complex numbers not by complex arithmetic, where infinity times (2 + 0i) is NaN.
    terms = tuple(as_real(block) * factor_of(seed) for block in blocks) if op == "PREMUL_SUM" else blocks
    if op == "PREMUL_SUM" and dtype.is_complex:
        terms = tuple(map(torch.view_as_complex, terms))
    fold = _OF_BOOLEANS.get(op, _FOLDS[op]) if dtype is torch.bool else _FOLDS[op]
    if dtype.is_complex:
        # Not by complex arithmetic: torch multiplies a term by 1 when it adds, which spoils infinities.
        value = torch.view_as_complex(functools.reduce(fold, map(as_real, terms)))
    else:
        value = functools.reduce(fold, terms)
    if op in ("MIN", "MAX"):
        return Right(value, terms=terms if dtype.is_floating_point else ())
    if op == "AVG" and count > 1:
        # Division does not change zeros, infinities and NaN.
        return Right(value) if values == "special" else _rounded(terms, "avg", dtype)
    if values == "random" and count > 2 and (dtype.is_floating_point or dtype.is_complex):
        return _rounded(terms, "product" if op == "PRODUCT" else "sum", dtype)
    return Right(value)


def _rounded(terms: Sequence[torch.Tensor], operation: str, dtype: torch.dtype) -> Right:
    should = reduced([as_real(term).contiguous() for term in terms], operation)
    exact = torch.view_as_complex(should.value) if dtype.is_complex else should.value
    tolerance = should.tolerance
    if operation == "avg" and len(terms) & (len(terms) - 1):
        # A library that multiplies by 1 / count has rounded this factor too.
        size = torch.stack([as_real(term).double().abs() for term in terms]).sum(0) / len(terms)
        tolerance = tolerance + 2 * unit_roundoff(terms[0].real.dtype if dtype.is_complex else dtype) * size
    return Right(exact.to(dtype), exact, tolerance)


def _bits(dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (_BITS,), generator=generator).bool()
    return torch.randint(0, 256, (_BITS * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


Pair = tuple[float, float]


def _crossed(pairs: Sequence[Pair], count: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return blocks where, for each pair, each rank in turn holds the first number and all others the second."""
    wide = torch.float64 if dtype.is_floating_point else dtype
    cases = list(itertools.product(pairs, range(count)))
    columns = ([single if own == holder else common for (single, common), holder in cases] for own in range(count))
    return tuple(torch.tensor(column, dtype=wide).to(dtype) for column in columns)


def _pairs(ones: Sequence[float], others: Sequence[float] | None = None) -> list[Pair]:
    return list(itertools.product(ones, ones if others is None else others))


def _extremes(dtype: torch.dtype, op: str, count: int) -> list[Pair]:
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        half = 1 << (limits.bits // 2)
        borders = {limits.min, limits.min + 1, 0, 1, 2, half - 1, half, limits.max - 1, limits.max, limits.max // 2 + 1}
        if limits.min < 0:
            borders |= {-1, -half}
        return _pairs(sorted(borders))
    limits_ = torch.finfo(dtype)
    most, least, subnormal = limits_.max, limits_.smallest_normal, limits_.smallest_normal * limits_.eps
    next_to_one = 1 + limits_.eps
    if op in ("MIN", "MAX"):
        positive = (subnormal, least, 1.0, next_to_one, most)
        return _pairs([*(-value for value in reversed(positive)), 0.0, *positive])
    if op == "PRODUCT":
        values = (sign * value for value in (subnormal, least, 1.0, next_to_one, most) for sign in (1, -1))
        return list(itertools.product(values, (1.0, -1.0)))
    # Powers of two have exact multiples, and are small enough that no partial sum overflows. Borders stand alone.
    large = math.ldexp(1.0, math.frexp(most)[1] - 2 - count.bit_length())
    if op == "PREMUL_SUM":
        return [*_pairs((1.0, -1.0)), *((value, 0.0) for value in (1.0, next_to_one, least * 8))]
    powers = [pair for power in (large, 1.0) for pair in _pairs((power, -power))]
    if op == "AVG":
        return powers
    powers += [pair for power in (least, subnormal) for pair in _pairs((power, -power))]
    return [*powers, *((value, 0.0) for value in (most, -most, subnormal, -subnormal, least, next_to_one))]


def _special(dtype: torch.dtype, op: str) -> list[Pair]:
    limits = torch.finfo(dtype)
    nan, inf, tiny = math.nan, math.inf, limits.smallest_normal * limits.eps
    plain = (nan, inf, -inf, -0.0, 0.0)
    ones = (1.0, -1.0)
    if op in ("MIN", "MAX"):
        return _pairs((*plain, *ones, tiny, -tiny, limits.max))
    if op == "PRODUCT":
        return _pairs((*plain, *ones, tiny, limits.max), (*plain, *ones))
    if op in ("AVG", "PREMUL_SUM"):
        return _pairs(plain)
    return [*_pairs((*plain, *ones, tiny, -tiny)), (limits.max, limits.max)]


def stretched(block: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Return `length` elements from an endless repetition of a block, from element `start` on."""
    offset = start % len(block)
    return block.repeat(-(-(offset + length) // len(block)))[offset : offset + length]


_GUARD = 17  # elements between tensors; odd, so that tensors begin at addresses of every alignment
_FILLING = 0xA5
_UNWRITTEN = 0x5B


@dataclass(frozen=True)
class Shape:
    """The layout of a tensor in memory: its sizes, its strides, and its extent in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    extent: int


def shaped(layout: str, length: int) -> Shape:
    """Return `length` elements in a layout, or as a vector if the length does not allow it."""
    if layout == "gaps":
        return Shape((length,), (2,), max(2 * length - 1, 0))
    rows = next((rows for rows in (4, 3, 2) if length % rows == 0), 0)
    if layout in ("matrix", "stacked") and rows:
        return Shape((rows, length // rows), (length // rows, 1), length)
    if layout == "transposed" and rows:
        return Shape((length // rows, rows), (1, length // rows), length)
    if layout == "channels_last" and length % 4 == 0:
        height = length // 4
        return Shape((1, 2, height, 2), (length, 1, 4, 2), length)
    if layout == "scalar" and length == 1:
        return Shape((), (), 1)
    return Shape((length,), (1,), length)


def stacked(count: int, length: int) -> Shape:
    """Return `count` tensors of the layout "stacked", one after the other in one tensor with a dimension more."""
    tensor = shaped("stacked", length)
    return Shape((count, *tensor.sizes), (length, *tensor.strides), count * length)


class CallMemory:
    """The memory of one call: places its tensors, and makes its contents on the CPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._shapes: list[tuple[int, Shape]] = []
        self._end = _GUARD

    def add(self, shape: Shape) -> int:
        """Make room for a tensor; return its number."""
        self._shapes.append((self._end, shape))
        self._end += shape.extent + _GUARD
        return len(self._shapes) - 1

    def lay(self, shapes: Sequence[Shape], *, backwards: bool) -> None:
        """Make room for tensors, numbered in the given order; with `backwards` they lie in memory in reverse order."""
        for shape in reversed(shapes) if backwards else shapes:
            self.add(shape)
        if backwards:
            self._shapes.reverse()

    def filled(self, contents: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the whole memory on the CPU with these values; None for a tensor that the collective writes."""
        memory = torch.full((self._end * self.dtype.itemsize,), _FILLING, dtype=torch.uint8)
        if self.dtype is torch.bool:
            memory.fill_(1)
        for number, content in enumerate(contents):
            view = self.view(memory.view(self.dtype), number)
            if content is not None:
                view.copy_(content.view(view.shape))
            elif self.dtype is not torch.bool:
                unwritten = torch.full((view.numel() * self.dtype.itemsize,), _UNWRITTEN, dtype=torch.uint8)
                view.copy_(unwritten.view(self.dtype).view(view.shape))
        return memory.view(self.dtype)

    def view(self, memory: torch.Tensor, number: int) -> torch.Tensor:
        offset, shape = self._shapes[number]
        return memory.as_strided(shape.sizes, shape.strides, offset)


STEP = 13  # distance between the parts of a tensor, in elements of their block


def _part_length(call: CollectiveCall, giver: int, getter: int) -> int:
    """Return how many elements one member gives another; parts differ in size.
    In a call of 0 elements every third giver gives nothing, and the others give nothing to every third getter."""
    length = call.elements if call.elements is not None else 29
    turn = (giver + call.seed) % 3
    if length == 0 and (turn == 0 or getter % 3 == turn - 1):
        return 0
    return max(0, length - 3) + (giver * 3 + getter * 5 + call.seed) % 7


@dataclass(frozen=True)
class ReducedPiece:
    """The result of a reduction in a tensor: its values, first element in the block, length, and place."""

    expected: Right
    start: int
    length: int
    at: int = 0

    @property
    def value(self) -> torch.Tensor:
        """The right result, or the value around which results may be off."""
        return stretched(self.expected.value, self.start, self.length)


@dataclass
class Piece:
    """A tensor of a call, with its contents before and after, and the result of a reduction in it.
    It is written if `before` is None, and must not change if `after` is; "anything" if its contents are undefined."""

    shape: Shape
    before: torch.Tensor | None = None
    after: torch.Tensor | str | None = None
    reduced: ReducedPiece | None = None


class Laid:
    """The tensors of a call on the member at `position` of a group.
    `inputs` and `outputs` have the positions of inputs and outputs in `pieces`."""

    def __init__(self, call: CollectiveCall, members: tuple[int, ...], position: int) -> None:
        self.call, self.members, self.count, self.position = call, members, len(members), position
        self.root = call.root % self.count
        self.dtype: torch.dtype = getattr(torch, call.dtype)
        self.row = FUNCTIONS[call.function]
        self.transfer, self.reduces = TRANSFERS[self.row.does], self.row.reduces
        self.values = call.values if self.reduces else "bits"
        op = call.op if self.reduces else ""
        self.blocks = given_blocks(self.values, op, self.dtype, self.count, call.seed)
        self.right: Any = right_block(self.values, op, self.dtype, self.count, call.seed) if self.reduces else None
        self.length = len(self.blocks[0]) if call.elements is None else call.elements
        self.layout = "dense" if call.layout in ("in place", "uneven") else call.layout
        self.pieces: list[Piece] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.splits: tuple[list[int], ...] = ()
        self._lay_out()

    def _part(self, member: int, start: int, length: int) -> torch.Tensor:
        return stretched(self.blocks[member], start, length)

    def _add(self, piece: Piece, *roles: list[int]) -> None:
        for role in roles:
            role.append(len(self.pieces))
        self.pieces.append(piece)

    def _lay_out(self) -> None:
        call, row, transfer, position = self.call, self.row, self.transfer, self.position
        gets = [
            self._part(giver, position * STEP if transfer.divides else 0, self._length(giver, position))
            for giver in transfer.sources(position, self.count, self.root)
        ]
        if row.in_place:
            piece = Piece(shaped(self.layout, self.length), self._part(self.position, 0, self.length), "anything")
            if gets and self.reduces:
                self._reduce(piece, 0)
            elif gets:
                piece.after = gets[0]
            self._add(piece, self.inputs)
            return
        takers = range(self.count) if transfer.divides else (0,)
        gives = [self._part(position, taker * STEP, self._length(position, taker)) for taker in takers]
        if call.layout == "in place":
            self._lay_joined(gives, gets)
            return
        if call.layout == "uneven":
            self.splits = () if row.lists else tuple([[len(chunk) for chunk in chunks] for chunks in (gets, gives)])
        if transfer.gives(position, self.root):
            for shape, chunk in self._tensors(row.given, gives, divided=transfer.divides):
                self._add(Piece(shape, chunk), self.inputs)
        if self.reduces:
            length = self._length(position, position)
            start = position * STEP if transfer.divides else 0
            self._add(self._reduce(Piece(shaped(self.layout, length)), start, length), self.outputs)
        else:
            for shape, chunk in self._tensors(row.taken, gets, divided=transfer.joins):
                self._add(Piece(shape, None, chunk), self.outputs)

    def _length(self, giver: int, getter: int) -> int:
        if self.call.layout != "uneven":
            return self.length
        if not self.transfer.divides:
            getter = giver  # all get the same
        elif self.reduces:
            giver = getter  # the parts that are combined are alike
        return _part_length(self.call, giver, getter)

    def _tensors(
        self, parameter: str, chunks: list[torch.Tensor], *, divided: bool
    ) -> list[tuple[Shape, torch.Tensor]]:
        """Return the tensors of a parameter for some parts, with their shapes."""
        if divided and chunks and not is_list(parameter):
            joined = torch.cat(chunks)
            in_rows = self.call.layout == "stacked"
            return [(stacked(len(chunks), len(chunks[0])) if in_rows else shaped("dense", len(joined)), joined)]
        return [(shaped(self.layout, len(chunk)), chunk) for chunk in chunks]

    def _lay_joined(self, gives: list[torch.Tensor], gets: list[torch.Tensor]) -> None:
        """Lay out a collective whose smaller tensor is a part of the larger one."""
        shape = shaped("dense", self.length * self.count)
        if self.reduces:
            reduced = ReducedPiece(self.right, self.position * STEP, self.length, at=self.position * self.length)
            self._add(Piece(shape, torch.cat(gives), "anything", reduced), self.inputs)
        else:
            before = [chunk if giver == self.position else torch.zeros_like(chunk) for giver, chunk in enumerate(gets)]
            self._add(Piece(shape, torch.cat(before), torch.cat(gets)), self.outputs)

    def _reduce(self, piece: Piece, start: int, length: int | None = None) -> Piece:
        piece.reduced = ReducedPiece(self.right, start, self.length if length is None else length)
        piece.after = piece.reduced.value
        return piece


_IN_FLIGHT = 6
_REFUSALS = ("must be contiguous", "non-overlapping and dense", "ensors must be", "must be dense")


def _may_refuse(call: CollectiveCall, words: str) -> bool:
    """Return whether a backend may refuse a call with these words: older gloo refuses lists for all_to_all."""
    if call.layout in ("gaps", "transposed") and any(text in words for text in _REFUSALS):
        return True
    return (call.function, call.place) == ("all_to_all", "cpu") and "does not support alltoall" in words


def assert_collectives_match(rank: Rank, calls: Sequence[CollectiveCall]) -> list[tuple[str, str]]:
    """Assert that each call gives the results of its model on this rank, and changes nothing else.

    Calls that no backend supports are left out. Up to six asynchronous calls run at once; they are waited for in an
    order that a checksum of each call determines. The error, with all wrong calls, is raised after the last call, so
    that ranks stay in step. Return (call, checksum) of each result that all members of the group must share, for
    `assert_shared`.
    """
    everybody = tuple(range(rank.size))
    calls = [
        replace(call, root=call.root % len(call.members or everybody))  # messages name the root that there is
        for call in calls
        if not left_out(call) and set(call.members) <= set(everybody)
    ]
    findings: list[WrongResult] = []
    shared: list[tuple[str, str]] = []
    flying: list[Started] = []

    def land() -> None:
        for started in sorted(flying, key=lambda pending: zlib.crc32(str(pending.call).encode())):
            started.wait()
        for started in flying:
            findings.extend(started.findings())
            shared.extend(started.shared())
        flying.clear()

    with groups_of(rank, (call.members for call in calls)) as groups:
        for call in calls:
            members = call.members or everybody
            if not call.asynchronous:
                land()
            if rank.index in members:
                flying.append(Started(rank, call, members, groups[call.members]))
            else:
                findings.extend(_outside(rank, call, groups[call.members]))
            if not call.asynchronous or len(flying) >= _IN_FLIGHT:
                land()
        land()
    raise_findings(findings, len(calls), rank)
    return shared


def _outside(rank: Rank, call: CollectiveCall, group: Any) -> Iterator[WrongResult]:
    """Call a collective on a rank outside its group; torch warns, and must leave the tensor unchanged.
    It warns in torch/distributed/distributed_c10d.py, _warn_not_in_group, torch 2.13."""
    row = FUNCTIONS[call.function]
    if not row.in_place or TRANSFERS[row.does].takers == "root":
        return
    tensor = torch.full((5,), 3, device=rank.device if call.place == "device" else "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Not `src`: torch would look it up in the group that was made last without this rank.
        root: dict[str, Any] = {"group_src": call.root % len(call.members)} if TRANSFERS[row.does].root else {}
        called(call.function, [tensor], [tensor], group=group, **root)
    if not bool((tensor == 3).all()):
        yield WrongResult(call, f"this rank is not in the group, yet its tensor became {tensor.tolist()}")


class Started(Laid):
    """A collective that was called, and that may still run. `assert_collectives_match` makes it, which calls the
    collective, later waits for it, and then asks for its findings."""

    def __init__(self, rank: Rank, call: CollectiveCall, members: tuple[int, ...], group: Any) -> None:
        super().__init__(call, members, members.index(rank.index))
        self.rank, self.group = rank, group
        self.digest = zlib.crc32(str(call).encode())
        self.memory = CallMemory(self.dtype)
        self.memory.lay([piece.shape for piece in self.pieces], backwards=bool(self.digest & 1))
        device = rank.device if call.place == "device" else torch.device("cpu")
        self.whole = self.memory.filled([piece.before for piece in self.pieces]).to(device)
        self.refused: str | None = None
        self.work: Any = None
        try:
            self.work = self._call()
        except (RuntimeError, ValueError, TypeError) as refusal:
            if not _may_refuse(call, str(refusal)):
                raise CollectiveMismatch(
                    f"{call} on {device} raised {type(refusal).__name__}: {refusal}", ranks=[rank.index]
                ) from refusal
            self.refused = str(refusal)

    def _call(self) -> Any:
        call, group = self.call, self.group
        views = [self.memory.view(self.whole, number) for number in range(len(self.pieces))]
        inputs, outputs = [views[n] for n in self.inputs], [views[n] for n in self.outputs]
        options: dict[str, Any] = {"group": group, "async_op": call.asynchronous}
        if self.reduces:
            options["op"] = getattr(dist.ReduceOp, call.op)
            if call.op == "PREMUL_SUM":
                options["op"] = dist._make_nccl_premul_sum(factor_of(call.seed))  # type: ignore[attr-defined]
        if role := self.transfer.root:
            by_group = call.root_by == "group"
            options[f"group_{role}" if by_group else role] = self.root if by_group else self.members[self.root]
        if call.layout == "in place":
            mine = slice(self.position * self.length, (self.position + 1) * self.length)
            inputs, outputs = inputs or [outputs[0][mine]], outputs or [inputs[0][mine]]
        outputs = inputs if self.row.in_place else outputs
        if not call.coalesced:
            return called(call.function, inputs, outputs, *self.splits, older=bool(self.digest & 2), **options)
        with coalescing(group, self.whole.device, asynchronous=options.pop("async_op")) as managed:
            called(call.function, inputs, outputs, **options)
        return managed if call.asynchronous else None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()

    def findings(self) -> list[WrongResult]:
        """Compare all memory of the call with the model, except for an error that a known defect explains."""
        findings = list(self._compared())
        facts: dict[str, Any] = {"function": self.call.function, "place": self.call.place, "size": self.count}
        if self.dtype is torch.bool and (not findings or self._added_as_bytes()):
            op = self.call.op if self.reduces else ""
            if is_known("gloo-adds-booleans-as-bytes", failed=bool(findings), dtype="bool", op=op, **facts):
                return []
        # The first rank's values, copied to contiguous tensors only.
        if findings and self._explained_by(self.blocks[0], lambda view: view.is_contiguous()):
            contiguous = all(self.memory.view(self.whole, number).is_contiguous() for number in self.outputs)
            if is_known("nccl-reduce-scatter-alone", failed=True, op=self.call.op, contiguous=contiguous, **facts):
                return []
        return findings

    def _added_as_bytes(self) -> bool:
        total = functools.reduce(operator.add, (block.view(torch.uint8) for block in self.blocks))
        return self._explained_by(total, lambda view: True)

    def _explained_by(self, block: torch.Tensor, writes: Callable[[torch.Tensor], bool]) -> bool:
        """Return whether the memory is as it should be, with results from `block` in the tensors that `writes`
        selects."""
        written = [writes(self.memory.view(self.whole, number)) for number in range(len(self.pieces))]
        pieces = zip(self.pieces, written, strict=True)
        should = self.memory.filled([
            piece.before if piece.reduced is not None and not own else self._should(piece) for piece, own in pieces
        ])  # fmt: skip
        for number, piece in enumerate(self.pieces):
            view = _bytes(self.memory.view(should, number))
            if isinstance(piece.after, str):
                view.copy_(_bytes(self.memory.view(self._after, number)))
            elif piece.reduced is not None and written[number]:
                view.copy_(stretched(block, piece.reduced.start, piece.reduced.length).view(view.shape))
        return torch.equal(as_bits(should), as_bits(self._after))

    def _compared(self) -> Iterator[WrongResult]:
        memory = self.whole.cpu()
        self._after = memory
        should = self.memory.filled([self._should(piece) for piece in self.pieces])
        for number, piece in enumerate(self.pieces):
            if isinstance(piece.after, str) or (piece.reduced is not None and not self.refused):
                got = self.memory.view(memory, number)
                if piece.reduced is not None:
                    yield from self._judged(piece.reduced, got)
                _bytes(self.memory.view(should, number)).copy_(_bytes(got))
        if not torch.equal(as_bits(memory), as_bits(should)):
            yield from self._differences(memory, should)

    def _should(self, piece: Piece) -> torch.Tensor | None:
        if self.refused or piece.after is None or isinstance(piece.after, str):
            return piece.before
        return piece.after

    def _judged(self, reduced: ReducedPiece, got: torch.Tensor) -> Iterator[WrongResult]:
        result = got.reshape(-1)[reduced.at : reduced.at + reduced.length].contiguous()
        expected = reduced.value
        if torch.equal(as_bits(result), as_bits(expected)):
            return
        index = (torch.arange(reduced.length) + reduced.start) % len(reduced.expected.value)
        mismatches = reduced.expected.wrong(result, index)
        if bool(mismatches.any()):
            yield WrongResult.of(self.call, result, expected, mismatches, self._looks(result, index, mismatches))

    def _looks(self, got: torch.Tensor, index: torch.Tensor, mismatches: torch.Tensor) -> str:
        """Name the rank whose values a wrong result has; "" if it has those of no single rank."""
        places = mismatches.nonzero().flatten()
        bits, indices = as_bits(got[places]), index[places]
        for member, block in zip(self.members, self.blocks, strict=True):
            if torch.equal(bits, as_bits(block[indices])):
                return f"these are the values of rank {member} alone"
        return ""

    def _differences(self, memory: torch.Tensor, should: torch.Tensor) -> Iterator[WrongResult]:
        clean = memory.clone()
        for number, piece in enumerate(self.pieces):
            got, expected = (self.memory.view(contents, number) for contents in (memory, should))
            got, expected = got.reshape(-1).contiguous(), expected.reshape(-1).contiguous()
            mismatches = differing(got, expected)
            if bool(mismatches.any()):
                label = "" if number in self.outputs or piece.after is not None else "the input was changed"
                if len(self.outputs) > 1 and number in self.outputs:
                    label = f"output {self.outputs.index(number)}"
                yield WrongResult.of(self.call, got, expected, mismatches, self._origin(got, mismatches), label)
            _bytes(self.memory.view(clean, number)).copy_(_bytes(self.memory.view(should, number)))
        outside = as_bits(clean) != as_bits(should)
        if bool(outside.any()):
            text = f"{int(outside.sum())} elements of memory before, between or behind its tensors were changed"
            yield WrongResult(self.call, text)

    def _origin(self, got: torch.Tensor, mismatches: torch.Tensor) -> str:
        places = mismatches.nonzero().flatten()
        if self.reduces or len(places) < 4:
            return ""
        bits = as_bits(got[places])
        for member, block in zip(self.members, self.blocks, strict=True):
            for getter in range(self.count):
                if torch.equal(bits, as_bits(block[(places + getter * STEP) % len(block)])):
                    part = f", its part for rank {self.members[getter]}" if getter else ""
                    return f"these are values of rank {member}{part}"
        return ""

    def shared(self) -> Iterator[tuple[str, str]]:
        """Yield the call and the checksum of a result that all members must share bit for bit."""
        if self.call.function == "all_reduce" and not self.refused:
            yield f"{self.call}", digest_of(self.memory.view(self._after, 0))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View booleans as bytes, because copies of booleans turn other bytes into 0 or 1."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def assert_sums_are_unbiased(rank: Rank, seed: int) -> None:
    """Assert that the sums of each collective are unbiased, in each floating dtype with a bit left for fractions."""
    functions = [(name, "device") for name, row in TRANSFERS.items() if row.reduces] + [("all_reduce", "cpu")]
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    cases = itertools.product((dtype for dtype in dtypes if rank.size <= most_ranks(dtype)), functions)
    run_all(
        functools.partial(assert_rounding_is_unbiased, rank, name, dtype, place, seed) for dtype, (name, place) in cases
    )


def assert_subgroups_divide(rank: Rank) -> None:
    """Assert that subgroups divide the world as requested: each rank gets its own, and all in order. A collective.
    `new_group` must sort ranks that are out of order, or keep their order with ``sort_ranks=False`` if torch has it."""
    everybody = list(range(rank.size))
    turns = [ranks for ranks in (everybody[1::2], everybody[::2]) if ranks]
    wanted: dict[str, tuple[list[list[int]], Callable[[], Any]]] = {
        "new_subgroups_by_enumeration": (turns, functools.partial(dist.new_subgroups_by_enumeration, turns))
    }
    for count in {1, 2, rank.size // 2}:
        if count and rank.size % count == 0:
            partition = [everybody[start : start + count] for start in everybody[::count]]
            wanted[f"new_subgroups of {count}"] = (partition, functools.partial(dist.new_subgroups, count))
    mixed = [number for ranks in turns for number in ranks]
    backwards = [ranks[::-1] for ranks in turns]
    wanted["new_group of ranks out of order"] = ([everybody], functools.partial(_new_groups, rank, [mixed]))
    for partition in ([mixed], backwards):
        kept = functools.partial(_new_groups, rank, partition, sort_ranks=False)
        wanted[f"new_group, sort_ranks=False, of {partition}"] = (partition, kept)
    findings: list[WrongResult] = []
    for label, (partition, make) in wanted.items():
        try:
            own, groups = make()
        except TypeError as refusal:
            if "sort_ranks" not in str(refusal):
                raise
            continue  # this version of torch lacks sort_ranks
        findings += [WrongResult(label, text) for text in _wrong(rank, partition, own, groups)]
        dist.destroy_process_group(own)
    raise_findings(findings, len(wanted), rank)


def _new_groups(rank: Rank, partition: Sequence[list[int]], **options: Any) -> tuple[Any, list[Any]]:
    groups = [dist.new_group(ranks, **options) for ranks in partition]
    return next(group for group, ranks in zip(groups, partition, strict=True) if rank.index in ranks), groups


def _called(rank: Rank, group: Any, count: int) -> tuple[list[int], list[int]]:
    """Return 1 for each rank that an all_reduce of a group sums, and the ranks in the order of its all_gather."""
    entered = torch.zeros(rank.size, dtype=torch.int64, device=rank.device)
    entered[rank.index] = 1
    dist.all_reduce(entered, group=group)
    gathered = torch.zeros(count, dtype=torch.int64, device=rank.device)
    dist.all_gather(list(gathered.chunk(count)), torch.tensor([rank.index], device=rank.device), group=group)
    return entered.tolist(), gathered.tolist()


def _wrong(rank: Rank, partition: Sequence[list[int]], own: Any, groups: Sequence[Any]) -> list[str]:
    position = next(number for number, ranks in enumerate(partition) if rank.index in ranks)
    members, own_ranks = dist.get_process_group_ranks(own), partition[position]
    if on_any_rank(rank, members != own_ranks):
        # With wrong members a collective could hang, so all ranks leave it out.
        return [f"this rank's subgroup has the ranks {members}, expected {own_ranks}"] * (members != own_ranks)
    mine = [number for number, group in enumerate(groups) if group is own]
    errors = []
    if len(groups) != len(partition) or mine != [position]:
        of = f"of {len(groups)} subgroups, expected at {position} of {len(partition)}"
        errors.append(f"this rank's own is at {mine} {of}")
    answers = {
        "this rank's number": (dist.get_rank(own), members.index(rank.index)),
        "the size": (dist.get_world_size(own), len(members)),
        "get_global_rank": ([dist.get_global_rank(own, number) for number in range(len(members))], members),
        "get_group_rank": ([dist.get_group_rank(own, member) for member in members], list(range(len(members)))),
    }
    for name, (got, expected) in answers.items():
        errors += [f"{name} in {members} is {got}, expected {expected}"] * (got != expected)
    entered, gathered = _called(rank, own, len(members))
    if entered != [int(index in members) for index in range(rank.size)]:
        errors.append(f"an all_reduce in the subgroup {members} does not sum exactly its members")
    elif gathered != members:
        errors.append(f"an all_gather in the subgroup {members} gives the ranks {gathered}")
    return errors


def some_groups(rank: Rank, seed: int) -> list[tuple[int, ...]]:
    """Return two groups, or none of one or two ranks: the first lacks rank 0, so that numbers in it are no ranks."""
    missing = (0, 1 + seed % max(1, rank.size - 1))
    return [members for outside in missing for members in without(rank, outside)]


def without(rank: Rank, outside: int) -> list[tuple[int, ...]]:
    """Return the group of all ranks but one, or none in a world of one or two."""
    everybody = range(rank.size)
    return [tuple(member for member in everybody if member != outside % rank.size)] if rank.size > 2 else []


def assert_groups_match(rank: Rank, wanted: Sequence[CollectiveCall]) -> None:
    """Assert that subgroups divide the world, and that collectives in groups match their models.
    Collectives are left out if a subgroup is wrong: with wrong members or roots they could hang."""
    with Findings() as findings:
        with findings.collected():
            assert_subgroups_divide(rank)
        if not findings.anywhere(rank):
            assert_collectives_match(rank, wanted)
