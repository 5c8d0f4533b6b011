"""Detect mistakes in how ranks combine the gradients and metrics of their parts, reuse gradients, and clip them.

Gradients of an earlier step or micro-batch may be reused by a later one, or gradients be clipped by a wrong norm. A
part of the step may run more often than on one device: in each micro-batch, or again for backward. Means, statistics
and other values may be of parts or shards, where the whole batch or all shards count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.divergence import module_of_partial_gradients
from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.observations import CallEvent, Change, Division, Result, is_clipped, norms_of
from mgpu_check.diagnosis.report import Finding, on_evidence, on_experiments, on_tensors
from mgpu_check.diagnosis.rules import on_change, says
from mgpu_check.processes.rank_lists import few, named

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.tensors import Tensors


_CLOSE = 1e-4  # tolerance of a sum over ranks, as a fraction of its largest element
_LEAST_ELEMENTS = 4  # fewer numbers may add up by chance


@says("gradients-not-synchronized", on_tensors)
def adds_up_no_parts_of_an_activation(tensors: Tensors) -> str:
    """Detect an activation whose gradient each rank has a part of, because nothing adds up the parts in backward."""
    module = module_of_partial_gradients(tensors)
    if module is None:
        return ""
    name, ranks = module
    return (
        f"each of {named(ranks)} has a part of the gradient of the output of {name}: their sum is the gradient of one "
        "device, and nothing adds them up in backward, where the output enters layers that ranks divide"
    )


@on_tensors
def adds_up_to_the_whole(tensors: Tensors) -> Finding | None:
    """Detect gradients that differ between ranks, and whose sum or mean over ranks is the gradient of one device.

    Ranks may have clipped them since, by one factor that other gradients show. Multiples of the gradient of one device
    are no evidence: their sum is one as well.
    """
    mismatches = tensors.wrong("grads")
    split = [name for name in mismatches if name in tensors.relations.split]
    others = [name for name in mismatches if name not in split]
    for how, count in (("sum", 1), ("mean", tensors.size)):
        cases = (tensors, *tensors.further)
        if split and all(_is_sum_of_ranks(case, name, others, count) for name in split for case in cases):
            verb = "differs" if len(split) == 1 else "differ"
            also = f", times a factor that {few(others)} have, too" if others else ""
            summary = f"{few(split)} {verb} between ranks, and the {how} over ranks is that of one device{also}"
            return _local(tensors, split, summary)
    return None


def _is_sum_of_ranks(case: Tensors, name: Result, others: Sequence[Result], count: int) -> bool:
    """Return whether a gradient's sum over ranks is `count` times the right one, times others' factor."""
    factor = case.factor_here(others) if others else 1.0
    exact = case.expected.exact.get(name)
    values = [run.values[name].double() for run in case.seen if name in run.values]
    if factor is None or exact is None or len(values) < case.size or exact.numel() < _LEAST_ELEMENTS:
        return False
    if any(value.shape != exact.shape for value in values) or all(
        abs(float((value * exact).sum())) >= (1 - _CLOSE) * float(value.norm() * exact.norm()) for value in values
    ):
        return False
    expected = factor * count * exact
    off = (sum(values[1:], values[0]) - expected).abs()
    return bool(exact.any()) and bool((off <= _CLOSE * expected.abs().max()).all())


@on_tensors
def each_rank_its_own(tensors: Tensors) -> Finding | None:
    """Detect results that are not synchronized: each rank holds the result of its own part."""
    if not tensors.own_parts:
        return None
    division, local = tensors.own_parts[0]
    verb = "is" if len(local) == 1 else "are"
    return _local(tensors, local, f"{few(local)} {verb} each rank's own, of {division.name}")


@on_change("synchronize")
def right_if_always_synchronized(change: Change) -> Finding:
    """Detect gradients that a wrapper synchronized in the wrong backward pass."""
    summary = f"if each backward pass synchronizes gradients, and not as {change.where} says, the step is right"
    advice = "leave no_sync before the forward pass of the last micro-batch, and not earlier or later"
    return Finding("gradients-not-synchronized", summary, site=change.site, advice=advice)


@on_experiments
def stays_as_backward_left_it(tensors: Tensors) -> Finding | None:
    """Detect gradients that each rank's own backward left, and maybe clipped, where combining them makes it right."""
    local = [name for name in tensors.relations.split if name.kind == "grads"]
    lasts = [next(iter(reversed(trace.of("backward"))), None) for trace in tensors.traces]
    gradients = [event.details.get("left", {}) for event in lasts if event is not None]
    if len(gradients) < max(2, len(lasts)):
        return None
    clips = [next(iter(trace.of("clip")), None) for trace in tensors.traces]
    clipped = is_clipped(gradients, [None if clip is None else clip.details.get("norm") for clip in clips])
    own = [name for name in local if (clipped and name.of in gradients[0]) or tensors.stays_as_left(name, gradients)]
    if not own and all(tensors.stays_as_left(name, gradients, scaled=True) for name in local):
        own = local
    change = tensors.right_with("combine")
    if not own or change is None:
        return None
    site = next(event.site for event in lasts if event is not None)
    norms = norms_of(own[0].of, gradients)
    also = f"; with their {change.combination} the step is right"
    summary = f"{few(own)} is the result of each rank's own backward ({site}), with norm {norms}{also}"
    return _local(tensors, own, summary, over=few([named(ranks) for ranks in change.now]))


@on_tensors
def outside_of_the_wrapper(tensors: Tensors) -> Finding | None:
    """Detect gradients that differ between ranks, if the calls show that nothing combined them."""
    kinds = ("grads", "returned") if tensors.account else ("grads",)
    local = [name for name in tensors.relations.split if name.kind in kinds]
    if not local or each_rank_its_own(tensors) or not (reason := _nothing_combines(tensors, local)):
        return None
    return _local(tensors, local, f"{few(local)} differ from rank to rank{reason}", "")


def _local(tensors: Tensors, local: list[Result], summary: str, reason: str | None = None, over: str = "") -> Finding:
    if all(_is_buffer(tensors, name) for name in local):
        return Finding("buffers-drift", summary + ": nothing synchronizes them")
    if not tensors.gradient_like or not any(_is_like_a_gradient(tensors, name) for name in local):
        return Finding("value-of-one-rank", f"{summary}: nothing has combined them")
    # Without a wrapper, a collective by hand is missing.
    over = over or " and ".join(axis for axis, size in tensors.mesh if size > 1) or named(range(tensors.size))
    advice = f"all-reduce {few(local)} over {over} after backward, before anything else reads it"
    wrap = tensors.first("wrap")
    if reason is None and not (reason := _nothing_combines(tensors, local)):
        unused = wrap is not None and not wrap.details["find_unused"]
        reason = "; some parameters may be unused, and find_unused_parameters is False" if unused else ""
    return Finding("gradients-not-synchronized", summary + (reason or ""), advice="" if wrap is not None else advice)


def _is_like_a_gradient(tensors: Tensors, name: Result) -> bool:
    """Return whether a result belongs to the model, or has the shape of a parameter or the size of all."""
    parameters = [value for key, value in tensors.seen[0].values.items() if key.kind == "params"]
    value = tensors.seen[0].values.get(name)
    if tensors.is_of_model(name) or value is None or not value.dim():
        return tensors.is_of_model(name)
    total = sum(parameter.numel() for parameter in parameters)
    return value.numel() == total or any(value.shape == parameter.shape for parameter in parameters)


def _is_buffer(tensors: Tensors, name: Result) -> bool:
    """Return whether a result is a buffer, or a returned copy of a buffer on each rank."""
    if name.kind == "buffers":
        return True
    values = [run.values for run in tensors.seen]
    return any(
        all(buffer in own and name in own and own[buffer].equal(own[name]) for own in values)
        for buffer in values[0]
        if buffer.kind == "buffers"
    )


def _nothing_combines(tensors: Tensors, local: list[Result]) -> str:
    """Return a clause on the calls that show that nothing combined the gradients; "" if unknown."""
    wrap = tensors.first("wrap")
    if wrap is None:
        return "" if any(True for _ in tensors.events("collective")) else "; no collective was called"
    covered = {name for _, event in tensors.events("wrap") for name in event.details["parameters"]}
    outside = [name.of for name in local if name.of not in covered]
    if outside:
        were = "was" if len(outside) == 1 else "were"
        return f"; {few(outside)} {were} in no DistributedDataParallel when it was made ({wrap.site})"
    if tensors.first("no_sync") is not None:
        return "; backward ran under no_sync"
    if tensors.first("forward") is None:
        return "; DistributedDataParallel was made, but never called: the module inside was"
    return ""


@on_change("once")
def right_with_an_addend_once(change: Change) -> Finding:
    """Detect an addend of a sum over ranks that each rank has, such as a residual."""
    addend = ("first", "second")[change.value]
    summary = (
        f"{change.where} adds up sums of two terms; with the {addend} term of one rank only, the step is right: each "
        f"of {change.size} ranks adds it"
    )
    return Finding("partial-result-added-on-every-rank", summary, site=change.site)


@says("partial-result-added-on-every-rank", on_tensors)
def added_on_every_rank(tensors: Tensors) -> str:
    """Detect a term that every rank adds before the sum: the result has it once per rank instead of once."""
    if tensors.size < 2:
        return ""
    vectors = ((name, value) for name, value in tensors.seen[0].initial.items() if value.dim() == 1)
    parameters = {name: value.double() for name, value in vectors if value.is_floating_point()}
    for name in tensors.wrong("returned"):
        exact, got = tensors.expected.exact.get(name), tensors.seen[0].values.get(name)
        if exact is None or got is None or exact.shape != got.shape or not exact.dim():
            continue
        excess = (got.double() - exact) / (tensors.size - 1)
        for owner, value in parameters.items():
            if exact.shape[-1] == len(value) and tensors.same(excess, value.expand_as(excess), got):
                return (
                    f"{name} is too large by {tensors.size - 1} times {owner}: each of {tensors.size} ranks adds it "
                    "before the sum"
                )
    alternative = None if tensors.broken else tensors.alternative("biases-several-times")
    if alternative is None:
        return ""
    return (
        f"{tensors.names[0]} is what one device gives with {tensors.size} times {few(alternative.names)}: each of "
        f"{tensors.size} ranks adds it before the sum"
    )


_LEFT_OUT, _UNLIKE, _ONCE = 1e-3, 1e-2, 1e-3
"""Limits on weights: a smaller weight counts as 0, a larger difference as unequal, a smaller distance from 1 as 1."""


@says("stale-gradients", on_tensors)
def adds_what_was_left(tensors: Tensors) -> str:
    """Detect stale gradients: the error of a step's gradient is a multiple of the gradient of the step before."""
    stages, exact = tensors.seen[0].snapshots, tensors.expected.snapshots
    for step in range(1, min(len(stages), len(exact))):
        for name, value in exact[step].items():
            if name.kind != "grads" or name not in stages[step] or int((value != 0).sum()) < 2:
                continue  # a single number is a multiple of any other
            got, before = stages[step][name].double(), exact[step - 1].get(name)
            if before is None or not before.shape == got.shape == value.shape:
                continue
            first, allowed = stages[step - 1].get(name), tensors.expected.allowances[step - 1].get(name)
            if first is None or allowed is None or bool(((first.double() - before).abs() > allowed).any()):
                continue  # the gradient of the step before is wrong itself
            excess, before = got - value.double(), before.double()
            share = float((excess * before).sum() / before.square().sum().clamp_min(1e-300))
            if share > _LEFT_OUT and tensors.same(excess, share * before, got):
                added = "that" if abs(share - 1) < _ONCE else f"{share:.4g} times that"
                return f"{name} in optimizer step {step + 1} is that of one device, and {added} of step {step} added"
    return ""


@on_tensors
def counts_windows_unlike(tensors: Tensors) -> Finding | None:
    """Detect micro-batches with unequal weights: one is reduced again with a later one, or left out."""
    divisions = tensors.hypotheses.divisions
    if not tensors.gradient_like or any(tensors.is_combined(each, "mean") for each in divisions):
        return None  # all micro-batches have the same weight
    for division in divisions:
        if division.windows < 2 or division.along:
            continue
        weights = tensors.weights_of_windows(division)
        if weights is None or max(weights) - min(weights) < _UNLIKE or min(weights) < -_LEFT_OUT:
            continue
        counts = ", ".join(f"{weight if abs(weight) > _LEFT_OUT else 0:.3g}" for weight in weights)
        summary = f"in {tensors.names[0]} the micro-batches of each rank count {counts} times"
        left_out = any(abs(weight) <= _LEFT_OUT for weight in weights)
        if left_out and (reduced := _reduced_between(tensors)) is not None:
            reduction = f"{reduced.where} has reduced it, and its result was overwritten"
            return Finding("result-discarded", f"{summary}: one of them is left out, though {reduction}")
        if left_out:
            return Finding("samples-missed", f"{summary}: one of them is left out")
        return Finding("stale-gradients", f"{summary}: what was reduced already is reduced again")
    return None


def _reduced_between(tensors: Tensors) -> CallEvent | None:
    """Return the first collective on several numbers between two backward passes of rank 0."""
    passes = 0
    for event in tensors.traces[0].of("backward", "collective") if tensors.traces else ():
        passes += event.kind == "backward"
        reduces = event.kind == "collective" and any(math.prod(tensor["shape"]) > 1 for tensor in event.tensors)
        if reduces and 0 < passes < len(tensors.traces[0].of("backward")):
            return event
    return None


@on_tensors
def clips_first(tensors: Tensors) -> Finding | None:
    """Detect clipping before a collective on the gradients, without a backward or a step between them."""
    if not tensors.traces or not tensors.names or not tensors.gradient_like:
        return None
    clip: CallEvent | None = None
    for event in tensors.traces[0].events:
        if event.kind == "clip":
            clip = event
        elif event.kind in ("backward", "step"):
            clip = None
        elif event.kind == "collective" and clip is not None:
            large = any(len(tensor["shape"]) and "value" not in tensor for tensor in event.tensors)
            on_gradient = any(tensor["result"] and tensor["result"].kind == "grads" for tensor in event.tensors)
            if event.name.startswith(("all_reduce", "reduce", "all_gather")) and (on_gradient or large):
                summary = f"{clip.where} runs before {event.name} of the gradients ({event.site})"
                return Finding("clipped-before-synchronization", summary, site=clip.site)
    return None


@says("clipped-before-synchronization", on_evidence)
def clips_by_other_norms(evidence: Evidence) -> str:
    """Detect clipping that found a different norm on each rank."""
    return evidence.norms.told if evidence.norms.apart else ""


@says("clipped-before-synchronization", on_tensors)
def clips_parts(tensors: Tensors) -> str:
    """Detect clipping before the mean: gradients are the mean of the parts', and right while no limit applies."""
    mean = tensors.mean_of_parts
    if mean is None or not mean[0].even or mean[0].along or not _is_limited(tensors):
        return ""
    return (
        f"{tensors.names[0]} is the mean of what each rank computes for its own part, and right for a batch that is "
        "scaled down: a limit on the norm is applied before the mean"
    )


@says("clipped-before-synchronization", on_tensors)
def limits_another_norm(tensors: Tensors) -> str:
    """Detect clipping by the wrong norm: ranks agree, and are right only if the batch is scaled down."""
    if not tensors.names or tensors.relations.split or tensors.wrong_alone or not _is_limited(tensors):
        return ""
    return (
        f"{few(tensors.names)} is right for a batch that is scaled down: a limit is applied to another norm than that "
        "of the whole gradient"
    )


def _is_limited(tensors: Tensors) -> bool:
    """Return whether gradients are right for a batch that is scaled down, and otherwise reach a limit."""
    return tensors.gradient_like and tensors.right_when_small is True and _shows_a_limit(tensors)


_SAME = 1e-4  # largest relative difference between two norms that one limit was applied to


def _shows_a_limit(tensors: Tensors) -> bool:
    """Return whether gradients are limited: clipping was called, or other samples reach the same largest size.

    The size is the total norm, the largest norm of a tensor, or the largest element of the gradients of one device. A
    step that is right for scaled-down batches proves no limit: softmax and normalization then give much the same for
    all.
    """
    if any(True for _ in tensors.events("clip")) or (tensors.alone is not None and tensors.alone.of("clip")):
        return True
    several = [gradients for case in (tensors, *tensors.further) for gradients in _gradients(case)]
    norms = [[float(value.norm()) for value in gradients] for gradients in several]
    elements = [max(float(value.abs().max()) for value in gradients if value.numel()) for gradients in several]
    for sizes in ([math.hypot(*each) for each in norms], [max(each) for each in norms], elements):
        highest = max(sizes, default=0.0)
        if sum(size >= (1 - _SAME) * highest > 0 for size in sizes) > 1:
            return True
    return False


def _gradients(case: Tensors) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients of one device, or else its parameter updates, for the whole batch and for each part."""
    initial = case.expected.single.initial
    # Use one division only: other divisions may have the same parts, which would then count twice.
    windows_by_rank = case.hypotheses.divisions[0].parts if case.hypotheses.divisions else []
    for values in (case.expected.exact, *(window for windows in windows_by_rank for window in windows)):
        gradients = [value.double() for name, value in values.items() if name.kind == "grads"] or [
            value.double() - initial[name.of].double()
            for name, value in values.items()
            if name.kind == "params" and name.of in initial and initial[name.of].shape == value.shape
        ]
        if sum(value.numel() for value in gradients) > 1 and all(bool(value.isfinite().all()) for value in gradients):
            yield gradients


@on_change("last")
def written_several_times(change: Change) -> Finding:
    """Detect writes that a step repeats, if the step is right when only the last of them happens."""
    if isinstance(change.value, tuple):
        summary = f"{change.where} is called {change.value[0]} times in each step; with the last call alone"
    else:
        summary = (
            f"{change.where} writes to the same tensors {change.value} times in each step; with the last write alone"
        )
    summary += " the step is right"
    return Finding("updated-too-often", summary, site=change.site)


@on_change("keep")
def recomputes_something_else(change: Change) -> Finding:
    """Detect recomputation that changes the results: the step is right if activations are kept."""
    summary = f"{change.where} computes activations again in backward; if it keeps them, the step is right"
    return Finding("recomputation-differs", summary, site=change.site)


@on_change("weigh")
def counts_micro_batches_alike(change: Change) -> Finding:
    """Detect means over micro-batches of unlike sizes that count alike."""
    summary = (
        f"the micro-batches of {change.where} have unlike numbers of samples; with each backward pass weighed by its "
        "samples the step is right"
    )
    advice = (
        "divide each micro-batch's sum by the samples of the whole step, not its mean by the number of micro-batches"
    )
    return Finding("mean-of-means", summary, site=change.site, advice=advice)


@says("batch-statistics-per-rank", on_evidence)
def statistics_of_parts(evidence: Evidence) -> str:
    """Detect batch statistics of each rank's shard, if the gradients are the mean of the shards' gradients."""
    tensors = evidence.tensors
    if not evidence.normalizes or tensors is None:
        return ""
    if not any(tensors.is_combined(division, "mean") for division in tensors.hypotheses.divisions):
        return ""
    return f"{evidence.normalizes}, and the gradients are the mean of the shards' gradients"


@on_tensors
def mean_of_metrics(tensors: Tensors) -> Finding | None:
    """Detect a metric that is the mean over equal parts, although one device gives a different value."""
    mean = tensors.mean_of_parts
    if mean is None or not mean[0].even or tensors.gradient_like or mean[0].along:
        return None
    return Finding(
        "mean-of-means" if tensors.hypotheses.padded else "wrong-reduction",
        f"{tensors.names[0]} is the mean over ranks of each rank's own value{mean[1]}, which is not the value for "
        "all samples together",
    )


@says("batch-statistics-per-rank", on_tensors)
def takes_parts_for_the_batch(tensors: Tensors) -> str:
    """Detect gradients that are the mean of the parts', while one device gives no weighted sum of the parts."""
    mean = tensors.mean_of_parts
    if mean is None or mean[0].along or not tensors.gradient_like or clips_parts(tensors):
        return ""
    if tensors.is_sum_of_parts(mean[0]) is not False:
        return ""
    return (
        f"{tensors.names[0]} is the mean of what each rank computes for its own part ({mean[0].name}){mean[1]}, but "
        "no weighted sum of the parts gives the result of one device: something in the step depends on all samples, "
        "and each rank has only its own"
    )


@says("mean-of-means", on_tensors)
def mean_of_parts(tensors: Tensors) -> str:
    """Detect an unweighted mean over the parts, where the parts should have other weights."""
    mean = tensors.mean_of_parts
    if mean is None or clips_parts(tensors) or mean_of_metrics(tensors) or tensors.is_sum_of_parts(mean[0]) is False:
        return ""
    division, also = mean
    if also and tensors.factor() is not None:
        return ""  # one factor explains the difference, so the weights are right
    windows = f", of {division.windows} micro-batches each" if division.windows > 1 else ""
    counts = ", ".join(map(str, division.counts))
    return (
        f"{tensors.names[0]} is the unweighted mean of what each rank computes for its own part ({division.name}: "
        f"{counts}{windows}){also}: all parts count alike, even where they hold different numbers of samples or tokens"
    )


_SAME_NORM = 1e-4  # relative tolerance between two computations of one norm
_SEVERAL = 3  # fewest elements of a buffer, so that one multiple does not fit all of them by chance


@on_tensors
def norm_of_shards(tensors: Tensors) -> Finding | None:
    """Detect a gradient norm that ranks combine wrongly from the norms of their shards.

    On one device the step returns the norm that clipping finds; on ranks it returns another value.
    """
    clips = [] if tensors.alone is None else [event for event in tensors.alone.of("clip") if "norm" in event.details]
    for name in tensors.wrong("returned"):
        expected = tensors.expected.exact.get(name)
        got = tensors.seen[0].values.get(name)
        if expected is None or got is None or expected.numel() != 1 or got.numel() != 1:
            continue
        for event in clips:
            norm = event.details["norm"]
            if norm and abs(float(expected) - norm) <= _SAME_NORM * abs(norm):
                reductions = [e for n, e in tensors.events("collective") if not n and e.name == "all_reduce"]
                line = next((e for e in reductions if all("value" in tensor for tensor in e.tensors)), None)
                combination = f", combined by {line.where}" if line is not None else ""
                return Finding(
                    "wrong-reduction",
                    f"{name} is the norm of the gradient, {norm:.6g} on one device, and {float(got):.6g} on "
                    f"ranks{combination}: the norm of the whole is not that combination of the norms of the shards",
                    site=(line or event).site,
                )
    return None


@on_tensors
def buffers_of_one_part(tensors: Tensors) -> Finding | None:
    """Detect buffers with statistics of one rank's samples: one device gives the same values for these samples alone.

    A buffer counts as a statistic if the batch gives the sum or the mean of the parts: a queue of samples does not.
    """
    for name in tensors.wrong("buffers"):
        exact = tensors.expected.exact.get(name)
        if exact is None:
            continue
        for division in tensors.hypotheses.divisions:
            if not _is_statistic(tensors, name, division):
                continue
            own = [
                rank
                for rank, (run, windows) in enumerate(zip(tensors.seen, division.parts, strict=False))
                if division.windows == 1 and name in run.values and windows and name in windows[0]
                if windows[0][name].shape == run.values[name].shape == exact.shape
                and tensors.same(run.values[name].double(), windows[0][name].double(), exact)
                and not tensors.same(windows[0][name].double(), exact, exact)
            ]
            if own:
                return Finding(
                    "batch-statistics-per-rank",
                    f"{name} on {named(own)} is what one device gives for that rank's samples alone ({division.name})",
                    tuple(own),
                )
    return None


def _is_statistic(tensors: Tensors, name: Result, division: Division) -> bool:
    """Return whether a buffer is the sum or mean of the parts, plus a multiple of its initial value.

    A moving average keeps a share of its old value, once for the batch and once for each part.
    """
    exact, before = tensors.expected.exact[name], tensors.expected.single.initial.get(name.of)
    statistics = [windows[0].get(name) if windows else None for windows in division.parts]
    if before is None or before.shape != exact.shape or exact.numel() < _SEVERAL:
        return False
    terms = [statistic.double() for statistic in statistics if statistic is not None and statistic.shape == exact.shape]
    if len(terms) < len(statistics):
        return False
    old = before.double()
    for count in (1, len(terms)):
        rest = sum(terms, exact.new_zeros(exact.shape)) / count - exact
        share = float((rest * old).sum() / old.square().sum().clamp_min(1e-300))
        if tensors.same(rest + exact, share * old + exact, exact):
            return True
    return False
