"""Detect mistakes in how ranks select samples and in how they gather results per sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.observed import CallEvent, Other, RankTrace
from mgpu_check.diagnosis.registry import Precedence, mistake, on_evidence, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.results import Result
from mgpu_check.processes.rank_lists import few

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.tensors import Tensors

_EQUAL = 1e-5
"""Relative tolerance for counts and rows: ranks sum them in another order than one device."""

mistake(
    "dataset-not-split",
    "every rank sees all samples",
    "give the loader a DistributedSampler; split an IterableDataset by rank (and by worker) in its __iter__",
)
mistake(
    "samples-missed",
    "some samples are never seen",
    "check the bounds of the shards; drop_last drops up to world size times batch size samples of each epoch",
)
mistake(
    "padding-counted",
    "samples that were repeated to fill the last shards are counted",
    "drop the repeated samples: keep the first len(dataset) after the gather, or use a sampler that does not pad",
)
mistake(
    "epochs-not-reshuffled",
    "each epoch visits the samples in the same order",
    "call sampler.set_epoch(epoch) before each epoch",
)
mistake(
    "split-differs-between-ranks",
    "ranks split the data into training and validation differently",
    "pass generator=torch.Generator().manual_seed(seed) to random_split, with one seed for all ranks",
)


@on_evidence(Precedence.SAMPLES + 10)
def all_see_the_same(evidence: Evidence) -> Finding | None:
    """Detect a dataset that is not split: all ranks saw exactly the same samples."""
    return Finding("dataset-not-split", evidence.same_samples) if evidence.same_samples else None


@on_evidence(Precedence.APART + 20)
def epochs_alike(evidence: Evidence) -> Finding | None:
    """Detect a shuffling sampler that repeats the order of an earlier epoch."""
    return Finding("epochs-not-reshuffled", evidence.repeated_epoch) if evidence.repeated_epoch else None


@on_evidence(Precedence.CALLS_AND_VALUES + 50)
def surplus_samples(evidence: Evidence) -> Finding | None:
    """Detect padding by a sampler: ranks saw samples more often than one device does."""
    if not evidence.surplus or not any(sampler.pads for sampler in evidence.samplers):
        return None
    return Finding("padding-counted", evidence.surplus)


@on_tensors(Precedence.APART + 30)
def split_by_own_seeds(tensors: Tensors) -> Finding | None:
    """Detect random_split with the global generator, if ranks set different seeds."""
    shared = [event for _, event in tensors.events("split") if not event.details["own_generator"]]
    seeds = {rank: event.details["seed"] for rank, event in tensors.events("seed")}
    if not shared or len(set(seeds.values())) < 2:
        return None
    return Finding(
        "split-differs-between-ranks",
        f"random_split ({shared[0].site}) draws from the global generator, which ranks have seeded differently "
        f"({_by_rank(seeds)})",
        site=shared[0].site,
    )


@on_tensors(Precedence.APART + 60)
def seeds_of_samplers(tensors: Tensors) -> Finding | None:
    """Detect samplers whose seeds differ between ranks."""
    seeds = {rank: event.details["seed"] for rank, event in tensors.events("sampler")}
    event = tensors.first("sampler")
    if event is None or len(set(seeds.values())) < 2:
        return None
    told = f"DistributedSampler ({event.site}) has another seed on each rank ({_by_rank(seeds)})"
    return Finding("split-differs-between-ranks", told, site=event.site)


def _by_rank(seeds: dict[int, object]) -> str:
    return ", ".join(f"rank {rank}: {seed}" for rank, seed in sorted(seeds.items()))


@on_tensors(Precedence.SUMS + 300)
def samples_several_times(tensors: Tensors) -> Finding | None:
    """Detect a split that differs between ranks: some samples are counted too often, and others too rarely.

    The evidence is a returned vector of equal counts on one device, such as a count for each sample.
    """
    for name in tensors.wrong("returned"):
        right, got = tensors.expected.single.values.get(name), tensors.seen[0].values.get(name)
        if right is None or got is None or right.shape != got.shape or right.dim() != 1 or len(right) < 2:
            continue
        if bool((right == right[0]).all()) and bool((got > right).any()) and bool((got < right).any()):
            told = f"{name}: some samples are on several ranks, and others on none"
            return Finding("split-differs-between-ranks", told)
    return None


@on_tensors(Precedence.SAMPLES + 30)
def whole_dataset(tensors: Tensors) -> Finding | None:
    """Detect a loader that ignores ranks: a returned value is too large by the world size, and no sampler was made."""
    loader, counts = tensors.first("loader"), _multiplied(tensors)
    if loader is None or not counts or tensors.first("sampler") is not None:
        return None
    what = "an IterableDataset" if loader.details["streams"] else f"a {loader.details['sampler']}"
    return Finding(
        "dataset-not-split",
        f"{counts[0]} is {tensors.size} times that of one device, and the DataLoader ({loader.site}) has {what}, "
        "which does not split the samples over ranks",
        site=loader.site,
    )


@on_tensors(Precedence.SUMS + 280)
def counted_by_every_rank(tensors: Tensors) -> Finding | None:
    """Detect a dataset that is not split: returned integers are too large by the world size."""
    counts = _multiplied(tensors)
    if not counts or any(tensors.seen[0].values[name].is_floating_point() for name in counts):
        return None
    return Finding("dataset-not-split", f"{counts[0]} is {tensors.size} times the count of one device")


def _multiplied(tensors: Tensors) -> list[Result]:
    cases = (tensors, *tensors.further)
    return [name for name in tensors.wrong("returned") if all(_is_multiple(case, name) for case in cases)]


def _is_multiple(tensors: Tensors, name: Result) -> bool:
    right, got = tensors.expected.single.values.get(name), tensors.seen[0].values.get(name)
    if right is None or got is None or right.shape != got.shape or not bool((right != 0).any()):
        return False
    return got.double().allclose(tensors.size * right.double(), rtol=_EQUAL)


@on_tensors(Precedence.CALLS_AND_VALUES + 60)
def pads_a_metric(tensors: Tensors) -> Finding | None:
    """Detect padding by a sampler that a metric counts: returned values are wrong, but gradients are right."""
    return pads(tensors) if tensors.wrong("returned") and not tensors.wrong("grads") else None


@on_tensors(Precedence.SUMS + 270)
def pads(tensors: Tensors) -> Finding | None:
    """Detect a sampler that pads."""
    event = _uneven_sampler(tensors)
    if event is None or event.details["drop_last"]:
        return None
    samples, replicas = event.details["samples"], event.details["replicas"]
    extra = -samples % replicas
    return Finding(
        "padding-counted",
        f"DistributedSampler ({event.site}) repeats {extra} of {samples} samples, so that each of {replicas} ranks "
        f"gets as many: {'it is' if extra == 1 else 'they are'} counted twice",
        site=event.site,
    )


@on_tensors(Precedence.ANOTHER_BATCH + 20)
def drops_last(tensors: Tensors) -> Finding | None:
    """Detect a sampler with drop_last that drops samples."""
    event = _uneven_sampler(tensors)
    if event is None or not event.details["drop_last"]:
        return None
    samples, replicas = event.details["samples"], event.details["replicas"]
    told = f"DistributedSampler ({event.site}) with drop_last drops {samples % replicas} of {samples} samples"
    return Finding("samples-missed", told, site=event.site)


@on_tensors(Precedence.ANOTHER_BATCH + 30)
def loader_drops_last(tensors: Tensors) -> Finding | None:
    """Detect a DataLoader with drop_last that drops the samples of its last, incomplete batch."""
    for rank, event in tensors.events("loader"):
        if count := event.details.get("dropped"):
            were = "sample" if count == 1 else "samples"
            told = (
                f"DataLoader ({event.site}) with drop_last drops {count} {were} on rank {rank}, of "
                f"{event.details['samples']} that it is given"
            )
            return Finding("samples-missed", told, site=event.site)
    return None


@on_tensors(Precedence.SAMPLES + 20)
def models_miss_samples(tensors: Tensors) -> Finding | None:
    """Detect samples that one device passes to the model, and that no rank passes to it."""
    seen = [_samples_of(trace) for trace in tensors.traces]
    wanted = None if tensors.alone is None else _samples_of(tensors.alone)
    if not seen or wanted is None or any(one is None for one in seen) or tensors.first("split") is not None:
        return None
    if tensors.first("model") is None:
        return None  # the step may call parts of the model one by one
    missing = sorted(set(wanted).difference(*(one or () for one in seen)))
    if not missing:
        return None
    where = [f"{index}" + (f" of batch {step + 1}" if tensors.steps > 1 else "") for step, index in missing]
    site = next(event.site for _, event in tensors.events("model"))
    verb = "is" if len(missing) == 1 else "are"
    return Finding(
        "samples-missed",
        f"{len(missing)} of {len(set(wanted))} samples {verb} not given to the model ({site}) on any rank: "
        f"{few(where, 4)}",
        site=site,
    )


@on_tensors(Precedence.ANOTHER_BATCH + 10)
def counts_too_few(tensors: Tensors) -> Finding | None:
    """Detect missed samples: one device returns the number of samples of the batch, and rank 0 a smaller count.

    Both must be single values, and the smaller one a whole number of at least 0. This must hold with all seeds. Return
    None if no returned value is such a count, or if some results differ between ranks.
    """
    for name in tensors.wrong("returned"):
        cases = [
            (case, case.expected.exact.get(name), case.seen[0].values.get(name)) for case in (tensors, *tensors.further)
        ]
        if not all(right is not None and got is not None and _is_fewer(case, right, got) for case, right, got in cases):
            continue
        return Finding(
            "samples-missed",
            f"{name} counts {int(tensors.seen[0].values[name])} samples on ranks, and all {tensors.samples} on one "
            "device",
        )
    return None


def _is_fewer(tensors: Tensors, right: torch.Tensor, got: torch.Tensor) -> bool:
    if right.numel() != 1 or got.numel() != 1 or tensors.relations.split:
        return False
    all_of_them, counted = float(right), float(got)
    return all_of_them == tensors.samples and counted == int(counted) and 0 <= counted < all_of_them


def _samples_of(trace: RankTrace) -> list[tuple[int, int]] | None:
    """Return the samples that models were called with; None if some input was not a row of the batch."""
    given = [event.details["samples"] for event in trace.of("model")]
    if any(one is None for one in given):
        return None
    return [sample for one in given for sample in one]


def _uneven_sampler(tensors: Tensors) -> CallEvent | None:
    samplers = (event for _, event in tensors.events("sampler"))
    return next((event for event in samplers if event.details["samples"] % event.details["replicas"]), None)


@on_tensors(Precedence.SUMS + 160)
def repeated_rows(tensors: Tensors) -> Finding | None:
    """Detect padding by a result with more rows than there are samples."""
    for name, rows, right in _rows(tensors):
        if rows > right:
            return Finding("padding-counted", f"{name} has {rows} rows for {tensors.samples} samples")
    return None


@on_tensors(Precedence.SUMS + 240)
def missing_rows(tensors: Tensors) -> Finding | None:
    """Detect missed samples by a result with fewer rows than there are samples."""
    for name, rows, right in _rows(tensors):
        if rows < right:
            return Finding("samples-missed", f"{name} has {rows} rows for {tensors.samples} samples")
    return None


def _rows(tensors: Tensors) -> list[tuple[Result, int, int]]:
    """Return the wrong results with a row per sample on one device, with their row counts on ranks and on one device.

    Return an empty list if a sampler whose dataset does not divide by the ranks already explains the difference.
    """
    found: list[tuple[Result, int, int]] = []
    if _uneven_sampler(tensors) is not None:
        return found
    for name in tensors.wrong("returned"):
        right, got = tensors.expected.single.values.get(name), tensors.seen[0].values.get(name)
        if right is None or got is None or not right.dim() or not got.dim() or right.shape[1:] != got.shape[1:]:
            continue
        if len(right) == tensors.samples:
            found.append((name, len(got), len(right)))
    return found


@on_tensors(Precedence.ANOTHER_BATCH + 40)
def truncates(tensors: Tensors) -> Finding | None:
    """Detect missed samples: one device gives the same result without the last samples."""
    if not _explains(tensors, "truncated"):
        return None
    size, samples = tensors.size, tensors.samples
    told = f"{tensors.names[0]} is what one device gives without the last {samples % size} of {samples} samples"
    return Finding("samples-missed", told)


@on_tensors(Precedence.ANOTHER_BATCH + 50)
def pads_the_batch(tensors: Tensors) -> Finding | None:
    """Detect padding: one device gives the same result if the batch has the first samples twice."""
    if not _explains(tensors, "padded"):
        return None
    size, samples, name = tensors.size, tensors.samples, tensors.names[0]
    told = f"{name} is what one device gives when the first {-samples % size} of {samples} samples are taken twice"
    return Finding("padding-counted", told)


@on_tensors(Precedence.AMBIGUOUS + 80)
def of_rank_0_alone(tensors: Tensors) -> Finding | None:
    """Detect a result of rank 0 on all ranks: one device gives the same for the samples of rank 0 alone."""
    if not _explains(tensors, "first-shard-only", "first-block-only"):
        return None
    told = f"{tensors.names[0]} is what one device gives for rank 0's samples alone, on all ranks"
    return Finding("value-of-one-rank", told)


def _explains(tensors: Tensors, *kinds: Other) -> bool:
    others = (other for other in tensors.hypotheses.alternatives if other.kind in kinds)
    return any(tensors.is_alternative(other) for other in others)
