"""Detect why the loaders of several ranks give other samples than the loader of a single rank."""

from __future__ import annotations

from mgpu_check.diagnosis.registry import on_epoch, on_loader
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.samples import EpochSamples, Loader
from mgpu_check.processes.rank_lists import named


# One mistake is reported per epoch: the first explains all surplus and missing samples. Surplus comes before missing: a
# rank that reads all samples misses none.
@on_epoch(10)
def read_by_each_worker(samples: EpochSamples) -> Finding | None:
    """Detect a dataset that is not split between workers: each worker of a rank reads the same samples."""
    if not samples.telling or not samples.per_worker:
        return None
    also = ", and every rank all samples" if samples.whole else ""
    told = f"each of the {samples.workers} workers of a rank reads the same samples{also}"
    return Finding("dataset-not-split", told)


@on_epoch(20)
def read_by_each_rank(samples: EpochSamples) -> Finding | None:
    """Detect a dataset that is not split: every rank sees all samples."""
    if not samples.telling or not samples.whole:
        return None
    told = f"each of the {len(samples.counts)} ranks sees all {samples.expected.total()} samples"
    return Finding("dataset-not-split", told)


@on_epoch(30)
def repeated_to_fill(samples: EpochSamples) -> Finding | None:
    """Detect padding: not more samples are repeated than fill the last batches."""
    if not samples.telling or not samples.padded:
        return None
    repeated = samples.repeated
    how = "DistributedSampler" if repeated.total() < len(samples.counts) else "samplers that fill the last batches"
    return Finding(
        "padding-counted",
        f"{repeated.total()} of {samples.expected.total()} samples repeated ({samples.shown(repeated)}), so that each "
        f"rank has as many, as {how} would do; padding=True accepts it",
    )


@on_epoch(40)  # before repeated samples, which it explains
def same_on_some(samples: EpochSamples) -> Finding | None:
    """Detect missed samples: some ranks see exactly the same samples."""
    if not samples.telling or not samples.missing or not samples.twins:
        return None
    same = " and ".join(named(ranks) for ranks in samples.twins)
    return Finding(
        "samples-missed",
        f"{same} see the same samples, and {samples.missing.total()} of {samples.expected.total()} are on no rank: is "
        "the sampler given each rank's own index, and the number of ranks?",
        tuple(rank for ranks in samples.twins for rank in ranks[1:]),
    )


@on_epoch(50)
def shared_out_unlike(samples: EpochSamples) -> Finding | None:
    """Detect a split that differs between ranks: samples are missing, and others repeated or unknown."""
    missing, repeated = samples.missing, samples.repeated
    if not samples.telling or not missing or not (repeated or samples.unknown):
        return None
    strange = tuple(rank for rank, share in enumerate(samples.shares_unknown) if share)
    several = f"{repeated.total()} seen several times ({samples.shown(repeated)})" if repeated else ""
    other = f"{named(strange)} with samples that world size 1 does not give" if strange else ""
    none = f"{missing.total()} on none ({samples.shown(missing)})"
    return Finding("split-differs-between-ranks", ", ".join(filter(None, [several, other, none])), strange)


@on_epoch(60)
def on_no_rank(samples: EpochSamples) -> Finding | None:
    """Detect samples that are on no rank."""
    missing = samples.missing
    if not samples.telling or not missing:
        return None
    few = missing.total() <= samples.most_in_tail
    drop = "; as many as drop_last may drop, which dropped=True accepts" if few else ""
    told = f"{missing.total()} of {samples.expected.total()} on no rank ({samples.shown(missing)}){drop}"
    return Finding("samples-missed", told)


@on_epoch(70)  # numbers of batches may differ even if each sample is on exactly one rank
def uneven_batches(samples: EpochSamples) -> Finding | None:
    """Detect uneven numbers of batches, if no sample is missing or repeated beyond what the user accepts."""
    return Finding("uneven-steps", samples.told_of_batches) if samples.covered and samples.uneven else None


@on_loader(10)
def order_repeats(loader: Loader) -> Finding | None:
    """Detect epochs that all have the same order."""
    return Finding("epochs-not-reshuffled", loader.order, tuple(loader.repeating)) if loader.repeating else None
