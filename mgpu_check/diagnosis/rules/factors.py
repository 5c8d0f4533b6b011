"""Detect mistakes that multiply a result, or an update, by one factor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.left import is_held
from mgpu_check.diagnosis.registry import Precedence, mistake, on_evidence, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.processes.rank_lists import few

if TYPE_CHECKING:
    from mgpu_check.diagnosis.observed import CallEvent, RankTrace
    from mgpu_check.diagnosis.results import Result
    from mgpu_check.diagnosis.tensors import Tensors

_NEAR = 1e-4
"""Relative tolerance for norms of gradients that were summed in another order."""
_EXACT = 1e-3
"""Tolerance of the exponent of the world size. The factor itself fits all elements to 1e-5."""

mistake(
    "world-size-factor",
    "a result is off by a factor that depends on the number of ranks",
    "average once: DistributedDataParallel divides by the world size already, all_reduce with SUM does not",
    of_ranks=True,
)
mistake(
    "expert-gradients-factor",
    "gradients of experts are off by the size of the group that shares the experts out",
    "scale the gradients of experts like all others: an expert sees the tokens of all ranks of its group, so its "
    "gradient is their sum; if the other gradients are averaged over ranks, divide it by the size of the group",
    of_ranks=True,
)
mistake(
    "accumulation-factor",
    "a result is off by the number of micro-batches",
    "divide each micro-batch's loss by the number of micro-batches of its own window, the last and incomplete one "
    "included, or sum and divide once by the count",
)


@on_evidence(Precedence.SUMS + 245)  # before the world size, which may be this ratio
def not_divided_by_micro_batches(evidence: Evidence) -> Finding | None:
    """Detect a factor that is the ratio of two numbers of micro-batches, and also that of the summed losses."""
    factor, ratio = evidence.factor, evidence.undivided
    if factor is None or ratio == 1 or abs(factor.value - ratio) > factor.near * ratio:
        return None
    told = (
        f"{factor.told}; a rank has {ratio:.4g} times as many micro-batches as one device, and its losses add up to "
        "as much"
    )
    if evidence.size in (ratio, 1 / ratio):
        told += "; or the loss has a factor of the world size, which is the same number"
    return Finding("accumulation-factor", told)


@on_evidence(Precedence.SUMS + 250)
def off_by_world_size(evidence: Evidence) -> Finding | None:
    """Detect a factor that is a power of the world size."""
    factor, size = evidence.factor, evidence.size
    if factor is None:
        return None
    powers = factor.powers
    if _by_micro_batches(evidence):
        # Four micro-batches on two ranks are likelier than the same mistake made twice.
        powers = tuple(power for power in powers if abs(power) == 1)
    for power in powers:
        if factor.is_power(size, power):
            return Finding("world-size-factor", _told(evidence, power))
    return None


def _told(evidence: Evidence, power: int) -> str:
    factor, size = evidence.factor, evidence.size
    assert factor is not None
    if factor.rough:
        return f"{factor.told}: the world size{' inverted' if power < 0 else ''}{factor.ending}"
    root = {1: f"{size} times", -1: f"1/{size} of", 2: f"{size}² times", -2: f"1/{size}² of"}[power]
    twice = " (averaged twice?)" if power < 0 else " (summed, not averaged?)"
    return f"{factor.told} {root} what one device gives, on {size} ranks{twice}"


@on_evidence(Precedence.SUMS + 290)
def off_by_micro_batches(evidence: Evidence) -> Finding | None:
    """Detect a factor that equals the number of micro-batches or its inverse."""
    factor = evidence.factor
    if factor is None or not _by_micro_batches(evidence):
        return None
    told = (
        f"{factor.told} {factor.value:.4g} times what one device gives, with {evidence.micro_batches:g} backward "
        "passes in each step"
    )
    if factor.rough:
        told = f"{factor.told}: the number of micro-batches{' inverted' if factor.value < 1 else ''}{factor.ending}"
    return Finding("accumulation-factor", told)


def _by_micro_batches(evidence: Evidence) -> bool:
    factor = evidence.factor
    return factor is not None and any(factor.is_power(evidence.micro_batches, power) for power in (1, -1))


@on_evidence(Precedence.POSSIBLE + 20)
def grows_with_world_size(evidence: Evidence) -> Finding | None:
    """Detect a factor that is the same power of the world size at two world sizes, or a factor of the updates."""
    factor, tensors = evidence.factor, evidence.tensors
    if factor is None or tensors is None or off_by_world_size(evidence) or _by_micro_batches(evidence):
        return None
    if tensors.factor() is not None and not _grows(tensors, factor.value):
        return None
    told = f"{factor.told} {factor.value:.6g} times what one device gives, on {evidence.size} ranks"
    return Finding("world-size-factor", told)


def _grows(tensors: Tensors, ratio: float) -> bool:
    there, other = tensors.elsewhere, tensors.factor_elsewhere()
    if tensors.size < 2 or there is None or other is None or ratio <= 0 or other <= 0:
        return False
    return abs(math.log(ratio, tensors.size) - math.log(other, there.size)) <= 1e-2


@on_tensors(Precedence.SUMS + 120)  # before the world size, which the factor also fits
def experts_off_by_their_group(tensors: Tensors) -> Finding | None:
    """Detect expert gradients that are off by the size of the group that exchanges tokens; all others are right.

    A parameter counts as an expert's if ranks hold slices of its gradient, or gathered it from slices. The rule needs
    an all_to_all, which sends the tokens.
    """
    exchanges = [event for _, event in tensors.events("collective") if event.name.startswith("all_to_all")]
    wrong, gradients = tensors.names, [name for name in tensors.relations.held if name.kind == "grads"]
    if not exchanges or not wrong or not set(wrong) < set(gradients):
        return None
    ratio = tensors.factor(wrong)
    if ratio is None or not all(_is_divided(tensors, name) for name in wrong):
        return None
    for event in sorted(exchanges, key=_is_of_counts):
        size = len(event.details.get("group", ()))
        if size > 1 and any(abs(ratio - power) <= _NEAR * power for power in (size, 1 / size)):
            times = f"{size} times" if ratio > 1 else f"1/{size} of"
            return Finding(
                "expert-gradients-factor",
                f"{few(wrong)}: {times} what one device gives, and all other gradients are right; {event.where} "
                f"exchanges tokens with experts in a group of size {size}",
                site=event.site,
            )
    return None


def _is_of_counts(exchange: CallEvent) -> bool:
    return any("int" in tensor["dtype"] for tensor in exchange.tensors)


def _is_divided(tensors: Tensors, name: Result) -> bool:
    """Return whether each rank holds a slice of a gradient, or has gathered it from slices."""
    if any(name in one.own or name.of in one.sharded for one in tensors.seen):
        return True
    value = tensors.seen[0].values.get(name)
    return value is not None and any(
        is_held(contents, [value], 1)
        for _, event in tensors.events("collective")
        if "all_gather" in event.name
        for contents in event.details.get("after", ())
    )


@on_tensors(Precedence.SUMS + 130)
def first_step_off_by_world_size(tensors: Tensors) -> Finding | None:
    """Detect a factor of the world size in the gradients, or in the update, of the first wrong optimizer step."""
    for step, factor, of_update in _first(tensors):
        if not _is_world_size(tensors, factor):
            return None
        if of_update:
            return Finding(
                "world-size-factor",
                f"the gradients of optimizer step {step + 1} are right, and it changes the parameters {factor:.4g} "
                f"times as much as on one device, on {tensors.size} ranks: does the learning rate depend on the world "
                "size?",
            )
        if step == 0 and tensors.factor() is None:
            return Finding("world-size-factor", _of_gradients(step, factor))
    return None


@on_evidence(Precedence.SUMS + 140)
def clips_a_multiple(evidence: Evidence) -> Finding | None:
    """Detect a norm, found by the first clipping, that is off by the world size or the micro-batches."""
    tensors = evidence.tensors
    alone = None if tensors is None or tensors.alone is None else _norm(tensors.alone)
    if tensors is None or not alone:
        return None
    norms = [_norm(trace) for trace in tensors.traces]
    ratios = [norm / alone for norm in norms if norm is not None]
    if len(ratios) < max(1, len(norms)) or max(ratios) - min(ratios) > _NEAR * max(ratios):
        return None
    for number, name, of in (
        (evidence.size, "world-size-factor", f"on {evidence.size} ranks"),
        (
            evidence.micro_batches,
            "accumulation-factor",
            f"with {evidence.micro_batches:g} backward passes in each step",
        ),
    ):
        if number > 1 and any(abs(ratios[0] - power) <= _NEAR * power for power in (number, 1 / number)):
            clip = tensors.traces[0].of("clip")[0]
            return Finding(
                name,
                f"{clip.where} finds a norm of {norms[0]:.6g}, {ratios[0]:.4g} times that of one device, {of}",
                site=clip.site,
            )
    return None


def _norm(trace: RankTrace) -> float | None:
    """Return the gradient norm that the first clipping found."""
    first = next(iter(trace.of("clip")), None)
    return None if first is None else first.details.get("norm")


@on_tensors(Precedence.SUMS + 150)
def first_step_off_by_micro_batches(tensors: Tensors) -> Finding | None:
    """Detect an integer factor in the gradients of the first wrong optimizer step, if that is not the first step."""
    for step, factor, of_update in _first(tensors):
        inverse = max(factor, 1 / factor)
        if of_update or not step or inverse <= 1.5 or abs(inverse - round(inverse)) >= 2e-3:
            return None
        told = f"{_of_gradients(step, factor)}, and those of the steps before are right"
        return Finding("accumulation-factor", told)
    return None


def _first(tensors: Tensors) -> Iterator[tuple[int, float, bool]]:
    """Yield the index of the first wrong optimizer step, its factor, and whether the factor is of the update.

    Yields nothing if no positive factor fits, or on one rank.
    """
    found = tensors.first_factor
    if found is not None and found[1] > 0 and tensors.size > 1:
        yield found


def _of_gradients(step: int, factor: float) -> str:
    return f"the gradients of optimizer step {step + 1} are {factor:.4g} times those of one device"


def _is_world_size(tensors: Tensors, factor: float) -> bool:
    return abs(abs(math.log(factor, tensors.size)) - 1) < _EXACT
