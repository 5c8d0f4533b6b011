"""Detect mistakes that scale parts of the batch differently than one device does, by a factor, a limit or rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.registry import Precedence, mistake, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.processes.rank_lists import few

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.left import Left
    from mgpu_check.diagnosis.observed import Division
    from mgpu_check.diagnosis.results import Result
    from mgpu_check.diagnosis.tensors import Tensors

_SAME = 1e-3
"""Largest relative difference between equal weights, norms or factors; a fit itself is allowed 1e-4."""
_UNLIKE = 1e-2
"""Smallest relative difference between unequal weights or factors: well above `_SAME`, so that rounding never
accuses."""
_NOTHING = 1e-3
"""Fraction of the largest weight below which a part does not contribute."""
_COUNTS = 4
"""Most elements of a collective's result that are tried as a count: steps reduce counts in small tensors."""
_SEVERAL = 3
"""Fewest elements of a gradient, so that it is no multiple of another one by chance."""
_COMPUTED = 1e-5
"""Tolerance, as a fraction of the largest element, for multiples of one gradient that ranks compute separately."""
_EXACT = 1e-4
"""Relative tolerance between a factor and the factor that a rounded count would cause."""

mistake(
    "integer-division",
    "a mean, or a share of a count, loses its fraction",
    "divide with /, and not with //, in floating point, and convert integers before they are averaged",
)


@on_tensors(Precedence.SUMS + 10)
def unscales_by_its_own(tensors: Tensors) -> Finding | None:
    """Detect a scale that differs between ranks: all hold the same sum of parts, each times its own factor."""
    for _, rows in _weighed(tensors):
        found = _own_factors(
            f"{few(tensors.names)}: ranks hold the same sum of parts", [_ratio(row, rows[0]) for row in rows]
        )
        if found is not None:
            return found
    return None


@on_tensors(Precedence.SUMS + 20)
def steps_by_its_own_factor(tensors: Tensors) -> Finding | None:
    """Detect a scale that differs between ranks: an optimizer step finds one gradient, times a factor of each rank."""
    for number, stages in enumerate(zip(*(one.snapshots for one in tensors.seen), strict=False)):
        flat = [_flat(stage) for stage in stages]
        if any(one.shape != flat[0].shape for one in flat) or int((flat[0] != 0).sum()) < _SEVERAL:
            return None
        factors = [_multiple(one, flat[0]) for one in flat]
        if None in factors:
            return None
        found = _own_factors(f"optimizer step {number + 1} finds the same gradient on all ranks", factors)
        if found is not None:
            return found
    return None


def _own_factors(what: str, factors: Sequence[float | None]) -> Finding | None:
    """Return the finding if all factors are known and they differ."""
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors) or max(map(abs, known)) <= (1 + _UNLIKE) * min(map(abs, known)):
        return None
    each = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in enumerate(known))
    return Finding(
        "decision-per-rank",
        f"{what}, but times different factors ({each}), as if each rank divided by its own loss scale",
    )


def _flat(stage: Mapping[Result, torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat([torch.zeros(0).double(), *(stage[n].double().flatten() for n in stage if n.kind == "grads")])


def _multiple(one: torch.Tensor, of: torch.Tensor) -> float | None:
    """Return the positive factor between all elements of `one` and of `of`; None if no factor fits."""
    factor = float((one * of).sum() / of.square().sum())
    if not math.isfinite(factor) or factor <= 0:
        return None
    return factor if bool(((one - factor * of).abs() <= _COMPUTED * one.abs().max()).all()) else None


@on_tensors(Precedence.SUMS + 30)
def counts_parts_unlike(tensors: Tensors) -> Finding | None:
    """Detect a loss scale of each rank's own: ranks agree on a sum that gives parts of equal size unequal weights."""
    if not tensors.gradient_like or tensors.hypotheses.padded:
        return None
    for division, rows in _weighed(tensors):
        if division.even and _alike(rows) and max(rows[0]) > (1 + _UNLIKE) * min(rows[0]) > 0:
            factors = _left_factors(tensors, division)
            if factors is None or _ratio(factors, rows[0]) is None:
                continue  # parts may also be of another size than the division says
            each = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in enumerate(factors))
            return Finding(
                "decision-per-rank",
                f"{few(tensors.names)}: the parts of ranks have equal size but unequal weights: backward leaves the "
                f"gradient of its part times a factor of each rank's own ({each})",
            )
    return None


def _left_factors(tensors: Tensors, division: Division) -> list[float] | None:
    """Return the factor between what backward left on each rank and the gradient of its part; None if none fits."""
    factors = []
    for trace, part in zip(tensors.traces, tensors.combined(division, "own"), strict=False):
        left: Left = next((event.details.get("left", {}) for event in reversed(trace.of("backward"))), {})
        pairs = [(left[name.of], value) for name, value in part.items() if name.of in left]
        norms = [(got["norm"], float(value.norm())) for got, value in pairs]
        total = math.hypot(*(norm for _, norm in norms))
        factor = math.hypot(*(norm for norm, _ in norms)) / total if total else 0.0
        sums = [(got["sum"], float(value.sum())) for got, value in pairs]
        slack = _SAME * factor * total
        if not factor or any(abs(got - factor * right) > slack for got, right in (*norms, *sums)):
            return None
        factors.append(factor)
    return factors or None


@on_tensors(Precedence.CLIPPING + 40)
def clips_each_part(tensors: Tensors) -> Finding | None:
    """Detect clipping before the mean: all parts enter the mean with the same norm."""
    if not tensors.gradient_like:
        return None
    for division, rows in _weighed(tensors):
        norms = tensors.norms_of_parts(division)
        counted = [weight * norm for weight, norm in zip(rows[0], norms, strict=True)]
        if _alike(rows) and min(counted) > 0 and max(counted) <= (1 + _SAME) * min(counted):
            told = ", ".join(f"{norm:.4g}" for norm in norms)
            return Finding(
                "clipped-before-synchronization",
                f"{few(tensors.names)}: the parts of ranks have norms {told}, but enter the sum with equal norms: "
                "each part was clipped before the sum",
            )
    return None


@on_tensors(Precedence.CLIPPING + 50)
def limits_by_a_norm_of_parts(tensors: Tensors) -> Finding | None:
    """Detect a wrong norm in clipping: one device always reaches one norm, and ranks another one."""
    if not tensors.gradient_like or tensors.wrong_alone or not tensors.further:
        return None
    cases = (tensors, *tensors.further)
    if any(name not in case.expected.exact for case in cases for name in tensors.names):
        return None
    norms = [_norm(case.expected.exact[name].norm() for name in tensors.names) for case in cases]
    own = [
        _norm(case.seen[0].values[name].double().norm() for name in tensors.names if name in case.seen[0].values)
        for case in cases
    ]
    # A norm needs several elements to be evidence. If it is the same in all cases, it is a limit.
    several = sum(tensors.expected.exact[name].numel() for name in tensors.names) > 2
    is_limit = several and min(norms) > 0 and max(norms) <= (1 + _SAME) * min(norms)
    if not is_limit or abs(own[0] - norms[0]) <= _UNLIKE * norms[0] or tensors.factor() is not None:
        return None
    return Finding(
        "clipped-before-synchronization",
        f"{few(tensors.names)}: on one device the norm is {norms[0]:.4g} for every batch, so it is limited, and on "
        f"{tensors.size} ranks it is {own[0]:.4g}: ranks clip by the norm of a part",
    )


@on_tensors(Precedence.SUMS + 40)
def rounds_to_integers(tensors: Tensors) -> Finding | None:
    """Detect a mean without its fraction: wrong values are those of one device, rounded down or towards zero."""
    for name in tensors.wrong("returned"):
        cases = [(case.expected.exact.get(name), case.seen[0].values.get(name)) for case in (tensors, *tensors.further)]
        known = [(right, got.double()) for right, got in cases if right is not None and got is not None]
        if len(known) < len(cases) or any(right.shape != got.shape for right, got in known):
            continue
        # A value below 1 is rounded to 0, and many other mistakes also give 0.
        telling = any(bool((got.abs() >= 1).any()) for _, got in known)
        right, here = known[0]
        telling = telling or _is_quotient(tensors, right, here)
        if telling and bool((right != right.round()).any()) and all(_is_rounded(*case) for case in known):
            values = few([f"{value:.6g}" for value in right.flatten().tolist()])
            told = few([f"{value:.6g}" for value in here.flatten().tolist()])
            return Finding("integer-division", f"{name} is {told}, and {values} on one device: the fraction is dropped")
    return None


def _is_quotient(tensors: Tensors, right: torch.Tensor, got: torch.Tensor) -> bool:
    """Return whether some collective gave integers that, divided by the world size, are the right values."""
    for _, event in tensors.events("collective"):
        given = zip(event.details.get("tensors", ()), event.details.get("after", ()), strict=False)
        for values in (after.get("values", []) for tensor, after in given if "int" in tensor["dtype"]):
            shares = [value / tensors.size for value in values]
            if len(shares) == right.numel() and all(
                abs(share - value) <= _EXACT * abs(share) and math.floor(share) == here
                for share, value, here in zip(shares, right.flatten().tolist(), got.flatten().tolist(), strict=True)
            ):
                return True
    return False


def _is_rounded(right: torch.Tensor, got: torch.Tensor) -> bool:
    return bool((got == right.floor()).all() | (got == right.trunc()).all())


@on_tensors(Precedence.SUMS + 50)
def divides_a_count(tensors: Tensors) -> Finding | None:
    """Detect integer division of a count: the factor is the ratio of the exact and the rounded share."""
    ratio = tensors.factor_here()
    # A single number is a multiple of any other, so its factor is weak evidence.
    alone = sum(tensors.expected.exact[name].numel() for name in tensors.names) == 1
    if ratio is None or ratio <= 0 or (alone and tensors.mean_of_parts is not None):
        return None
    for count, of in _counts(tensors):
        if (found := _rounded_share(ratio, count, tensors.size)) is not None:
            rounded, how = found
            return Finding(
                "integer-division",
                f"{few(tensors.names)} is {ratio:.6g} times what one device gives: {of}, {count:g}, divided by "
                f"{tensors.size} ranks is {count / tensors.size:g}, and {rounded:g} rounded {how}, as by //",
            )
    return None


def _rounded_share(ratio: float | None, count: int, size: int) -> tuple[int, str] | None:
    """Return the rounded share of a count that causes a factor, and how it is rounded; None if none does."""
    share, floor = count / size, count // size
    for rounded, how in ((floor, "down"), (floor + 1, "up")):
        factors = (share / rounded, rounded / share) if floor and count % size else ()
        if ratio and any(abs(ratio - factor) <= _EXACT * factor for factor in factors):
            return rounded, how
    return None


def _counts(tensors: Tensors) -> Iterator[tuple[int, str]]:
    others = [_rounded_share(case.factor_here(tensors.names), case.samples, case.size) for case in tensors.further]
    if tensors.samples and None not in others:
        yield tensors.samples, "the number of samples"
    for _, event in tensors.events("collective"):
        for contents in event.details.get("after", ()):
            for value in contents.get("values", ())[:_COUNTS]:
                if math.isfinite(value) and value == int(value) and value > 1:
                    yield int(value), f"what {event.where} gives"


def _weighed(tensors: Tensors) -> Iterator[tuple[Division, list[list[float]]]]:
    """Yield the divisions whose weighted parts explain all wrong results with every seed, and the weights of each rank.

    A division is left out if only one part contributes on some rank.
    """
    for division in tensors.hypotheses.divisions:
        rows = tensors.weights_of_ranks(division)
        if rows is None or not all(_counts_several(row) for row in rows):
            continue
        same = [
            other
            for case in tensors.further
            for other in case.hypotheses.divisions
            if (other.name, other.windows) == (division.name, division.windows)
            and case.weights_of_ranks(other) is not None
        ]
        if len(same) == len(tensors.further):
            yield division, rows


def _counts_several(row: Sequence[float]) -> bool:
    largest = max(map(abs, row))
    return sum(abs(weight) > _NOTHING * largest for weight in row) > 1


def _alike(rows: Sequence[Sequence[float]]) -> bool:
    return all(abs(one - other) <= _SAME * abs(other) for row in rows for one, other in zip(row, rows[0], strict=True))


def _ratio(row: Sequence[float], first: Sequence[float]) -> float | None:
    """Return the factor between `row` and `first`; None if `row` is not a multiple of `first`."""
    largest = max(range(len(first)), key=lambda index: abs(first[index]))
    factor = row[largest] / first[largest]
    near = all(abs(one - factor * other) <= _SAME * abs(row[largest]) for one, other in zip(row, first, strict=True))
    return factor if near and factor else None


def _norm(norms: Iterable[torch.Tensor]) -> float:
    return math.sqrt(math.fsum(float(norm) ** 2 for norm in norms))
