"""Make the inputs of collectives on the CPU, and the right results of their reductions.

Values come in blocks: one tensor per member of the group. A call repeats its block to the length that it needs.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.reduction import exact_factors, exact_parts, random_parts, reduced
from mgpu_check.torch_hooks.tensors import as_bits, as_real

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


def differing(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements whose bits differ in two contiguous tensors of the same shape and dtype."""
    wrong = as_bits(got) != as_bits(right)
    return wrong.any(-1) if got.is_complex() else wrong


def factor_of(seed: int) -> float:
    """Return the factor of a PREMUL_SUM: a power of two, so that nothing rounds."""
    return (0.5, 2.0, 4.0, 0.25)[seed % 4]


@dataclass(frozen=True)
class Right:
    """The results that a reduction may give, element by element.

    Attributes:
        value: the only right result, or the rounded exact one if results may be off; in the dtype of the terms.
        exact: the exact result in float64 or complex128; None if results must have the bits of `value`. Any NaN equals
            any other NaN.
        tolerance: float64; for complex numbers, of real and imaginary part.
        terms: the terms of MIN and MAX of floats, else empty. In an element with a NaN among its terms, NaN and each
            term are right, and zeros of both signs are equal. IEEE 754-2008 (minNum) and -2019 (minimum) treat NaN
            differently, and the result of a library depends on its order of comparisons.
    """

    value: torch.Tensor
    exact: torch.Tensor | None = None
    tolerance: torch.Tensor | None = None
    terms: tuple[torch.Tensor, ...] = ()

    def wrong(self, got: torch.Tensor, where: slice | torch.Tensor) -> torch.Tensor:
        """Return a mask of the wrong elements of a result; `where` has their places in the block."""
        value = self.value[where]
        if self.exact is not None and self.tolerance is not None:
            off = as_real(got).double() - as_real(self.exact[where])
            fine = (off.abs() <= self.tolerance[where]) | (as_bits(got) == as_bits(value))
        else:
            fine = as_bits(got) == as_bits(value)
            if value.dtype.is_floating_point or value.is_complex():
                fine |= as_real(got).isnan() & as_real(value).isnan()
        if value.is_complex():
            return ~fine.all(-1)
        if self.terms:
            terms = torch.stack([term[where] for term in self.terms])
            loose = terms.isnan().any(0) & (got.isnan() | (got == terms).any(0))
            fine |= loose | ((got == 0) & (value == 0))
        return ~fine


@functools.lru_cache(maxsize=256)
def given_blocks(values: str, op: str, dtype: torch.dtype, count: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return a block of values for each of `count` ranks: vectors of equal length, on the CPU."""
    if values == "borders":
        both = [given_blocks(kind, op, dtype, count, seed) for kind in ("exact", "extremes")]
        return tuple(torch.cat(parts) for parts in zip(*both, strict=True))
    if values == "bits":
        return tuple(_bits(dtype, seed * 131 + place) for place in range(count))
    if dtype.is_complex:
        real = torch.float32 if dtype is torch.complex64 else torch.float64
        pair = [given_blocks(values, op, real, count, 2 * seed + part) for part in (0, 1)]
        return tuple(torch.complex(first, second.roll(1)) for first, second in zip(*pair, strict=True))
    if dtype is torch.bool:
        patterns = torch.arange(_EXACT * count).view(count, -1) * 0x9E3779B9 + seed * 7919
        parts = [(patterns[place] >> 11) % 3 == place % 3 for place in range(count)]
        # All true, none true, one true and one false: these distinguish "or" from "and", and show which rank is
        # missing.
        alone = torch.eye(count, dtype=torch.bool)
        some = torch.cat(
            [alone, ~alone, torch.zeros(1, count, dtype=torch.bool), torch.ones(1, count, dtype=torch.bool)]
        )
        return tuple(torch.cat([some[:, place], part]) for place, part in enumerate(parts))
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

    Two terms have one correctly rounded sum or product. More terms have the bounds of `mgpu_check.numerics.bounds`
    (Higham, sections 3.1 and 4.2), for real and imaginary parts separately. For a mean, libraries may divide the terms
    or the sum, which costs one more rounding per term.
    """
    given = given_blocks(values, op, dtype, count, seed)
    terms = tuple(_scaled(part, factor_of(seed)) for part in given) if op == "PREMUL_SUM" else given
    fold = _OF_BOOLEANS.get(op, _FOLDS[op]) if dtype is torch.bool else _FOLDS[op]
    if dtype.is_complex:
        # Not by complex arithmetic: torch multiplies a term by 1 when it adds, which spoils infinities.
        value = torch.view_as_complex(functools.reduce(fold, map(as_real, terms)))
    else:
        value = functools.reduce(fold, terms)
    if op in ("MIN", "MAX"):
        return Right(value, terms=terms if dtype.is_floating_point else ())
    if op == "AVG" and count > 1:
        if values == "special":
            # Zeros, infinities and NaN, which division does not change.
            return Right(value)
        return _rounded(terms, "avg", dtype)
    if values == "random" and count > 2 and (dtype.is_floating_point or dtype.is_complex):
        return _rounded(terms, "product" if op == "PRODUCT" else "sum", dtype)
    return Right(value)


def _scaled(part: torch.Tensor, factor: float) -> torch.Tensor:
    # Not by complex arithmetic, where infinity times (2 + 0i) is NaN.
    return torch.view_as_complex(as_real(part) * factor) if part.is_complex() else part * factor


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
    columns: list[list[float]] = [[] for _ in range(count)]
    for (one, other), holder in itertools.product(pairs, range(count)):
        for place in range(count):
            columns[place].append(one if place == holder else other)
    return tuple(
        torch.tensor(column, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype) for column in columns
    )


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
        borders_ = [*(-value for value in reversed(positive)), 0.0, *positive]
        return _pairs(borders_)
    if op == "PRODUCT":
        return [
            (sign * value, b)
            for value in (subnormal, least, 1.0, next_to_one, most)
            for sign in (1, -1)
            for b in (1.0, -1.0)
        ]
    # Powers of two have exact multiples, and are small enough that no partial sum overflows. Borders stand alone.
    large = math.ldexp(1.0, math.frexp(most)[1] - 2 - count.bit_length())
    powers = [
        (a, b)
        for power in (large, 1.0, *(() if op == "AVG" else (least, subnormal)))
        for a in (power, -power)
        for b in (power, -power)
    ]
    if op == "AVG":
        return powers
    scaled = op == "PREMUL_SUM"
    alone = (1.0, next_to_one, least * 8) if scaled else (most, -most, subnormal, -subnormal, least, next_to_one)
    return [*powers, *((value, 0.0) for value in alone)] if not scaled else [
        *((a, b) for a in (1.0, -1.0) for b in (1.0, -1.0)), *((value, 0.0) for value in alone)
    ]  # fmt: skip


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
    first = start % len(block)
    return block.repeat(-(-(first + length) // len(block)))[first : first + length]
