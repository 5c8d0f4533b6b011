"""Detect means, statistics and other values of parts or shards, where the whole batch or all shards count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.registry import mistake, on_evidence, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.rules import on_change
from mgpu_check.diagnosis.rules.gradients import clips_parts
from mgpu_check.processes.rank_lists import named

if TYPE_CHECKING:
    from mgpu_check.diagnosis.observations import Change, Division, Result
    from mgpu_check.diagnosis.tensors import Tensors


mistake(
    "mean-of-means",
    "a mean over each part's own samples or tokens is averaged over the parts",
    "sum over each rank's own samples or tokens, and divide by the global count, all-reduced first",
)
mistake(
    "batch-statistics-per-rank",
    "each rank takes statistics over its own shard, but one device takes them over the whole batch",
    "convert BatchNorm with torch.nn.SyncBatchNorm.convert_sync_batchnorm, all-reduce or gather other statistics "
    "of the batch, or compare with a reference that takes the batch shard by shard",
)


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


@on_evidence
def statistics_of_parts(evidence: Evidence) -> Finding | None:
    """Detect batch statistics of each rank's shard, if the gradients are the mean of the shards' gradients."""
    tensors = evidence.tensors
    if not evidence.normalizes or tensors is None:
        return None
    if not any(tensors.is_combined(division, "mean") for division in tensors.hypotheses.divisions):
        return None
    summary = f"{evidence.normalizes}, and the gradients are the mean of the shards' gradients"
    return Finding("batch-statistics-per-rank", summary)


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


@on_tensors
def takes_parts_for_the_batch(tensors: Tensors) -> Finding | None:
    """Detect gradients that are the mean of the parts', while one device gives no weighted sum of the parts."""
    mean = tensors.mean_of_parts
    if mean is None or mean[0].along or not tensors.gradient_like or clips_parts(tensors):
        return None
    if tensors.is_sum_of_parts(mean[0]) is not False:
        return None
    return Finding(
        "batch-statistics-per-rank",
        f"{tensors.names[0]} is the mean of what each rank computes for its own part ({mean[0].name}){mean[1]}, but "
        "no weighted sum of the parts gives the result of one device: something in the step depends on all samples, "
        "and each rank has only its own",
    )


@on_tensors
def mean_of_parts(tensors: Tensors) -> Finding | None:
    """Detect an unweighted mean over the parts, where the parts should have other weights."""
    mean = tensors.mean_of_parts
    if mean is None or clips_parts(tensors) or mean_of_metrics(tensors) or tensors.is_sum_of_parts(mean[0]) is False:
        return None
    division, also = mean
    if also and tensors.factor() is not None:
        return None  # one factor explains the difference, so the weights are right
    windows = f", of {division.windows} micro-batches each" if division.windows > 1 else ""
    counts = ", ".join(map(str, division.counts))
    return Finding(
        "mean-of-means",
        f"{tensors.names[0]} is the unweighted mean of what each rank computes for its own part ({division.name}: "
        f"{counts}{windows}){also}: all parts count alike, even where they hold different numbers of samples or tokens",
    )


_SAME = 1e-4  # relative tolerance between two computations of one norm
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
            if norm and abs(float(expected) - norm) <= _SAME * abs(norm):
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
