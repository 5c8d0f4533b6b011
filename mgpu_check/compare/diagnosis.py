"""Diagnose a difference: collect the evidence in the traces, and name the mistakes that it is evidence of.

An early difference within a step explains the later ones. So the evidence covers only the earliest, at the first step
that differs: different initial parameters hide samples, different samples hide gradients, and different gradients hide
updates. The report also names the call that leaves a gradient with a wrong factor, the axes of the script's meshes
along which ranks agree or differ, and why ranks that saw other samples than one device cannot be compared with it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu_check.compare.alignment import Aligned, Quantity, deviation
from mgpu_check.compare.comparability import OTHER_START, OTHER_START_OF_PARTS, Obstacle, divided, drawing
from mgpu_check.compare.first_difference import (
    UPDATE_RULE,
    Diagnosis,
    FirstDifference,
    changes_of,
    describe_outputs,
    factor_within,
    other_options,
    updates,
)
from mgpu_check.compare.trace import Trace
from mgpu_check.diagnosis.evidence import ByRank, Evidence, Factor, Sampler, Start
from mgpu_check.diagnosis.report import Attempts, Finding
from mgpu_check.diagnosis.rules.order import findings_of
from mgpu_check.numerics.factors import common_factor
from mgpu_check.processes.rank_lists import few, grouped, named

_NEAR_FACTOR = 1e-3  # relative deviation of two norms of the same gradient: sums in another order differ by less
_LEAST = 1e-2  # smallest distance of a factor from 1 that counts
_FEWEST = 2  # elements that must show the factor of a slice: any one element has a factor


def call_at_fault(difference: FirstDifference) -> str | None:
    """Name the call that gave the most wrong gradient its final norm, or that left it right; None if unknown."""
    main = difference.main
    if main is None or difference.quantity != "gradient":
        return None
    expected, _ = difference.aligned.values_of(difference.step, "gradient", main.name)
    return None if expected is None else _call(difference, main.name, main.worst_rank, expected.norm)


def describe_slice(difference: FirstDifference) -> str | None:
    """Describe the factor of the most wrong gradient if only slices have it, with the call; else None.
    The other slices are the control: their elements are those of one device."""
    main = difference.main
    holders = difference.aligned.holders.get(main.name) if main is not None else None
    if main is None or holders is None or difference.quantity != "gradient":
        return None
    expected, by_rank = difference.aligned.values_of(difference.step, "gradient", main.name)
    rank = main.ranks[0]
    got = by_rank.get(rank)
    mismatches = [any(holder in main.ranks for holder in ranks) for ranks in holders]
    if got is None or expected is None or all(mismatches):
        return None
    elements = zip(mismatches, got.samples, expected.samples, strict=True)
    pairs = [(g, e) for is_wrong, g, e in elements if is_wrong and e]
    factor = common_factor(pairs, least=_LEAST, of_largest=_NEAR_FACTOR) if len(pairs) >= _FEWEST else None
    if factor is None:
        return None
    call = _call(difference, main.name, rank, got.norm / factor)
    message = f"the slice of the gradient of {main.name} is {factor:.4g} times that of one device"
    return f"on {named(main.ranks)} {message}, and the other slices are right{f'; {call}' if call else ''}"


def _call(difference: FirstDifference, name: str, rank: int, expected: float) -> str | None:
    """Name the call that gave a gradient its final norm on a rank, or the call that left it with the expected norm."""
    trace = next((trace for trace in difference.aligned.ranks if trace.rank == rank), None)
    got = difference.aligned.values_of(difference.step, "gradient", name)[1].get(rank)
    calls = [] if trace is None else trace.steps[difference.step].calls
    changes = [(index, description, norms[name]) for index, (description, norms) in enumerate(calls) if name in norms]
    if got is None or not changes:
        return None
    last, description, norm = changes[-1]
    if _near(norm, got.norm):
        earliest = len(changes) - 1
        while earliest and _near(changes[earliest - 1][2], got.norm):
            earliest -= 1
        return f"{changes[earliest][1]} leaves it so"
    later = list(dict.fromkeys(description for description, _ in calls[last + 1 :]))
    if len(later) == 1:
        return f"{later[0]} runs between {description} and the step of the optimizer"
    if _near(norm, expected):
        return f"{description} leaves the gradient of one device, and a later operation changes it"
    return None


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _NEAR_FACTOR * max(abs(a), abs(b))


_SHOWN = 4  # more names or ranks would make a line too long
_LEFT = 1e-3
"""Relative to the largest number: the rest after division by the factor. Sums over elements of both signs cancel, so an
element-wise limit would be too strict."""
_GRADIENTS_APART = "at step {} the gradients that the optimizer uses differ between ranks: {}"
_NEAR = 1e-2  # relative: a factor further from 1 is significant, and a factor nearer to a number counts as that number


def evidence_of(difference: FirstDifference, attempts: Attempts) -> Evidence:
    """Return the evidence at a step that differs.
    `attempts`: records the pieces of evidence that raised an error; the result lacks them."""
    world = difference.aligned.world
    if difference.quantity == "before":
        start, differing = None, difference.differing["before"]
        if differing:
            subject = f"before its first step, {named(range(len(difference.aligned.ranks)))} differ in"
            start = Start(f"{subject} {few(differing, 3)}", "ranks start from other parameters")
        message = attempts.piece(_apart_after_the_step, difference, None) or ""
        return Evidence(world, start=start, loads=_loads(difference), gradients_apart=message)
    skips = skipped_steps(difference)
    if skips.apart:
        return Evidence(world, decisions=[skips])
    if difference.saw_other_samples:
        return of_samples(difference.aligned, difference.step)
    if difference.quantity == "gradient":
        return _of_gradient(difference, attempts)
    return _of_state(difference) if difference.quantity == "state" else _of_update(difference)


def skipped_steps(difference: FirstDifference) -> ByRank:
    """Return the skips of GradScaler on each rank, each as the number of optimizer steps before it."""
    skips = [skips_of(trace, difference.step) for trace in difference.aligned.ranks]
    counts = ", ".join(f"{len(skipped)} on rank {rank}" for rank, skipped in list(enumerate(skips))[:_SHOWN])
    return ByRank(skips, f"GradScaler skipped steps: {counts}")


def skips_of(trace: Trace, step: int) -> list[int]:
    """Return the skips of GradScaler up to a step, each as the number of optimizer steps before it."""
    return [event["after"] for event in trace.of("skipped") if event["after"] <= step]


def of_samples(aligned: Aligned, number: int) -> Evidence:
    """Return the evidence of a step whose known samples differ from those of one device, or repeat on each rank."""
    samples, world, step = aligned.samples(number), len(aligned.ranks), number + 1
    if samples.repeated_on_each_rank:
        message = f"at step {step} all {world} ranks saw the same {samples.counts[0]} samples"
        return Evidence(world, same_samples=message)
    if repeated := _repeated_epoch(aligned, number):
        return Evidence(world, repeated_epoch=repeated)
    expected, together = samples.reference, samples.together
    surplus = together - expected
    if expected - together or not surplus or together.total() == world * expected.total():
        return Evidence(world)
    message = f"at step {step} {surplus.total()} samples came again, so that each rank has the same number"
    events = [event for trace in aligned.ranks for event in trace.of("sampler")]
    samplers = [Sampler(event["length"], world, event["drop_last"]) for event in events]
    return Evidence(world, surplus=message, samplers=samplers)


def _repeated_epoch(aligned: Aligned, step: int) -> str | None:
    """Name an earlier step with the same samples, if set_epoch was never called."""
    epochs: dict[int, list[dict[str, Any]]] = {}
    for event in aligned.ranks[0].of("sampler"):
        if event["shuffle"] and not event["set_epoch"] and event["after"] <= step:
            epochs.setdefault(event["sampler"], []).append(event)
    for iterations in epochs.values():
        start, last = iterations[0]["after"], iterations[-1]["after"]
        if last == start:
            continue
        twin = start + step - last
        if aligned.samples(twin).ranks == aligned.samples(step).ranks:
            return (
                f"epoch {len(iterations)} begins at step {last + 1}; at step {step + 1} the ranks saw the samples "
                f"of step {twin + 1} again, and set_epoch was never called"
            )
    return None


def _apart_after_the_step(difference: FirstDifference) -> str | None:
    """Describe gradients that differ between ranks that start apart, and that the step does not reduce either.
    Synchronized gradients are equal on all ranks, even if the ranks start from other parameters."""
    aligned = difference.aligned
    holders = [index for index, trace in enumerate(aligned.ranks) if trace.parameters]
    differing = []
    for name in difference.differing["gradient"] if difference.differing["before"] else ():
        changes = [changes_of(difference, name, index) for index in holders if name in aligned.ranks[index].parameters]
        size = max((abs(change) for rank_changes in changes for change in rank_changes), default=0.0)
        pairs = [pair for rank_changes in changes for pair in zip(rank_changes, changes[0], strict=False)]
        if any(abs(a - b) > _NEAR * size for a, b in pairs):
            differing.append(name)
    return _GRADIENTS_APART.format(difference.step + 1, few(differing, 3)) if differing else None


def _loads(difference: FirstDifference) -> ByRank:
    ranks = difference.aligned.ranks
    counts = [len([event for event in trace.of("restore") if event["after"] <= difference.step]) for trace in ranks]
    groups = grouped((count, trace.rank) for count, trace in zip(counts, ranks, strict=True))
    clauses = [f"{count} time{'s' * (count != 1)} on {named(group)}" for count, group in groups]
    return ByRank(counts, "load_state_dict was called " + ", ".join(clauses))


def _of_gradient(difference: FirstDifference, attempts: Attempts) -> Evidence:
    aligned, differing = difference.aligned, difference.differing["gradient"]
    factor = attempts.piece(_factor_within if differing else _factor, difference, None)
    undivided = attempts.piece(_undivided, difference, 1.0)
    if differing and factor is None:
        return Evidence(aligned.world, gradients_apart=_GRADIENTS_APART.format(difference.step + 1, few(differing, 3)))
    evidence = Evidence(
        aligned.world, factor=factor, micro_batches=attempts.piece(_micro_batches, difference, 1), undivided=undivided
    )
    if differing:
        return evidence
    return replace(
        evidence,
        norms=attempts.piece(_norms, difference, ByRank()),
        normalizes=attempts.piece(_normalizes, difference, None) or "",
        may_draw=attempts.piece(_may_draw, difference, None) or "",
        uneven=attempts.piece(_uneven, difference, None) or "",
    )


_OF_DTYPE = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Like `_LEFT`, for gradients that were rounded to a narrow dtype, by two roundoffs."""


def _factor(difference: FirstDifference) -> Factor | None:
    pairs, left = [], _LEFT
    for tensor in difference.mismatches["gradient"]:
        left = max(left, _OF_DTYPE.get(difference.aligned.parameter(tensor.name).dtype, 0.0))
        expected, by_rank = difference.aligned.values_of(difference.step, "gradient", tensor.name)
        got = by_rank[tensor.worst_rank]
        if got is not None and expected is not None and expected.norm:
            both = zip(got.samples, expected.samples, strict=True)
            pairs += [(g / expected.norm, e / expected.norm) for g, e in both]
    factor = common_factor(pairs, least=_NEAR, of_largest=left)
    if not factor:
        return None
    message = f"at step {difference.step + 1} the gradient is {factor:.4g} times that of one device"
    return Factor(factor, _NEAR, message, rough=True, where=call_at_fault(difference) or "")


def _factor_within(difference: FirstDifference) -> Factor | None:
    differing = difference.differing["gradient"]
    factor = factor_within(difference.aligned, difference.step, differing, least=_NEAR, of_largest=_LEFT)
    if not factor:
        return None
    message = (
        f"ranks have different gradients before step {difference.step + 1} and equal parameters after it; the mean of "
        f"these gradients is {factor:.4g} times the gradient of one device"
    )
    return Factor(factor, _NEAR, message, rough=True)


def _norms(difference: FirstDifference) -> ByRank:
    """Return the norms of the first clip_grad_norm_ call whose norms differ between ranks.
    Synchronized gradients have the same norm on all ranks."""
    for call in zip(*(trace.clips(difference.step) for trace in difference.aligned.ranks), strict=False):
        norms = [event["norm"] for event in call]
        if max(norms) - min(norms) > difference.rounding.margin * 2.0**-22 * max(norms):
            listing = ", ".join(f"{norm:.5g} on rank {rank}" for rank, norm in list(enumerate(norms))[:_SHOWN])
            returned = f"clip_grad_norm_(…, {call[0]['most']:g}) returned the norms {listing}"
            return ByRank(norms, f"{returned}: it clips gradients before they are synchronized")
    return ByRank()


def _undivided(difference: FirstDifference) -> float:
    """Return the micro-batches of a rank relative to one device, if their losses add up to as much; else 1."""
    number, aligned = difference.step, difference.aligned
    counts = {len(trace.steps[number].losses) for trace in aligned.ranks}
    reference_loss, mean, _ = aligned.losses(number)
    of_one = len(aligned.reference.steps[number].losses)
    if len(counts) > 1 or not reference_loss or mean is None or not of_one:
        return 1.0
    ratio = counts.pop() / of_one
    return ratio if abs(mean / reference_loss - ratio) <= _NEAR * ratio else 1.0


def _normalizes(difference: FirstDifference) -> str | None:
    events = [event for event in difference.aligned.ranks[0].of("module") if event["after"] <= difference.step]
    norms = sorted({name for event in events for name in event["batch_norms"]})
    several = len(difference.aligned.ranks) > 1
    extent = f"{difference.samples.counts[0]} samples on rank 0" if several else "the samples of each GPU"
    return f"the model has {', '.join(norms)} in training mode, over {extent}" if norms else None


def _may_draw(difference: FirstDifference) -> str | None:
    random = None if difference.aligned.replayed else drawing(difference.aligned.ranks[0], difference.step)
    return None if random is None else random.reason


def _uneven(difference: FirstDifference) -> str | None:
    """Describe counts of samples or labels of the ranks that their mean losses need as weights; None if none fit."""
    step, ranks = difference.step, difference.aligned.ranks
    expected, _, losses = difference.aligned.losses(step)
    finite = [loss for loss in losses if loss is not None]
    if expected is None or len(finite) < len(ranks) or len(ranks) < 2:
        return None
    mean, tolerance = math.fsum(finite) / len(finite), difference.rounding.of_loss(step) * abs(expected)
    labels = [sum(trace.steps[step].labels) for trace in ranks]
    for subject, counts in (("labels", labels), ("samples", difference.samples.counts)):
        if not all(counts) or abs(mean - expected) <= tolerance:
            continue
        weighted = math.fsum(count * loss for count, loss in zip(counts, finite, strict=True)) / sum(counts)
        if abs(weighted - expected) <= min(tolerance, _NEAR * abs(mean - expected)):
            listing = ", ".join(f"{count:g}" for count in counts[:8])
            return (
                f"at step {step + 1} the ranks have {listing} {subject}, and their losses and gradients have "
                f"equal weight: the mean of their losses is {mean:.7g}; weighted by the {subject} it is "
                f"{weighted:.7g}, as on one device"
            )
    return None


def _of_update(difference: FirstDifference) -> Evidence:
    world, step, differing = difference.aligned.world, difference.step + 1, difference.differing["parameter"]
    loads, parted = _loads(difference), "the same gradient led to different parameters"
    if loads.apart:
        return Evidence(world, loads=loads, parted=parted)
    evidence = Evidence(world, updates=_updates(difference))
    if differing:
        subject = f"at step {step} all ranks have the gradient of one device"
        message = f"{subject}, but change {differing[0]} by different amounts"
        if states := difference.differing["state"]:
            message += f", with different values of {few(states, _SHOWN)}"
        _, updated = difference.aligned.values_of(difference.step, "parameter", differing[0])
        return replace(evidence, decisions=[ByRank(list(updated.values()), message)])
    pairs = []
    for tensor in difference.mismatches["parameter"]:
        changes = updates(difference, tensor.name)
        size = max((abs(wanted) for _, wanted in changes), default=0.0)
        pairs += [(got / size, wanted / size) for got, wanted in changes if size]
    factor = common_factor(pairs, least=_NEAR, of_largest=_LEFT)
    if factor is None:
        return evidence
    subject = f"at step {step} the gradient equals that of one device, but the update is {factor:.4g} times as large"
    message = f"{subject} (does the learning rate depend on the world size?)"
    factor_of_update = Factor(factor, _NEAR, message, rough=True)
    return replace(evidence, factor=factor_of_update, micro_batches=_micro_batches(difference))


def _micro_batches(difference: FirstDifference) -> int:
    return max(len(trace.steps[difference.step].losses) for trace in difference.aligned.ranks)


def _updates(difference: FirstDifference) -> str:
    """Describe a wrong update from correct gradients, and name the options or states of the optimizer that differ."""
    aligned = difference.aligned
    tensors = [tensor.name for tensor in difference.mismatches["parameter"]] or difference.differing["parameter"]
    subject = f"the gradients of step {difference.step + 1} are right"
    message = f"{subject}, but it updates {few(tensors, _SHOWN)} differently than on one device"
    if options := other_options(aligned, difference.step):
        return f"{message}: {'; '.join(options)}"
    if states := [tensor.name for tensor in difference.mismatches["state"]]:
        message += f", and leaves different values in {few(states, _SHOWN)}"
    # The statistics of parameters that each rank computes from its own slice.
    owners = {name: state.of for name, state in aligned.reference.states.items()}
    partial = [name for name, owner in owners.items() if owner in tensors and name in aligned.partial]
    if not partial:
        return f"{message}; {UPDATE_RULE}"
    return (
        f"{message}; each rank computes {few(partial, _SHOWN)} from its own slice ({aligned.partial[partial[0]]}), and "
        "one device from the whole: on slices the optimizer is another one, unless it reduces such statistics over the "
        "ranks"
    )


def _of_state(difference: FirstDifference) -> Evidence:
    world, aligned, step = difference.aligned.world, difference.aligned, difference.step + 1
    mismatches, differing = difference.mismatches["state"], difference.differing["state"]
    tensors = dict.fromkeys([*(tensor.name for tensor in mismatches), *differing])
    if states := [name for name in tensors if aligned.reference.states[name].key]:
        ranks = sorted({rank for tensor in mismatches if tensor.name in states for rank in tensor.ranks})
        verb, location = "is" if len(states) == 1 else "are", f" on {named(ranks)}" if ranks else ""
        subject = few(states, _SHOWN)
        message = f"after step {step} gradients and parameters are right, but {subject} {verb} wrong{location}"
        return Evidence(world, updates=message)
    if buffers := [name for name in differing if not aligned.reference.states[name].key]:
        message = f"after step {step} {few(buffers, _SHOWN)} differ{'s' * (len(buffers) == 1)} between ranks"
        if any(event.get("broadcasts") for event in aligned.ranks[0].of("module")):
            message += ", and DistributedDataParallel keeps the values of rank 0 only (broadcast_buffers is on)"
        return Evidence(world, buffers_apart=message)
    return Evidence(world)


_FAR = 1e-3  # relative deviation of initial values: equal tensors whose sums are added in another order differ by less
_SAMPLER = "shards = DistributedSampler(dataset, world_size, rank) and batch_size=global_batch // world_size"
_OF_THE_SCRIPT = ("dataset-not-split", "epochs-not-reshuffled")
"""Mistakes in the sampling that the verdict is to report as a difference, not as a reason to refuse."""


def others_from_the_start(aligned: Aligned) -> list[Obstacle]:
    """Return why runs cannot be compared, if ranks saw other samples than one device from the start.
    The list is empty if more runs are needed to decide, or if the samples are evidence of a mistake."""
    samples = aligned.samples(0)
    few = samples.common <= samples.reference.total() / 2 or samples.together.total() > samples.reference.total()
    starts = [trace.steps[0].before for trace in aligned.ranks]
    if not samples.known or samples.same or not few or any(start != starts[0] for start in starts):
        return []
    attempts = Attempts()
    evidence = attempts.of("the evidence of samples", Evidence(aligned.world), of_samples, aligned, 0)
    findings = findings_of(evidence, 1, attempts)
    # The diagnosis evaluates the same evidence later, and reports its errors.
    if findings or attempts.remarks:
        return []
    obstacles = other_samples(aligned, 0, findings)
    for name in aligned.whole_parameters:
        expected, by_rank = aligned.values_of(0, "before", name)
        shape = aligned.parameter(name).shape
        if any(deviation(value, expected, shape).size > _FAR for value in by_rank.values()):
            return [*obstacles, OTHER_START]
    return obstacles


def other_samples(aligned: Aligned, number: int, findings: Sequence[Finding]) -> list[Obstacle]:
    """Return why a step with other samples than on one device cannot be compared; empty if the samples are the mistake.
    `findings`: the mistakes that the samples are evidence of."""
    if any(finding.mistake in _OF_THE_SCRIPT for finding in findings):
        return []
    samples, world = aligned.samples(number), len(aligned.ranks)
    together, expected = samples.together, samples.reference
    repeats, lost = "", (expected - together).total()
    if repeated := sum(count for sample, count in (together - expected).items() if sample in expected):
        repeats = f"; {repeated} came a second time or to several ranks, and {lost} are on no rank"
    reason = (
        f"step {number + 1}: the ranks together saw {together.total()} samples; {samples.common} of them are among the "
        f"{expected.total()} samples of one device{repeats}: the script is not comparable without changes"
    )
    if together.total() == world * expected.total():
        return [Obstacle(reason, divided(expected.total()))]
    if findings:
        dataset = "take a multiple of the global batch as the dataset"
        return [Obstacle(reason, f"for the comparison, {dataset}, or pass drop_last=True to sampler and loader")]
    remedies = (
        "use the same global batch on one device and on the ranks at each step: one seed for the order of the samples "
        f"on all ranks, and a sampler that splits the batch ({_SAMPLER}), also at world size 1",
        "for the comparison, seed augmentation with the index of the sample, or switch augmentation off",
    )
    return [Obstacle(reason, remedy) for remedy in remedies]


@dataclass(frozen=True)
class Axis:
    """An axis of a mesh, or a partition of the world into groups of ranks."""

    name: str  # "tp", or "the groups of ranks 0-1 and of ranks 2-3"
    lines: tuple[tuple[int, ...], ...]  # the lines along the axis: ranks that differ only in their index along it
    indices: Mapping[int, int]  # rank -> its index along the axis; empty for groups without a mesh

    @property
    def size(self) -> int:
        return len(self.lines[0])


def axes_of(ranks: Sequence[Trace]) -> list[Axis]:
    """Return the axes with more than one rank, first the axes of meshes, then those of other groups."""
    axes: list[Axis] = []
    for number in range(min((len(trace.of("mesh")) for trace in ranks), default=0)):
        meshes = {trace.rank: trace.of("mesh")[number]["axes"] for trace in ranks}
        axis_names = {tuple(name for name, _, _ in mesh) for mesh in meshes.values()}
        for axis, name in enumerate(axis_names.pop() if len(axis_names) == 1 else ()):
            lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for rank, mesh in meshes.items():
                lines[tuple(index for position, (_, index, _) in enumerate(mesh) if position != axis)].append(rank)
            indices = {rank: mesh[axis][1] for rank, mesh in meshes.items()}
            axes.append(Axis(name, tuple(tuple(line) for line in lines.values()), indices))
    for partition in _partitions(ranks):
        axes.append(Axis(f"the groups of {' and of '.join(map(named, partition))}", partition, {}))
    axes_by_lines: dict[tuple[tuple[int, ...], ...], Axis] = {}
    for own in axes:
        if len({len(line) for line in own.lines}) == 1 and own.size > 1:
            axes_by_lines.setdefault(tuple(sorted(own.lines)), own)
    return list(axes_by_lines.values())


def _partitions(ranks: Sequence[Trace]) -> list[tuple[tuple[int, ...], ...]]:
    """Return each sequence of groups that the script makes one after the other and that contains each rank once."""
    partitions: list[tuple[tuple[int, ...], ...]] = []
    lines: list[tuple[int, ...]] = []
    for event in ranks[0].of("subgroup"):
        line = tuple(event["ranks"])
        if {rank for earlier in lines for rank in earlier} & set(line):
            lines = []
        lines.append(line)
        if sorted(rank for earlier in lines for rank in earlier) == [trace.rank for trace in ranks] and len(lines) > 1:
            partitions.append(tuple(lines))
            lines = []
    return partitions


def describe_axes(difference: FirstDifference) -> str | None:
    """Describe the axes along which ranks agree or differ about the first wrong tensor; None if unknown."""
    quantity, axes = difference.quantity, axes_of(difference.aligned.ranks)
    if quantity is None or not axes:
        return None
    main = difference.main
    name = main.name if main else difference.differing[quantity][0]
    clauses = [*_agreement(difference, quantity, name, axes), *_place(difference, quantity, name, axes)]
    if not clauses and main is not None:
        clauses = _clauses_of_factor(difference, quantity, name, axes)
    return "; ".join(clauses) or None


def _agreement(difference: FirstDifference, quantity: Quantity, name: str, axes: Sequence[Axis]) -> list[str]:
    agrees = {axis.name: _agrees(difference, quantity, name, axis) for axis in axes}
    agree, differ = (" and ".join(axis for axis, own in agrees.items() if own is same) for same in (True, False))
    return [f"ranks {f'agree along {agree}, and ' if agree else ''}differ along {differ}"] if differ else []


def _agrees(difference: FirstDifference, quantity: Quantity, name: str, axis: Axis) -> bool | None:
    """Return whether ranks of a line with the same part of a tensor agree; None if no two ranks share one."""
    aligned = difference.aligned
    _, by_rank = aligned.values_of(difference.step, quantity, name)
    entries = {trace.rank: trace.entry(name) for trace in aligned.ranks}
    shards, shape = aligned.shard_keys.get(name, {}), aligned.parameter(name).shape
    tolerance = difference.rounding.tolerance(difference.step, quantity, name)
    agrees: bool | None = None
    for line in axis.lines:
        for holder, neighbor in itertools.pairwise(rank for rank in line if rank in by_rank):
            entry = entries[holder]
            if shards.get(holder) != shards.get(neighbor) or (entry is not None and axis.name in entry.over):
                continue
            pair = by_rank[holder], by_rank[neighbor]
            agrees = agrees is not False and (pair[0] == pair[1] or deviation(*pair, shape).size <= tolerance)
    return agrees


def _place(difference: FirstDifference, quantity: Quantity, name: str, axes: Sequence[Axis]) -> list[str]:
    """Name the index along an axis that all wrong ranks have and no correct rank has."""
    wrong_ranks = next((set(tensor.ranks) for tensor in difference.mismatches[quantity] if tensor.name == name), set())
    _, by_rank = difference.aligned.values_of(difference.step, quantity, name)
    if not wrong_ranks or wrong_ranks == set(by_rank):
        return []
    for axis in axes:
        indices = {axis.indices.get(rank) for rank in wrong_ranks}
        ranks = {rank for rank in by_rank if axis.indices.get(rank) in indices}
        if len(indices) == 1 and None not in indices and wrong_ranks == ranks:
            return [f"it is wrong where the index along {axis.name} is {indices.pop()}"]
    return []


def _clauses_of_factor(difference: FirstDifference, quantity: Quantity, name: str, axes: Sequence[Axis]) -> list[str]:
    """Name the axis whose size equals the factor of the wrong tensor, unless the world has the same size."""
    ratio = difference.ratio(quantity, name)
    if ratio is None or not ratio:
        return []
    larger = max(ratio, 1 / ratio)
    sizes = [axis.name for axis in axes if axis.indices and abs(larger - axis.size) <= _NEAR * larger]
    if not sizes or abs(larger - difference.aligned.world) <= _NEAR * larger:
        return []
    return [f"{larger:.3g}, the size of {' or '.join(sizes)}, is the factor{' inverted' * (ratio < 1)}"]


def diagnose(difference: FirstDifference) -> Diagnosis:
    """Diagnose the first step that differs; `failed` names the parts of the diagnosis that raised an error."""
    attempts = Attempts()
    world = difference.aligned.world
    evidence = attempts.of("the evidence", Evidence(world), evidence_of, difference, attempts)
    findings = findings_of(evidence, 2 if evidence.start else 1, attempts)
    findings = [replace(finding, also=number > 0) for number, finding in enumerate(findings)]
    obstacles = attempts.of("the search for obstacles", [], _obstacles, difference, findings)
    if obstacles:  # an optimizer that updates otherwise is a consequence of them
        findings = [finding for finding in findings if finding.mistake != "optimizer-differs"]
    reason = " and ".join(dict.fromkeys(obstacle.reason for obstacle in obstacles)) or None
    todo = [obstacle.todo for obstacle in obstacles]
    axes = None if obstacles else attempts.of("the search for axes", None, describe_axes, difference)
    of_slices = None if obstacles else attempts.of("the factor of a slice", None, describe_slice, difference)
    outputs = None if obstacles else attempts.of("the outputs of modules", None, describe_outputs, difference)
    return Diagnosis(not obstacles, findings, reason, todo, attempts.remarks, axes, of_slices, outputs)


def _obstacles(difference: FirstDifference, findings: list[Finding]) -> list[Obstacle]:
    """Return why the difference lies in the inputs of the training step; empty if it lies in the step itself."""
    aligned, step, samples = difference.aligned, difference.step, difference.samples
    if difference.quantity == "before":
        if difference.differing["before"]:
            return []
        others = other_samples(aligned, step, findings) if samples.known and not samples.same else []
        return [OTHER_START_OF_PARTS if aligned.divided else OTHER_START, *others]
    parts = (parameter for trace in aligned.ranks for parameter in trace.parameters.values())
    if not findings and any(part.unplaced and not part.same_elsewhere for part in parts):
        return [OTHER_START_OF_PARTS]  # such as slices that each rank draws: constants alone have a place
    if skipped_steps(difference).apart:
        return []
    on_reference, on_rank = (skips_of(trace, step) for trace in (aligned.reference, aligned.ranks[0]))
    if on_rank != on_reference:
        counts = f"{len(on_reference)} steps on one device, and {len(on_rank)} on each rank"
        remedy = "for the comparison, start with a smaller scale: GradScaler(init_scale=1024.0)"
        return [Obstacle(f"step {step + 1}: GradScaler skipped {counts}", remedy)]
    if difference.saw_other_samples:
        return other_samples(aligned, step, findings)
    random = drawing(aligned.ranks[0], step)
    if random is not None and any(finding.mistake == "random-numbers-per-rank" for finding in findings):
        return [Obstacle(f"step {step + 1}: {random.reason}", random.todo)]
    if difference.quantity in ("parameter", "state") and (update := drawing(aligned.ranks[0], step, "update")):
        return [Obstacle(f"step {step + 1}: {update.reason}", update.todo)]
    return []
