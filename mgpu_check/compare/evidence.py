"""Collect the evidence at the first step that differs, for the rules of mistakes.

An early difference within a step explains the later ones. So the evidence covers only the earliest: different initial
parameters hide samples, different samples hide gradients, and different gradients hide updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.calls import call_at_fault
from mgpu_check.compare.first_difference import FirstDifference, changes_of, updates
from mgpu_check.compare.obstacles import drawing
from mgpu_check.compare.options import UPDATE_RULE, other_options
from mgpu_check.compare.trace import Trace
from mgpu_check.compare.within_step import factor_within
from mgpu_check.diagnosis.attempts import Attempts
from mgpu_check.diagnosis.evidence import ByRank, Evidence, Factor, Sampler, Start
from mgpu_check.numerics.factors import common_factor
from mgpu_check.processes.rank_lists import few, grouped, named

_SHOWN = 4  # more names or ranks would make a line too long
_LEFT = 1e-3
"""Relative to the largest number: the rest after division by the factor. Sums over elements of both signs cancel, so an
element-wise limit would be too strict."""
_GRADIENTS_APART = "at step {} the gradients that the optimizer uses differ between ranks: {}"
_NEAR = 1e-2
"""Relative: a factor further from 1 is significant, and a factor nearer to a number counts as that number."""


def evidence_of(difference: FirstDifference, attempts: Attempts) -> Evidence:
    """Return the evidence at a step that differs.

    Args:
        attempts: records the pieces of evidence that raised an error; the result lacks them.
    """
    world = difference.aligned.world
    if difference.kind == "before":
        told = attempts.piece(_apart_after_the_step, difference, "")
        return Evidence(world, start=_start(difference), loads=_loads(difference), gradients_apart=told)
    skips = skipped_steps(difference)
    if skips.apart:
        return Evidence(world, decisions=[skips])
    if difference.others_seen:
        return of_samples(difference.aligned, difference.step)
    if difference.kind == "gradient":
        return _of_gradient(difference, attempts)
    return _of_state(difference) if difference.kind == "state" else _of_update(difference)


def skipped_steps(difference: FirstDifference) -> ByRank:
    """Return the skips of GradScaler on each rank, each as the number of optimizer steps before it."""
    skips = [skips_of(trace, difference.step) for trace in difference.aligned.ranks]
    said = ", ".join(f"{len(found)} on rank {rank}" for rank, found in list(enumerate(skips))[:_SHOWN])
    return ByRank(skips, f"GradScaler skipped steps: {said}")


def skips_of(trace: Trace, step: int) -> list[int]:
    """Return the skips of GradScaler up to a step, each as the number of optimizer steps before it."""
    return [event["after"] for event in trace.of("skipped") if event["after"] <= step]


def of_samples(aligned: Aligned, number: int) -> Evidence:
    """Return the evidence of a step whose known samples differ from those of one device, or repeat on each rank."""
    samples, world, step = aligned.samples(number), len(aligned.ranks), number + 1
    if samples.repeated_on_each_rank:
        return Evidence(
            world, same_samples=f"at step {step} all {world} ranks saw the same {samples.counts[0]} samples"
        )
    if repeated := _repeated_epoch(aligned, number):
        return Evidence(world, repeated_epoch=repeated)
    surplus = samples.together - samples.one
    if samples.one - samples.together or not surplus or samples.together.total() == world * samples.one.total():
        return Evidence(world)
    return Evidence(
        world,
        surplus=f"at step {step} {surplus.total()} samples came again, so that each rank has the same number",
        samplers=[
            Sampler(event["length"], world, event["drop_last"])
            for trace in aligned.ranks
            for event in trace.of("sampler")
        ],
    )


def _repeated_epoch(aligned: Aligned, step: int) -> str:
    """Name an earlier step with the same samples, if set_epoch was never called; "" without any."""
    epochs: dict[int, list[dict[str, Any]]] = {}
    for event in aligned.ranks[0].of("sampler"):
        if event["shuffle"] and not event["set_epoch"] and event["after"] <= step:
            epochs.setdefault(event["sampler"], []).append(event)
    for iterations in epochs.values():
        first, last = iterations[0]["after"], iterations[-1]["after"]
        if last == first:
            continue
        twin = first + step - last
        if aligned.samples(twin).ranks == aligned.samples(step).ranks:
            return (
                f"epoch {len(iterations)} begins at step {last + 1}; at step {step + 1} the ranks saw the samples "
                f"of step {twin + 1} again, and set_epoch was never called"
            )
    return ""


def _start(difference: FirstDifference) -> Start | None:
    apart = difference.apart["before"]
    if not apart:
        return None
    ranks = named(range(len(difference.aligned.ranks)))
    return Start(f"before its first step, {ranks} differ in {few(apart, 3)}", "ranks start from other parameters")


def _apart_after_the_step(difference: FirstDifference) -> str:
    """Describe gradients that differ between ranks that start apart, and that the step does not reduce either.

    Synchronized gradients are equal on all ranks, even if the ranks start from other parameters.
    """
    aligned = difference.aligned
    holders = [index for index, trace in enumerate(aligned.ranks) if trace.parameters]
    apart = []
    for name in difference.apart["gradient"] if difference.apart["before"] else ():
        changes = [changes_of(difference, name, index) for index in holders if name in aligned.ranks[index].parameters]
        size = max((abs(change) for some in changes for change in some), default=0.0)
        if any(abs(a - b) > _NEAR * size for some in changes for a, b in zip(some, changes[0], strict=False)):
            apart.append(name)
    return _GRADIENTS_APART.format(difference.step + 1, few(apart, 3)) if apart else ""


def _loads(difference: FirstDifference) -> ByRank:
    """Return how often each rank called load_state_dict up to this step."""
    ranks = difference.aligned.ranks
    counts = [len([event for event in trace.of("restore") if event["after"] <= difference.step]) for trace in ranks]
    groups = grouped((count, trace.rank) for count, trace in zip(counts, ranks, strict=True))
    parts = [f"{count} time{'s' * (count != 1)} on {named(some)}" for count, some in groups]
    return ByRank(counts, "load_state_dict was called " + ", ".join(parts))


def _of_gradient(difference: FirstDifference, attempts: Attempts) -> Evidence:
    world, apart = difference.aligned.world, difference.apart["gradient"]
    factor = attempts.piece(_factor_within if apart else _factor, difference, None)
    micro_batches = attempts.piece(_micro_batches, difference, 1)
    undivided = attempts.piece(_undivided, difference, 1.0)
    if apart:
        if factor is None:
            return Evidence(world, gradients_apart=_GRADIENTS_APART.format(difference.step + 1, few(apart, 3)))
        return Evidence(world, factor=factor, micro_batches=micro_batches, undivided=undivided)
    return Evidence(
        world,
        norms=attempts.piece(_norms, difference, ByRank()),
        factor=factor,
        micro_batches=micro_batches,
        undivided=undivided,
        normalizes=attempts.piece(_normalizes, difference, ""),
        may_draw=attempts.piece(_may_draw, difference, ""),
        uneven=attempts.piece(_uneven, difference, ""),
    )


def _factor(difference: FirstDifference) -> Factor | None:
    pairs = []
    for wrong in difference.wrong["gradient"]:
        expected, here = difference.aligned.found(difference.step, "gradient", wrong.name)
        got = here[wrong.worst_rank]
        if got is not None and expected is not None and expected.norm:
            both = zip(got.samples, expected.samples, strict=True)
            pairs += [(g / expected.norm, e / expected.norm) for g, e in both]
    factor = common_factor(pairs, least=_NEAR, of_largest=_LEFT)
    if not factor:
        return None
    told = f"at step {difference.step + 1} the gradient is {factor:.4g} times that of one device"
    return Factor(factor, _NEAR, told, rough=True, where=call_at_fault(difference))


def _factor_within(difference: FirstDifference) -> Factor | None:
    apart = difference.apart["gradient"]
    factor = factor_within(difference.aligned, difference.step, apart, least=_NEAR, of_largest=_LEFT)
    if not factor:
        return None
    told = (
        f"ranks have different gradients before step {difference.step + 1} and equal parameters after it; the mean of "
        f"these gradients is {factor:.4g} times the gradient of one device"
    )
    return Factor(factor, _NEAR, told, rough=True)


def _norms(difference: FirstDifference) -> ByRank:
    """Return the norms of the first clip_grad_norm_ call whose norms differ between ranks.

    Synchronized gradients have the same norm on all ranks.
    """
    calls = [[e for e in trace.of("clip") if e["after"] == difference.step] for trace in difference.aligned.ranks]
    for call in zip(*calls, strict=False):
        norms = [event["norm"] for event in call]
        if max(norms) - min(norms) > difference.rounding.margin * 2.0**-22 * max(norms):
            said = ", ".join(f"{norm:.5g} on rank {rank}" for rank, norm in list(enumerate(norms))[:_SHOWN])
            most = f"clip_grad_norm_(…, {call[0]['most']:g})"
            return ByRank(norms, f"{most} returned the norms {said}: it clips gradients before they are synchronized")
    return ByRank()


def _micro_batches(difference: FirstDifference) -> int:
    return max(len(trace.steps[difference.step].losses) for trace in difference.aligned.ranks)


def _undivided(difference: FirstDifference) -> float:
    """Return the micro-batches of a rank relative to one device, if their losses add up to as much; else 1."""
    number, aligned = difference.step, difference.aligned
    counts = {len(trace.steps[number].losses) for trace in aligned.ranks}
    one, mean, _ = aligned.losses(number)
    of_one = len(aligned.one.steps[number].losses)
    if len(counts) > 1 or not one or mean is None or not of_one:
        return 1.0
    ratio = counts.pop() / of_one
    return ratio if abs(mean / one - ratio) <= _NEAR * ratio else 1.0


def _normalizes(difference: FirstDifference) -> str:
    events = [event for event in difference.aligned.ranks[0].of("module") if event["after"] <= difference.step]
    norms = sorted({name for event in events for name in event["batch_norms"]})
    if not norms:
        return ""
    several = len(difference.aligned.ranks) > 1
    part = f"{difference.samples.counts[0]} samples on rank 0" if several else "the samples of each GPU"
    return f"the model has {', '.join(norms)} in training mode, over {part}"


def _may_draw(difference: FirstDifference) -> str:
    random = None if difference.aligned.replayed else drawing(difference.aligned.ranks[0], difference.step)
    return "" if random is None else random.why


def _uneven(difference: FirstDifference) -> str:
    """Describe counts of samples or labels of the ranks that their mean losses need as weights; "" if none fit."""
    step, ranks = difference.step, difference.aligned.ranks
    one, _, losses = difference.aligned.losses(step)
    known = [loss for loss in losses if loss is not None]
    if one is None or len(known) < len(ranks) or len(ranks) < 2:
        return ""
    mean, tolerance = math.fsum(known) / len(known), difference.rounding.of_loss(step) * abs(one)
    labels = [sum(trace.steps[step].labels) for trace in ranks]
    for what, counts in (("labels", labels), ("samples", difference.samples.counts)):
        if not all(counts) or abs(mean - one) <= tolerance:
            continue
        weighted = math.fsum(count * loss for count, loss in zip(counts, known, strict=True)) / sum(counts)
        if abs(weighted - one) <= min(tolerance, _NEAR * abs(mean - one)):
            told = ", ".join(f"{count:g}" for count in counts[:8])
            return (
                f"at step {step + 1} the ranks have {told} {what}, and their losses and gradients have equal weight: "
                f"the mean of their losses is {mean:.7g}; weighted by the {what} it is {weighted:.7g}, as on one device"
            )
    return ""


def _of_update(difference: FirstDifference) -> Evidence:
    """Return the evidence of a step with correct gradients and wrong parameters after the update."""
    world, step, apart = difference.aligned.world, difference.step + 1, difference.apart["parameter"]
    loads, parted = _loads(difference), "the same gradient led to different parameters"
    if loads.apart:
        return Evidence(world, loads=loads, parted=parted)
    if apart:
        told = f"at step {step} all ranks have the gradient of one device, but change {apart[0]} by different amounts"
        if states := difference.apart["state"]:
            told += f", with different values of {few(states, _SHOWN)}"
        _, updated = difference.aligned.found(difference.step, "parameter", apart[0])
        return Evidence(world, decisions=[ByRank(list(updated.values()), told)], updates=_updates(difference))
    pairs = []
    for wrong in difference.wrong["parameter"]:
        changes = updates(difference, wrong.name)
        size = max((abs(wanted) for _, wanted in changes), default=0.0)
        pairs += [(got / size, wanted / size) for got, wanted in changes if size]
    factor = common_factor(pairs, least=_NEAR, of_largest=_LEFT)
    if factor is None:
        return Evidence(world, updates=_updates(difference))
    told = (
        f"at step {step} the gradient equals that of one device, but the update is {factor:.4g} times as large (does "
        "the learning rate depend on the world size?)"
    )
    return Evidence(
        world,
        factor=Factor(factor, _NEAR, told, rough=True),
        micro_batches=_micro_batches(difference),
        updates=_updates(difference),
    )


def _updates(difference: FirstDifference) -> str:
    """Describe a wrong update from correct gradients, and name the options or states of the optimizer that differ."""
    names = [wrong.name for wrong in difference.wrong["parameter"]] or difference.apart["parameter"]
    told = (
        f"the gradients of step {difference.step + 1} are right, but it updates {few(names, _SHOWN)} differently than "
        "on one device"
    )
    if options := other_options(difference.aligned, difference.step):
        return f"{told}: {'; '.join(options)}"
    states = [wrong.name for wrong in difference.wrong["state"]]
    if states:
        told += f", and leaves different values in {few(states, _SHOWN)}"
    return f"{told}; {_of_slices(difference.aligned, names) or UPDATE_RULE}"


def _of_slices(aligned: Aligned, names: Sequence[str]) -> str:
    """Describe the statistics of parameters that each rank computes from its own slice; "" if there are none."""
    kept = [name for name, state in aligned.one.states.items() if state.of in names]
    partial = [name for name in kept if name in aligned.partial]
    if not partial:
        return ""
    return (
        f"each rank computes {few(partial, _SHOWN)} from its own slice ({aligned.partial[partial[0]]}), and one "
        "device from the whole: on slices the optimizer is another one, unless it reduces such statistics over the "
        "ranks"
    )


def _of_state(difference: FirstDifference) -> Evidence:
    """Return the evidence of a step with correct parameters, but wrong states of the optimizer or wrong buffers."""
    world, aligned, step = difference.aligned.world, difference.aligned, difference.step + 1
    names = [*(wrong.name for wrong in difference.wrong["state"]), *difference.apart["state"]]
    states = [name for name in dict.fromkeys(names) if aligned.one.states[name].key]
    if states:
        ranks = sorted({r for wrong in difference.wrong["state"] if wrong.name in states for r in wrong.ranks})
        where = f" on {named(ranks)}" if ranks else ""
        told = (
            f"after step {step} gradients and parameters are right, but {few(states, _SHOWN)} {_is(states)} "
            f"wrong{where}"
        )
        return Evidence(world, updates=told)
    apart = [name for name in difference.apart["state"] if not aligned.one.states[name].key]
    if apart:
        told = f"after step {step} {few(apart, _SHOWN)} differ{'s' * (len(apart) == 1)} between ranks"
        if any(event.get("broadcasts") for event in aligned.ranks[0].of("module")):
            told += ", and DistributedDataParallel keeps the values of rank 0 only (broadcast_buffers is on)"
        return Evidence(world, buffers_apart=told)
    return Evidence(world)


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
