"""Compare a result with the expected one element by element, and describe and diagnose the difference.

Known patterns are matched against the elements that differ, because a defect often spares part of a tensor. No pattern
proves a cause; each says "looks like" and shows its evidence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mgpu_check.numerics.factors import common_factor, evenly
from mgpu_check.numerics.reduction import significand_bits, unit_roundoff
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE, name_of, plain


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor and the expected one. Indices count along the tensor's own dimensions."""

    count: int  # how many elements differ by more than the tolerance
    total: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    worst: tuple[int, ...]
    got: float | int  # the value at `worst`; `expected` and `tolerance` belong to the same element
    expected: float | int
    tolerance: float
    dtype: torch.dtype

    def __str__(self) -> str:
        position = f"element {list(self.worst)}: " if self.worst else ""
        text = f"{position}got {show(self.got, self.dtype)}, expected {show(self.expected, self.dtype)}"
        if self.tolerance:
            text += f" ± {self.tolerance:.3g}"
        if self.count == self.total:
            return text + (f"; all {self.total} elements differ" if self.total > 1 else "")
        if self.count == 1:
            return text + f"; all other {self.total - 1} elements are right"
        return text + f"; {self.count} of {self.total} elements differ, from {list(self.first)} to {list(self.last)}"


def show(value: float | int, dtype: torch.dtype) -> str:
    """Format `value` with enough digits to distinguish all numbers of `dtype`."""
    if isinstance(value, int):
        return str(value)
    digits = {53: 17, 24: 9, 11: 5, 8: 4}.get(significand_bits(dtype), 17) if dtype.is_floating_point else 17
    return f"{value:.{digits}g}"


def difference(got: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor | float = 0.0) -> Difference | None:
    """Describe how `got` differs from `expected`; return None if every element is within `tolerance`.

    With tolerance 0 values must be equal. 0.0 equals -0.0, since the sign of a zero sum depends on the order of its
    terms. NaN equals only NaN, and an infinity only the same infinity.

    Args:
        got: any dtype, layout and device.
        expected: same shape; float64 for an exact value.
        tolerance: a number, or a tensor of the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    if got.shape != expected.shape:
        raise ValueError(
            f"difference: got has shape {tuple(got.shape)}, expected {tuple(expected.shape)}; compare like with like"
        )
    got_, expected_ = plain(got), plain(expected)
    dtypes = {got.dtype, expected.dtype, tolerance.dtype if isinstance(tolerance, torch.Tensor) else None}
    # A float32 tolerance needs no wider comparison, and float32 moves a quarter of the memory.
    if dtypes == {torch.float32} and bool(((got_ - expected_).abs_() <= torch.as_tensor(tolerance)).all()):
        return None
    # NaN is unequal to everything, so `close` is False for it; the complement below counts it as wrong.
    allowed = torch.as_tensor(tolerance, dtype=torch.float64).cpu().expand(got_.shape)
    if got_.dtype.is_floating_point or expected_.dtype.is_floating_point:
        got64, expected64 = got_.double(), expected_.double()
        distance = (got64 - expected64).abs()
        close = (got64 == expected64) | (distance <= allowed) | (got64.isnan() & expected64.isnan())
    else:
        close = got_ == expected_
        distance = (got_.double() - expected_.double()).abs()
    mismatches = ~close
    if not mismatches.any():
        return None
    # The worst element exceeds its tolerance by the largest factor; if a tolerance is 0, it has the largest error.
    excess = distance / allowed if bool((allowed > 0).all()) else distance
    excess = torch.where(mismatches, excess.nan_to_num(torch.inf), -1.0)
    indices = mismatches.nonzero()
    worst = torch.unravel_index(excess.argmax(), got_.shape) if got_.dim() else ()
    index = tuple(int(coordinate) for coordinate in worst)
    return Difference(
        count=int(mismatches.sum()),
        total=got_.numel(),
        first=tuple(indices[0].tolist()),
        last=tuple(indices[-1].tolist()),
        worst=index,
        got=got_[index].item(),
        expected=expected_[index].item(),
        tolerance=float(allowed[index]),
        dtype=got_.dtype,
    )


def flipped_bits(got: torch.Tensor, expected: torch.Tensor) -> list[tuple[tuple[int, ...], int]]:
    """Find the elements that differ from the expected ones in exactly one bit, as (index, bit).

    Bit 0 is the least significant. Empty if any element differs in more than one bit, or if the dtypes or shapes
    differ.
    """
    if got.dtype != expected.dtype or got.shape != expected.shape or not got.numel():
        return []
    integer_type = INTEGER_OF_SIZE[got.element_size()]
    changed = plain(got).view(integer_type) ^ plain(expected).view(integer_type)
    indices = changed.nonzero()
    values = changed[changed != 0]
    if not len(indices) or bool((values & (values - 1)).any()):
        return []
    width = 8 * got.element_size()
    bits = [(value % 2**width).bit_length() - 1 for value in values.tolist()]
    return list(zip(map(tuple, indices.tolist()), bits, strict=True))


_ROUNDINGS = 4  # two right results may differ by this many roundoffs: each is rounded a few times, in its own order
_MANY = 4
"""Fewest elements with one inverted bit that suggest a defect of bits: fewer differ so by chance, as 257 and 256 do."""
_LEAST = 1 / 64
"""Smallest error, in roundoffs of a narrower dtype, that suggests its arithmetic: its errors are hardly ever all
smaller."""
_FEW = 8
"""Fewest elements whose errors are compared with a narrower dtype: any error of one value is like that by chance."""
_NARROWER = {
    torch.float64: ((torch.float32, "float32"), (torch.float16, "float16 or TF32"), (torch.bfloat16, "bfloat16")),
    torch.float32: ((torch.float16, "float16 or TF32"), (torch.bfloat16, "bfloat16")),
    torch.float16: ((torch.bfloat16, "bfloat16"),),
}


def diagnose(
    got: torch.Tensor,
    expected: torch.Tensor,
    tolerance: torch.Tensor | float = 0.0,
    *,
    contributions: Sequence[torch.Tensor] = (),
    rank: int | None = None,
    constants: Mapping[str, float] | None = None,
    previous: torch.Tensor | None = None,
) -> list[str]:
    """Describe the known patterns that the difference of `got` from `expected` matches, the strongest first.

    Returns an empty list if no pattern matches, or if the shapes differ.

    Args:
        got, expected: of one shape; `expected` may be float64 for an exact value.
        tolerance: as for `difference`.
        contributions: the contribution of each rank, if the result should be their sum.
        rank: the rank that holds `got`.
        constants: factors that a result may be off by, by name ("world size": 4, …).
        previous: the value of `got` before the operation or the step.
    """
    got_, expected_ = plain(got), plain(expected)
    if got_.shape != expected_.shape:
        return []
    wide, goal = got_.double(), expected_.double()
    allowed = torch.as_tensor(tolerance, dtype=torch.float64).cpu().expand(wide.shape)
    mismatches = ~((wide == goal) | ((wide - goal).abs() <= allowed))
    count = int(mismatches.sum())
    if not count:
        return []
    differing = _Differing(got_, wide[mismatches], goal[mismatches], allowed[mismatches], count)
    findings = _bits(got_, expected_, mismatches, count) or differing.rounding()
    if findings:
        return findings
    findings += differing.constant({} if constants is None else constants)
    if previous is not None and previous.shape == got.shape and differing.equals(plain(previous).double()[mismatches]):
        findings.append(f"looks like a stale value: {differing.which} {differing.verb} what was there before")
    terms = [plain(contribution).double()[mismatches] for contribution in contributions]
    findings += differing.of_parts(terms, rank)
    if count > 1 and not findings and differing.permuted():
        findings.append(f"looks like a permutation: {differing.which} hold the expected values in another order")
    if findings:
        return findings
    if count > 1 or wide.numel() <= 3:
        return _narrower(got_.dtype, wide[mismatches], goal[mismatches], terms)
    value, goal_value = float(wide[mismatches]), float(goal[mismatches])
    relative = abs(value - goal_value) / abs(goal_value) if goal_value else math.inf
    shows_size = got_.dtype.is_floating_point and 0 < relative < 1
    off = f"it is off by {relative:.1e} of its value, and " if shows_size else ""
    return [f"looks like a corrupted element: {off}all others are right"]


def _bits(got: torch.Tensor, expected: torch.Tensor, mismatches: torch.Tensor, count: int) -> list[str]:
    rounded = expected.to(got.dtype)
    if not torch.equal(rounded.double(), expected.double()) and not got.dtype.is_floating_point:
        return []
    flips = flipped_bits(torch.where(mismatches, got, rounded), rounded)
    if len(flips) != count or count < _MANY or len({bit for _, bit in flips}) > 1:
        return []
    off = got.double()[mismatches] - expected.double()[mismatches]
    if got.dtype.is_floating_point:
        # A last bit is also what another order of rounding changes.
        if bool((off.abs() <= _ROUNDINGS * unit_roundoff(got.dtype) * expected.double()[mismatches].abs()).any()):
            return []
    elif count == got.numel() and len(off.unique()) == 1:
        return []  # a number was added to all elements
    index, bit = flips[0]
    example = f"{list(index)}, that of {show(rounded[index].item(), got.dtype)}"
    return [f"looks like a flipped bit: bit {bit} of {count} elements is inverted, in the first, {example}"]


class _Differing:
    """The elements that differ, with their expected values and tolerances."""

    def __init__(
        self, tensor: torch.Tensor, got: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor, count: int
    ) -> None:
        self.got, self.expected, self.allowed = got, expected, allowed
        self.dtype = name_of(tensor.dtype)
        self.roundoff = unit_roundoff(tensor.dtype) if tensor.dtype.is_floating_point else 0.0
        several = count > 1
        every = several and count == tensor.numel()
        self.which = "all elements" if every else f"the {count} elements that differ" if several else "the element"
        self.verb, self.be, self.hold = ("equal", "are", "hold") if several else ("equals", "is", "holds")

    def equals(self, candidate: torch.Tensor) -> bool:
        # The candidate is computed here from exact values; a result of that pattern is one or two roundings away.
        if torch.equal(self.got, candidate):
            return True
        slack = self.allowed + 4 * self.roundoff * (candidate.abs() + self.expected.abs())
        if not bool(((self.got - candidate).abs() <= slack).all()):
            return False
        # An element that is as near to the expected value as to the candidate is no evidence; half must be evidence.
        telling = (self.got - self.expected).abs() > 2 * slack
        return int(telling.sum()) * 2 >= len(self.got)

    def permuted(self) -> bool:
        slack = self.allowed.max() + 4 * self.roundoff * self.expected.abs().max()
        if not bool(((self.got.sort().values - self.expected.sort().values).abs() <= slack).all()):
            return False
        # Values that are nearly right in place also fit a permutation: at least half must have moved.
        return int(((self.got - self.expected).abs() > 2 * slack).sum()) * 2 >= len(self.got)

    def rounding(self) -> list[str]:
        off = (self.got - self.expected).abs()
        if not self.roundoff or not bool((off <= _ROUNDINGS * self.roundoff * self.expected.abs()).all()):
            return []
        most = float((off / self.expected.abs()).max())
        return [
            f"looks like another order of rounding: {self.which} {self.be} off by at most {most:.1e} of the expected, "
            f"and the unit roundoff of {self.dtype} is {self.roundoff:.1e}"
        ]

    def constant(self, constants: Mapping[str, float]) -> list[str]:
        if bool((self.got == 0).all()):
            return [f"looks like a result that was never written: {self.which} {self.hold} 0"]
        usable = self.expected != 0
        if not usable.any():
            return []
        named = {name: value for name, value in constants.items() if value not in (0, 1)}
        for name, value in named.items():
            if self.equals(self.expected * value):
                return [f"looks like a factor: {self.which} {self.be} {value:g} times the expected ({name})"]
            if self.equals(self.expected / value):
                return [f"looks like a factor: {self.which} {self.be} 1/{value:g} of the expected (1 / {name})"]
        # `equals` checks the factor against each element's measured tolerance, so no slack is needed here.
        indices = evenly(int(usable.sum()))
        pairs = zip(self.got[usable][indices].tolist(), self.expected[usable][indices].tolist(), strict=True)
        ratio = common_factor(list(pairs), least=0.0, of_largest=math.inf)
        if len(self.got) > 2 and ratio is not None and self.equals(self.expected * ratio):
            shown = f"{ratio:.6g}" if abs(ratio - 1) > 1e-5 else f"1 {'+' if ratio > 1 else '-'} {abs(ratio - 1):.1e}"
            return [f"looks like a factor: {self.which} {self.be} {shown} times the expected"]
        return []

    def of_parts(self, contributions: Sequence[torch.Tensor], rank: int | None) -> list[str]:
        """Return the first pattern only: a few elements fit several by chance."""
        which = self.which
        if len(contributions) < 2:
            return []
        for index, contribution in enumerate(contributions):
            if self.equals(contribution):
                owner = "its own part" if index == rank else f"rank {index}'s part"
                return [f"looks like a result that was not delivered: {which} {self.verb} {owner} alone"]
            if self.equals(self.expected - contribution):
                return [f"looks like a sum that misses rank {index}: with its part, {which} would be right"]
            if self.equals(self.expected + contribution):
                return [f"looks like a sum that counts rank {index} twice: {which} {self.be} too large by its part"]
        for last, partial in enumerate(itertools.accumulate(contributions[:-1])):
            if last and self.equals(partial):
                return [f"looks like a partial sum: {which} {self.verb} the sum over ranks 0 to {last}"]
        return []


def _narrower(
    dtype: torch.dtype, got: torch.Tensor, expected: torch.Tensor, contributions: Sequence[torch.Tensor]
) -> list[str]:
    if not bool(got.isfinite().all()) and bool(expected.isfinite().all()):
        largest = f"where up to {float(expected.abs().max()):.3g} was expected (float16 ends at 65504)"
        return [f"looks like an overflow: values that are not finite, {largest}"]
    scale = torch.stack([term.abs() for term in contributions or [expected]]).sum(0)
    relative = float(((got - expected).abs() / scale.clamp_min(torch.finfo(torch.float64).tiny)).max())
    terms = max(len(contributions), 1)
    if got.numel() < _FEW:
        return []
    for narrow, name in _NARROWER.get(dtype, ()):
        if _LEAST * unit_roundoff(narrow) <= relative <= terms * unit_roundoff(narrow):
            return [
                f"looks like arithmetic in {name}: errors are at most {relative:.1e} of the summed magnitudes, "
                f"and the unit roundoff of that precision is {unit_roundoff(narrow):.1e}"
            ]
    return []
