"""Detect mistakes of scale: one factor on a result or update, other scales of parts of the batch, narrow dtypes.

Parts of the batch may be scaled differently than on one device by a factor, a limit or rounding. Narrow dtypes overflow
and round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.observations import Division, Left, RankTrace, Result, is_held
from mgpu_check.diagnosis.report import Finding, on_evidence, on_tensors
from mgpu_check.diagnosis.rules import says
from mgpu_check.processes.rank_lists import few

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.tensors import Tensors


_NEAR = 1e-4  # relative tolerance for norms of gradients that were summed in another order
_EXACT = 1e-3  # tolerance of the exponent of the world size. The factor itself fits all elements to 1e-5.


@says("accumulation-factor", on_evidence)
def not_divided_by_micro_batches(evidence: Evidence) -> str:
    """Detect a factor that is the ratio of two numbers of micro-batches, and also that of the summed losses."""
    factor, ratio = evidence.factor, evidence.undivided
    if factor is None or ratio == 1 or abs(factor.value - ratio) > factor.near * ratio:
        return ""
    summary = (
        f"{factor.told}; a rank has {ratio:.4g} times as many micro-batches as one device, and its losses add up to "
        "as much"
    )
    if evidence.size in (ratio, 1 / ratio):
        summary += "; or the loss has a factor of the world size, which is the same number"
    return summary


@on_evidence
def off_by_world_size(evidence: Evidence) -> Finding | None:
    """Detect a factor that is a power of the world size."""
    factor, size = evidence.factor, evidence.size
    if factor is None or _by_passes_between_ranks(evidence):
        return None
    # Four micro-batches on two ranks are likelier than the same mistake made twice.
    powers = [power for power in factor.powers if abs(power) == 1 or not _by_micro_batches(evidence)]
    power = next((power for power in powers if factor.is_power(size, power)), None)
    if power is None:
        return None
    times = {1: f"{size} times", -1: f"1/{size} of", 2: f"{size}² times", -2: f"1/{size}² of"}[power]
    twice = " (averaged twice?)" if power < 0 else " (summed, not averaged?)"
    summary = f"{factor.told} {times} what one device gives, on {size} ranks{twice}"
    if factor.rough:
        summary = f"{factor.told}: the world size{' inverted' if power < 0 else ''}{factor.ending}"
    tensors = evidence.tensors  # the common factor is that of all further cases
    confirmed = tensors is not None and bool(tensors.further) and tensors.factor() is not None
    return Finding("world-size-factor", summary, confirmed=confirmed)


@says("opposite-sign", on_evidence)
def off_by_a_sign(evidence: Evidence) -> str:
    """Detect the factor -1."""
    factor = evidence.factor
    if factor is None or abs(factor.value + 1) > factor.near:
        return ""
    return f"{factor.told} -1 times what one device gives{factor.ending}"


@says("accumulation-factor", on_evidence)
def off_by_micro_batches(evidence: Evidence) -> str:
    """Detect a factor that equals the number of micro-batches or its inverse."""
    factor = evidence.factor
    if factor is None or not _by_micro_batches(evidence):
        return ""
    summary = (
        f"{factor.told} {factor.value:.4g} times what one device gives, with {evidence.micro_batches:g} backward "
        "passes in each step"
    )
    if _by_passes_between_ranks(evidence) and evidence.size == evidence.micro_batches:
        summary += "; or the loss has a factor of the world size, which is the same number"
    if factor.rough:
        summary = f"{factor.told}: the number of micro-batches{' inverted' if factor.value < 1 else ''}{factor.ending}"
    return summary


def _by_micro_batches(evidence: Evidence) -> bool:
    factor = evidence.factor
    return factor is not None and any(factor.is_power(evidence.micro_batches, power) for power in (1, -1))


def _by_passes_between_ranks(evidence: Evidence) -> bool:
    """Return whether backward passes explain the factor, and the reference has as many ranks, as far as known."""
    tensors = evidence.tensors
    if tensors is None or tensors.alone is None or tensors.elsewhere is not None or not _by_micro_batches(evidence):
        return False
    return not tensors.alone.of("backward")  # the reference is the same step on ranks, with other options


@on_evidence
def grows_with_world_size(evidence: Evidence) -> Finding | None:
    """Detect a factor that is the same power of the world size at two world sizes."""
    factor, tensors = evidence.factor, evidence.tensors
    if factor is None or tensors is None or off_by_world_size(evidence) or _by_micro_batches(evidence):
        return None
    ratio, elsewhere, ratio_elsewhere = tensors.factor(), tensors.elsewhere, tensors.factor_elsewhere()
    if tensors.size < 2 or ratio is None or elsewhere is None or ratio_elsewhere is None:
        return None  # a factor of updates alone may be that of a learning rate
    if min(ratio, ratio_elsewhere) <= 0:
        return None
    if abs(math.log(ratio, tensors.size) - math.log(ratio_elsewhere, elsewhere.size)) > 1e-2:
        return None
    summary = f"{factor.told} {factor.value:.6g} times what one device gives, on {evidence.size} ranks"
    return Finding("world-size-factor", summary, confirmed=True)  # by the other world size


@on_tensors
def experts_off_by_their_group(tensors: Tensors) -> Finding | None:
    """Detect expert gradients that are off by the size of the group that exchanges tokens; all others are right.

    A parameter counts as an expert's if ranks hold slices of its gradient, or gathered it from slices. The rule needs
    an all_to_all, which sends the tokens.
    """
    exchanges = [event for _, event in tensors.events("collective") if event.name.startswith("all_to_all")]
    mismatches, gradients = tensors.names, [name for name in tensors.relations.held if name.kind == "grads"]
    if not exchanges or not mismatches or not set(mismatches) < set(gradients):
        return None
    ratio = tensors.factor(mismatches)
    if ratio is None or not all(_is_divided(tensors, name) for name in mismatches):
        return None
    # An exchange of integers is one of counts.
    for event in sorted(exchanges, key=lambda exchange: any("int" in tensor["dtype"] for tensor in exchange.tensors)):
        size = len(event.details.get("group", ()))
        if size > 1 and any(abs(ratio - power) <= _NEAR * power for power in (size, 1 / size)):
            times = f"{size} times" if ratio > 1 else f"1/{size} of"
            return Finding(
                "expert-gradients-factor",
                f"{few(mismatches)}: {times} what one device gives, and all other gradients are right; {event.where} "
                f"exchanges tokens with experts in a group of size {size}",
                site=event.site,
            )
    return None


def _is_divided(tensors: Tensors, name: Result) -> bool:
    """Return whether each rank holds a slice of a gradient, or has gathered it from slices."""
    if any(name in run.own or name.of in run.sharded for run in tensors.seen):
        return True
    value = tensors.seen[0].values.get(name)
    return value is not None and any(
        is_held(contents, [value], 1)
        for _, event in tensors.events("collective")
        if "all_gather" in event.name
        for contents in event.details.get("after", ())
    )


@says("world-size-factor", on_tensors)
def first_step_off_by_world_size(tensors: Tensors) -> str:
    """Detect a factor of the world size in the gradients, or in the update, of the first wrong optimizer step."""
    for step, factor, of_update in _first(tensors):
        if abs(abs(math.log(factor, tensors.size)) - 1) >= _EXACT:
            return ""
        if of_update:
            return (
                f"the gradients of optimizer step {step + 1} are right, and it changes the parameters {factor:.4g} "
                f"times as much as on one device, on {tensors.size} ranks: does the learning rate depend on the world "
                "size?"
            )
        if step == 0 and tensors.factor() is None:
            return _of_gradients(step, factor)
    return ""


@on_evidence
def clips_a_multiple(evidence: Evidence) -> Finding | None:
    """Detect a norm, found by the first clipping, that is off by the world size or the micro-batches."""
    tensors = evidence.tensors
    alone = None if tensors is None or tensors.alone is None else _clipped_norm(tensors.alone)
    if tensors is None or not alone:
        return None
    norms = [_clipped_norm(trace) for trace in tensors.traces]
    ratios = [norm / alone for norm in norms if norm is not None]
    if len(ratios) < max(1, len(norms)) or max(ratios) - min(ratios) > _NEAR * max(ratios):
        return None
    passes = f"with {evidence.micro_batches:g} backward passes in each step"
    for number, name, description in (
        (evidence.size, "world-size-factor", f"on {evidence.size} ranks"),
        (evidence.micro_batches, "accumulation-factor", passes),
    ):
        if number > 1 and any(abs(ratios[0] - power) <= _NEAR * power for power in (number, 1 / number)):
            clip = tensors.traces[0].of("clip")[0]
            return Finding(
                name,
                f"{clip.where} finds a norm of {norms[0]:.6g}, {ratios[0]:.4g} times that of one device, {description}",
                site=clip.site,
            )
    return None


def _clipped_norm(trace: RankTrace) -> float | None:
    clip = next(iter(trace.of("clip")), None)
    return None if clip is None else clip.details.get("norm")


@says("accumulation-factor", on_tensors)
def first_step_off_by_micro_batches(tensors: Tensors) -> str:
    """Detect an integer factor in the gradients of the first wrong optimizer step, if that is not the first step."""
    for step, factor, of_update in _first(tensors):
        inverse = max(factor, 1 / factor)
        if of_update or not step or inverse <= 1.5 or abs(inverse - round(inverse)) >= 2e-3:
            return ""
        return f"{_of_gradients(step, factor)}, and those of the steps before are right"
    return ""


def _first(tensors: Tensors) -> Iterator[tuple[int, float, bool]]:
    """Yield the index of the first wrong optimizer step, its factor, and whether the factor is of the update.

    Yields nothing if no positive factor fits, or on one rank.
    """
    wrong_step = tensors.first_factor
    if wrong_step is not None and wrong_step[1] > 0 and tensors.size > 1:
        yield wrong_step


def _of_gradients(step: int, factor: float) -> str:
    return f"the gradients of optimizer step {step + 1} are {factor:.4g} times those of one device"


_SAME = 1e-3  # largest relative difference between equal weights, norms or factors; a fit itself is allowed 1e-4
_UNLIKE = 1e-2
"""Smallest relative difference between unequal weights or factors: well above `_SAME`, so that rounding never
accuses."""
_NOTHING = 1e-3  # fraction of the largest weight below which a part does not contribute
_COUNTS = 4  # most elements of a collective's result that are tried as a count: steps reduce counts in small tensors
_SEVERAL = 3  # fewest elements of a gradient, so that it is no multiple of another one by chance
_COMPUTED = 1e-5
"""Tolerance, as a fraction of the largest element, for multiples of one gradient that ranks compute separately."""
_EXACT_RATIO = 1e-4  # relative tolerance between a factor and the factor that a rounded count would cause


@on_tensors
def unscales_by_its_own(tensors: Tensors) -> Finding | None:
    """Detect a scale that differs between ranks: all hold the same sum of parts, each times its own factor."""
    for _, rows in _weighed(tensors):
        subject = f"{few(tensors.names)}: ranks hold the same sum of parts"
        if (finding := _own_factors(subject, [_ratio(row, rows[0]) for row in rows])) is not None:
            return finding
    return None


@on_tensors
def steps_by_its_own_factor(tensors: Tensors) -> Finding | None:
    """Detect a scale that differs between ranks: an optimizer step finds one gradient, times a factor of each rank."""
    for number, stages in enumerate(zip(*(run.snapshots for run in tensors.seen), strict=False)):
        flat = [_flat(stage) for stage in stages]
        if any(gradient.shape != flat[0].shape for gradient in flat) or int((flat[0] != 0).sum()) < _SEVERAL:
            return None
        factors = [_multiple(gradient, flat[0]) for gradient in flat]
        if None in factors:
            return None
        subject = f"optimizer step {number + 1} finds the same gradient on all ranks"
        if (finding := _own_factors(subject, factors)) is not None:
            return finding
    return None


def _own_factors(subject: str, factors: Sequence[float | None]) -> Finding | None:
    fitting = [factor for factor in factors if factor is not None]
    if len(fitting) < len(factors) or max(map(abs, fitting)) <= (1 + _UNLIKE) * min(map(abs, fitting)):
        return None
    summary = (
        f"{subject}, but times different factors ({_each(fitting)}), as if each rank divided by its own loss scale"
    )
    return Finding("decision-per-rank", summary)


def _each(factors: Sequence[float]) -> str:
    return ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in enumerate(factors))


def _flat(stage: Mapping[Result, torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat([torch.zeros(0).double(), *(stage[n].double().flatten() for n in stage if n.kind == "grads")])


def _multiple(value: torch.Tensor, base: torch.Tensor) -> float | None:
    """Return the positive factor between all elements of `value` and of `base`; None if no factor fits."""
    factor = float((value * base).sum() / base.square().sum())
    if not math.isfinite(factor) or factor <= 0:
        return None
    return factor if bool(((value - factor * base).abs() <= _COMPUTED * value.abs().max()).all()) else None


@says("decision-per-rank", on_tensors)
def counts_parts_unlike(tensors: Tensors) -> str:
    """Detect a loss scale of each rank's own: ranks agree on a sum that gives parts of equal size unequal weights."""
    if not tensors.gradient_like or tensors.hypotheses.padded:
        return ""
    for division, rows in _weighed(tensors):
        if division.even and _alike(rows) and max(rows[0]) > (1 + _UNLIKE) * min(rows[0]) > 0:
            factors = _left_factors(tensors, division)
            if factors is None or _ratio(factors, rows[0]) is None:
                continue  # parts may also be of another size than the division says
            return (
                f"{few(tensors.names)}: the parts of ranks have equal size but unequal weights: backward leaves the "
                f"gradient of its part times a factor of each rank's own ({_each(factors)})"
            )
    return ""


def _left_factors(tensors: Tensors, division: Division) -> list[float] | None:
    """Return the factor between what backward left on each rank and the gradient of its part; None if none fits."""
    factors = []
    for trace, values in zip(tensors.traces, tensors.combined(division, "own"), strict=False):
        gradients: Left = next((event.details.get("left", {}) for event in reversed(trace.of("backward"))), {})
        pairs = [(gradients[name.of], value) for name, value in values.items() if name.of in gradients]
        norms = [(got["norm"], float(value.norm())) for got, value in pairs]
        total = math.hypot(*(norm for _, norm in norms))
        factor = math.hypot(*(norm for norm, _ in norms)) / total if total else 0.0
        sums = [(got["sum"], float(value.sum())) for got, value in pairs]
        slack = _SAME * factor * total
        if not factor or any(abs(got - factor * expected) > slack for got, expected in (*norms, *sums)):
            return None
        factors.append(factor)
    return factors or None


@says("clipped-before-synchronization", on_tensors)
def clips_each_part(tensors: Tensors) -> str:
    """Detect clipping before the mean: all parts enter the mean with the same norm."""
    if not tensors.gradient_like:
        return ""
    for division, rows in _weighed(tensors):
        norms = tensors.norms_of_parts(division)
        counted = [weight * norm for weight, norm in zip(rows[0], norms, strict=True)]
        if _alike(rows) and min(counted) > 0 and max(counted) <= (1 + _SAME) * min(counted):
            shown = ", ".join(f"{norm:.4g}" for norm in norms)
            return (
                f"{few(tensors.names)}: the parts of ranks have norms {shown}, but enter the sum with equal norms: "
                "each part was clipped before the sum"
            )
    return ""


@says("clipped-before-synchronization", on_tensors)
def limits_by_a_norm_of_parts(tensors: Tensors) -> str:
    """Detect a wrong norm in clipping: one device always reaches one norm, and ranks another one."""
    if not tensors.gradient_like or tensors.wrong_alone or not tensors.further:
        return ""
    cases = (tensors, *tensors.further)
    if any(name not in case.expected.exact for case in cases for name in tensors.names):
        return ""
    norms = [_joint_norm(case.expected.exact, tensors.names) for case in cases]
    own = [_joint_norm(case.seen[0].values, tensors.names) for case in cases]
    # A norm needs several elements to be evidence. If it is the same in all cases, it is a limit.
    several = sum(tensors.expected.exact[name].numel() for name in tensors.names) > 2
    is_limit = several and min(norms) > 0 and max(norms) <= (1 + _SAME) * min(norms)
    if not is_limit or abs(own[0] - norms[0]) <= _UNLIKE * norms[0] or tensors.factor() is not None:
        return ""
    return (
        f"{few(tensors.names)}: on one device the norm is {norms[0]:.4g} for every batch, so it is limited, and on "
        f"{tensors.size} ranks it is {own[0]:.4g}: ranks clip by the norm of a part"
    )


@says("integer-division", on_tensors)
def rounds_to_integers(tensors: Tensors) -> str:
    """Detect a mean without its fraction: wrong values are those of one device, rounded down or towards zero."""
    for name in tensors.wrong("returned"):
        cases = [(case.expected.exact.get(name), case.seen[0].values.get(name)) for case in (tensors, *tensors.further)]
        comparable = [(expected, got.double()) for expected, got in cases if expected is not None and got is not None]
        if len(comparable) < len(cases) or any(expected.shape != got.shape for expected, got in comparable):
            continue
        # A value below 1 is rounded to 0, and many other mistakes also give 0.
        telling = any(bool((got.abs() >= 1).any()) for _, got in comparable)
        expected, rounded = comparable[0]
        telling = telling or _is_quotient(tensors, expected, rounded)
        dropped = all(bool((b == a.floor()).all() | (b == a.trunc()).all()) for a, b in comparable)
        if telling and dropped and bool((expected != expected.round()).any()):
            values = few([f"{value:.6g}" for value in expected.flatten().tolist()])
            quotients = few([f"{value:.6g}" for value in rounded.flatten().tolist()])
            return f"{name} is {quotients}, and {values} on one device: the fraction is dropped"
    return ""


def _is_quotient(tensors: Tensors, expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Return whether some collective gave integers that, divided by the world size, are the right values."""
    pairs = list(zip(expected.flatten().tolist(), got.flatten().tolist(), strict=True))
    for _, event in tensors.events("collective"):
        operands = zip(event.details.get("tensors", ()), event.details.get("after", ()), strict=False)
        for values in (after.get("values", []) for tensor, after in operands if "int" in tensor["dtype"]):
            shares = [value / tensors.size for value in values]
            if len(shares) == len(pairs) and all(
                abs(share - value) <= _EXACT_RATIO * abs(share) and math.floor(share) == truncated
                for share, (value, truncated) in zip(shares, pairs, strict=True)
            ):
                return True
    return False


@says("integer-division", on_tensors)
def divides_a_count(tensors: Tensors) -> str:
    """Detect integer division of a count: the factor is the ratio of the exact and the rounded share."""
    ratio = tensors.factor_here()
    # A single number is a multiple of any other, so its factor is weak evidence.
    alone = sum(tensors.expected.exact[name].numel() for name in tensors.names) == 1
    if ratio is None or ratio <= 0 or (alone and tensors.mean_of_parts is not None):
        return ""
    for count, subject in _counts(tensors):
        if (share := _rounded_share(ratio, count, tensors.size)) is not None:
            rounded, how = share
            return (
                f"{few(tensors.names)} is {ratio:.6g} times what one device gives: {subject}, {count:g}, divided by "
                f"{tensors.size} ranks is {count / tensors.size:g}, and {rounded:g} rounded {how}, as by //"
            )
    return ""


def _rounded_share(ratio: float | None, count: int, size: int) -> tuple[int, str] | None:
    """Return the rounded share of a count that causes a factor, and how it is rounded; None if none does."""
    share, floor = count / size, count // size
    for rounded, how in ((floor, "down"), (floor + 1, "up")):
        factors = (share / rounded, rounded / share) if floor and count % size else ()
        if ratio and any(abs(ratio - factor) <= _EXACT_RATIO * factor for factor in factors):
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
        if rows is None or any(sum(abs(w) > _NOTHING * max(map(abs, row)) for w in row) < 2 for row in rows):
            continue
        same = [
            alike
            for case in tensors.further
            for alike in case.hypotheses.divisions
            if (alike.name, alike.windows) == (division.name, division.windows)
            and case.weights_of_ranks(alike) is not None
        ]
        if len(same) == len(tensors.further):
            yield division, rows


def _alike(rows: Sequence[Sequence[float]]) -> bool:
    pairs = (pair for row in rows for pair in zip(row, rows[0], strict=True))
    return all(abs(weight - expected) <= _SAME * abs(expected) for weight, expected in pairs)


def _ratio(row: Sequence[float], base: Sequence[float]) -> float | None:
    """Return the factor between `row` and `base`; None if `row` is not a multiple of `base`."""
    largest = max(range(len(base)), key=lambda index: abs(base[index]))
    factor = row[largest] / base[largest]
    slack = _SAME * abs(row[largest])
    near = all(abs(weight - factor * expected) <= slack for weight, expected in zip(row, base, strict=True))
    return factor if near and factor else None


def _joint_norm(values: Mapping[Result, torch.Tensor], names: Sequence[Result]) -> float:
    return math.hypot(*(float(values[name].double().norm()) for name in names if name in values))


_NARROW = ("float16", "bfloat16")
_ROUNDED = 2.0**-4  # relative error that rounding in a few sums may cause: bfloat16 has a precision of 8 bits


@on_tensors
def overflows(tensors: Tensors) -> Finding | None:
    """Detect an overflow of a sum: a non-finite result, or an integer that is off by a multiple of 2^bits."""
    broken = tensors.broken
    for _, event in tensors.events("collective") if broken else ():
        narrow = [tensor["dtype"] for tensor in event.tensors if tensor["dtype"] in _NARROW]
        if narrow and event.details.get("op", "sum") == "sum":
            return Finding(
                "low-precision-overflow",
                f"{event.where} adds up {narrow[0]} tensors, and {broken[0]} is not finite on {tensors.size} ranks, "
                "where it is on one device",
                site=event.site,
            )
    for name, expected, got in tensors.returned():
        for bits in (8, 16, 32) if not expected.dtype.is_floating_point else ():
            off = got.long() - expected.long()
            if bool((off != 0).any()) and bool((off % 2**bits == 0).all()):
                summary = f"{name} is off by a multiple of 2^{bits}, as an int{bits} that overflows"
                return Finding("low-precision-overflow", summary)
    return None


@on_tensors
def narrow_operand(tensors: Tensors) -> Finding | None:
    """Detect a collective that communicates a narrow dtype, if rounding can explain the wrong results."""
    for _, event in tensors.events("collective"):
        narrow = [tensor["dtype"] for tensor in event.details.get("tensors", []) if tensor["dtype"] in _NARROW]
        if narrow and _may_be_rounding(tensors):
            summary = f"{event.where} communicates {narrow[0]} tensors"
            return Finding("low-precision-arithmetic", summary, site=event.site)
    return None


def _may_be_rounding(tensors: Tensors) -> bool:
    for name in tensors.names:
        exact = tensors.expected.exact[name]
        values = [run.values[name] for run in tensors.seen if name in run.values]
        offs = [float((value.double() - exact).norm()) for value in values if value.shape == exact.shape]
        if not all(off <= _ROUNDED * float(exact.norm()) for off in offs):
            return False
    return True
