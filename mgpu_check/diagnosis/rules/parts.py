"""Detect means and statistics of parts, where the whole batch counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.registry import Precedence, mistake, on_evidence, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.rules.clipping import clips_parts

if TYPE_CHECKING:
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


@on_evidence(Precedence.SUMS + 70)
def statistics_of_parts(evidence: Evidence) -> Finding | None:
    """Detect batch statistics of each rank's shard, if the gradients are the mean of the shards' gradients."""
    tensors, found = evidence.tensors, normalizes_parts(evidence)
    if found is None or tensors is None:
        return None
    if not any(tensors.is_combined(division, "mean") for division in tensors.hypotheses.divisions):
        return None
    return Finding(found.mistake, f"{found.evidence}, and the gradients are the mean of the shards' gradients")


@on_evidence(Precedence.AMBIGUOUS + 100)
def normalizes_parts(evidence: Evidence) -> Finding | None:
    """Detect batch statistics of each rank's shard: a module normalizes by the statistics of its batch."""
    return Finding("batch-statistics-per-rank", evidence.normalizes) if evidence.normalizes else None


@on_tensors(Precedence.SUMS + 260)
def mean_of_metrics(tensors: Tensors) -> Finding | None:
    """Detect a metric that is the mean over equal parts, although one device gives a different value."""
    found = tensors.mean_of_parts
    if found is None or not found[0].even or tensors.gradient_like or found[0].along:
        return None
    return Finding(
        "mean-of-means" if tensors.hypotheses.padded else "wrong-reduction",
        f"{tensors.names[0]} is the mean over ranks of each rank's own value{found[1]}, which is not the value for "
        "all samples together",
    )


@on_tensors(Precedence.SUMS + 320)
def takes_parts_for_the_batch(tensors: Tensors) -> Finding | None:
    """Detect gradients that are the mean of the parts', while one device gives no weighted sum of the parts."""
    found = tensors.mean_of_parts
    if found is None or found[0].along or not tensors.gradient_like or clips_parts(tensors):
        return None
    if tensors.is_sum_of_parts(found[0]) is not False:
        return None
    return Finding(
        "batch-statistics-per-rank",
        f"{tensors.names[0]} is the mean of what each rank computes for its own part ({found[0].name}){found[1]}, but "
        "no weighted sum of the parts gives the result of one device: something in the step depends on all samples, "
        "and each rank has only its own",
    )


@on_tensors(Precedence.SUMS + 330)
def mean_of_parts(tensors: Tensors) -> Finding | None:
    """Detect an unweighted mean over the parts, where the parts should have other weights."""
    found = tensors.mean_of_parts
    if found is None or clips_parts(tensors) or mean_of_metrics(tensors) or tensors.is_sum_of_parts(found[0]) is False:
        return None
    division, also = found
    if also and tensors.factor() is not None:
        return None  # one factor explains the difference, so the weights are right
    windows = f", of {division.windows} micro-batches each" if division.windows > 1 else ""
    counts = ", ".join(map(str, division.counts))
    return Finding(
        "mean-of-means",
        f"{tensors.names[0]} is the unweighted mean of what each rank computes for its own part ({division.name}: "
        f"{counts}{windows}){also}: all parts count alike, even where they hold different numbers of samples or tokens",
    )


@on_evidence(Precedence.POSSIBLE + 50)
def uneven_parts(evidence: Evidence) -> Finding | None:
    """Detect a mean of means: ranks saw unequal numbers of samples, or their losses divide by unequal counts."""
    return Finding("mean-of-means", evidence.uneven) if evidence.uneven else None
