"""Detect mistakes in how ranks select samples, split sequences, and gather results per sample.

Loaders of several ranks may give other samples than the loader of a single rank. Rows may reach the wrong replica, or
be gathered in the wrong order. How a sequence was split shows in the labels of losses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.evidence import EpochSamples, Evidence, Loader
from mgpu_check.diagnosis.observations import CallEvent, Labels, Other, RankTrace, Result
from mgpu_check.diagnosis.report import Finding, on_epoch, on_evidence, on_loader, on_tensors
from mgpu_check.diagnosis.rules import says
from mgpu_check.processes.rank_lists import few, named

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors


_EQUAL = 1e-5  # relative tolerance for counts and rows: ranks sum them in another order than one device


@says("padding-counted", on_evidence)
def surplus_samples(evidence: Evidence) -> str:
    """Detect padding by a sampler: ranks saw samples more often than one device does."""
    pads = any(sampler.samples % sampler.replicas and not sampler.drop_last for sampler in evidence.samplers)
    return evidence.surplus if pads else ""


@on_tensors
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


@on_tensors
def seeds_of_samplers(tensors: Tensors) -> Finding | None:
    """Detect samplers whose seeds differ between ranks."""
    seeds = {rank: event.details["seed"] for rank, event in tensors.events("sampler")}
    event = tensors.first("sampler")
    if event is None or len(set(seeds.values())) < 2:
        return None
    summary = f"DistributedSampler ({event.site}) has another seed on each rank ({_by_rank(seeds)})"
    return Finding("split-differs-between-ranks", summary, site=event.site)


def _by_rank(seeds: dict[int, object]) -> str:
    return ", ".join(f"rank {rank}: {seed}" for rank, seed in sorted(seeds.items()))


@says("split-differs-between-ranks", on_tensors)
def samples_several_times(tensors: Tensors) -> str:
    """Detect a split that differs between ranks: some samples are counted too often, and others too rarely.

    The evidence is a returned vector of equal counts on one device, such as a count for each sample.
    """
    for name, expected, got in tensors.returned():
        alike = expected.dim() == 1 and len(expected) > 1 and bool((expected == expected[0]).all())
        if alike and bool((got > expected).any()) and bool((got < expected).any()):
            return f"{name}: some samples are on several ranks, and others on none"
    return ""


@on_tensors
def whole_dataset(tensors: Tensors) -> Finding | None:
    """Detect a loader that ignores ranks: a returned value is too large by the world size, and no sampler was made."""
    loader, counts = tensors.first("loader"), _multiplied(tensors)
    if loader is None or not counts or tensors.first("sampler") is not None:
        return None
    subject = "an IterableDataset" if loader.details["streams"] else f"a {loader.details['sampler']}"
    return Finding(
        "dataset-not-split",
        f"{counts[0]} is {tensors.size} times that of one device, and the DataLoader ({loader.site}) has {subject}, "
        "which does not split the samples over ranks",
        site=loader.site,
    )


@says("dataset-not-split", on_tensors)
def counted_by_every_rank(tensors: Tensors) -> str:
    """Detect a dataset that is not split: returned integers are too large by the world size."""
    counts = _multiplied(tensors)
    if not counts or any(tensors.seen[0].values[name].is_floating_point() for name in counts):
        return ""
    return f"{counts[0]} is {tensors.size} times the count of one device"


def _multiplied(tensors: Tensors) -> list[Result]:
    def is_multiple(case: Tensors, name: Result) -> bool:
        expected, got = case.expected.single.values.get(name), case.seen[0].values.get(name)
        if expected is None or got is None or expected.shape != got.shape or not bool((expected != 0).any()):
            return False
        return got.double().allclose(case.size * expected.double(), rtol=_EQUAL)

    cases = (tensors, *tensors.further)
    return [name for name in tensors.wrong("returned") if all(is_multiple(case, name) for case in cases)]


@on_tensors
def pads_a_metric(tensors: Tensors) -> Finding | None:
    """Detect padding by a sampler that a metric counts: returned values are wrong, but gradients are right."""
    return pads(tensors) if tensors.wrong("returned") and not tensors.wrong("grads") else None


@on_tensors
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


@on_tensors
def drops_last(tensors: Tensors) -> Finding | None:
    """Detect a sampler with drop_last that drops samples."""
    event = _uneven_sampler(tensors)
    if event is None or not event.details["drop_last"]:
        return None
    samples, replicas = event.details["samples"], event.details["replicas"]
    summary = f"DistributedSampler ({event.site}) with drop_last drops {samples % replicas} of {samples} samples"
    return Finding("samples-missed", summary, site=event.site)


@on_tensors
def loader_drops_last(tensors: Tensors) -> Finding | None:
    """Detect a DataLoader with drop_last that drops the samples of its last, incomplete batch."""
    for rank, event in tensors.events("loader"):
        if count := event.details.get("dropped"):
            were = "sample" if count == 1 else "samples"
            summary = (
                f"DataLoader ({event.site}) with drop_last drops {count} {were} on rank {rank}, of "
                f"{event.details['samples']} that it is given"
            )
            return Finding("samples-missed", summary, site=event.site)
    return None


@on_tensors
def models_miss_samples(tensors: Tensors) -> Finding | None:
    """Detect samples that one device passes to the model, and that no rank passes to it."""
    by_rank = [_samples_of(trace) for trace in tensors.traces]
    wanted = None if tensors.alone is None else _samples_of(tensors.alone)
    model = tensors.first("model")
    if wanted is None or None in by_rank or model is None or tensors.first("split") is not None:
        return None  # without calls of the model, the step may call parts of it one by one
    missing = sorted(set(wanted).difference(*(samples or () for samples in by_rank)))
    if not missing:
        return None
    positions = [f"{index}" + (f" of batch {step + 1}" if tensors.steps > 1 else "") for step, index in missing]
    verb = "is" if len(missing) == 1 else "are"
    return Finding(
        "samples-missed",
        f"{len(missing)} of {len(set(wanted))} samples {verb} not given to the model ({model.site}) on any rank: "
        f"{few(positions, 4)}",
        site=model.site,
    )


@says("samples-missed", on_tensors)
def counts_too_few(tensors: Tensors) -> str:
    """Detect missed samples: one device returns the number of samples of the batch, and rank 0 a smaller count.

    Both must be single values, and the smaller one a whole number of at least 0. This must hold with all seeds. Return
    "" if no returned value is such a count, or if some results differ between ranks.
    """
    for name in tensors.wrong("returned"):
        if all(_counts_fewer(case, name) for case in (tensors, *tensors.further)):
            count = int(tensors.seen[0].values[name])
            return f"{name} counts {count} samples on ranks, and all {tensors.samples} on one device"
    return ""


def _counts_fewer(tensors: Tensors, name: Result) -> bool:
    expected, got = tensors.expected.exact.get(name), tensors.seen[0].values.get(name)
    if expected is None or got is None or expected.numel() != 1 or got.numel() != 1 or tensors.relations.split:
        return False
    all_of_them, counted = float(expected), float(got)
    return all_of_them == tensors.samples and counted == int(counted) and 0 <= counted < all_of_them


def _samples_of(trace: RankTrace) -> list[tuple[int, int]] | None:
    """Return the samples that models were called with; None if some input was not a row of the batch."""
    batches = [event.details["samples"] for event in trace.of("model")]
    return None if None in batches else [sample for batch in batches for sample in batch]


def _uneven_sampler(tensors: Tensors) -> CallEvent | None:
    samplers = (event for _, event in tensors.events("sampler"))
    return next((event for event in samplers if event.details["samples"] % event.details["replicas"]), None)


@on_tensors
def repeated_rows(tensors: Tensors) -> Finding | None:
    """Detect padding by a result with more rows than there are samples."""
    return _other_rows(tensors, "padding-counted", 1)


@on_tensors
def missing_rows(tensors: Tensors) -> Finding | None:
    """Detect missed samples by a result with fewer rows than there are samples."""
    return _other_rows(tensors, "samples-missed", -1)


def _other_rows(tensors: Tensors, mistake_name: str, sign: int) -> Finding | None:
    """Detect a wrong result with a row per sample on one device, and on ranks more rows (sign 1) or fewer (-1).

    Return None if a sampler whose dataset does not divide by the ranks already explains the difference.
    """
    for name in tensors.wrong("returned") if _uneven_sampler(tensors) is None else ():
        expected, got = tensors.expected.single.values.get(name), tensors.seen[0].values.get(name)
        if expected is None or got is None or not expected.dim() or not got.dim() or len(expected) != tensors.samples:
            continue
        if expected.shape[1:] == got.shape[1:] and sign * (len(got) - len(expected)) > 0:
            return Finding(mistake_name, f"{name} has {len(got)} rows for {tensors.samples} samples")
    return None


@says("samples-missed", on_tensors)
def truncates(tensors: Tensors) -> str:
    """Detect missed samples: one device gives the same result without the last samples."""
    left_out = f"without the last {tensors.samples % tensors.size} of {tensors.samples} samples"
    return _of_another_batch(tensors, left_out, "truncated")


@says("partial-result-added-on-every-rank", on_tensors)
def counts_a_tensor_several_times(tensors: Tensors) -> str:
    """Detect a tensor of the batch that all ranks have, and that a gather puts together as if it were divided."""
    several = f"with all positions of one tensor of the batch {tensors.size} times, once for each rank"
    return _of_another_batch(tensors, several, "tensor-several-times")


@says("blocks-in-other-order", on_tensors)
def blocks_in_other_order(tensors: Tensors) -> str:
    """Detect blocks of a divided tensor in another order: one device gives the same with these blocks exchanged."""
    if (alternative := tensors.alternative("blocks-in-other-order")) is None:
        return ""
    blocks, *names = alternative.names
    exchanged = f"with the rows of {few(names)} as {blocks} with both numbers exchanged"
    return f"{tensors.names[0]} is what one device gives {exchanged}"


@says("padding-counted", on_tensors)
def pads_the_batch(tensors: Tensors) -> str:
    """Detect padding: one device gives the same result if the batch has the first samples twice."""
    twice = f"when the first {-tensors.samples % tensors.size} of {tensors.samples} samples are taken twice"
    return _of_another_batch(tensors, twice, "padded")


@says("value-of-one-rank", on_tensors)
def of_rank_0_alone(tensors: Tensors) -> str:
    """Detect a result of rank 0 on all ranks: one device gives the same for the samples of rank 0 alone."""
    alone = "for rank 0's samples alone, on all ranks"
    return _of_another_batch(tensors, alone, "first-shard-only", "first-block-only")


def _of_another_batch(tensors: Tensors, how: str, *kinds: Other) -> str:
    return f"{tensors.names[0]} is what one device gives {how}" if tensors.alternative(*kinds) is not None else ""


# One mistake is reported per epoch: the first explains all surplus and missing samples. Surplus comes before missing: a
# rank that reads all samples misses none.
@says("dataset-not-split", on_epoch)
def read_by_each_worker(samples: EpochSamples) -> str:
    """Detect a dataset that is not split between workers: each worker of a rank reads the same samples."""
    if not samples.telling or not samples.per_worker:
        return ""
    also = ", and every rank all samples" if samples.whole else ""
    return f"each of the {samples.workers} workers of a rank reads the same samples{also}"


@says("dataset-not-split", on_epoch)
def read_by_each_rank(samples: EpochSamples) -> str:
    """Detect a dataset that is not split: every rank sees all samples."""
    text = f"each of the {len(samples.counts)} ranks sees all {samples.expected.total()} samples"
    return text if samples.telling and samples.whole else ""


@says("padding-counted", on_epoch)
def repeated_to_fill(samples: EpochSamples) -> str:
    """Detect padding: not more samples are repeated than fill the last batches."""
    if not samples.telling or not samples.padded:
        return ""
    repeated = samples.repeated
    how = "DistributedSampler" if repeated.total() < len(samples.counts) else "samplers that fill the last batches"
    which = f"{repeated.total()} of {samples.expected.total()} samples repeated ({samples.shown(repeated)})"
    return f"{which}, so that each rank has as many, as {how} would do; padding=True accepts it"


@on_epoch
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


@on_epoch
def shared_out_unlike(samples: EpochSamples) -> Finding | None:
    """Detect a split that differs between ranks: samples are missing, and others repeated or unknown."""
    missing, repeated = samples.missing, samples.repeated
    if not samples.telling or not missing or not (repeated or samples.unknown):
        return None
    strange = tuple(rank for rank, share in enumerate(samples.shares_unknown) if share)
    several = f"{repeated.total()} seen several times ({samples.shown(repeated)})" if repeated else ""
    additional = f"{named(strange)} with samples that world size 1 does not give" if strange else ""
    none = f"{missing.total()} on none ({samples.shown(missing)})"
    return Finding("split-differs-between-ranks", ", ".join(filter(None, [several, additional, none])), strange)


@says("samples-missed", on_epoch)
def on_no_rank(samples: EpochSamples) -> str:
    """Detect samples that are on no rank."""
    missing = samples.missing
    if not samples.telling or not missing:
        return ""
    few = missing.total() <= samples.most_in_tail
    drop = "; as many as drop_last may drop, which dropped=True accepts" if few else ""
    return f"{missing.total()} of {samples.expected.total()} on no rank ({samples.shown(missing)}){drop}"


@says("uneven-steps", on_epoch)
def uneven_batches(samples: EpochSamples) -> str:
    """Detect uneven numbers of batches, if no sample is missing or repeated beyond what the user accepts."""
    return samples.told_of_batches if samples.covered and samples.uneven else ""


@on_loader
def order_repeats(loader: Loader) -> Finding | None:
    """Detect epochs that all have the same order."""
    return Finding("epochs-not-reshuffled", loader.order, tuple(loader.repeating)) if loader.repeating else None


@says("not-scattered", on_tensors)
def first_shard_for_all(tensors: Tensors) -> str:
    """Detect a part of the batch that DataParallel does not scatter; skipped for steps that use ranks."""
    if any(True for _ in tensors.events("collective", "wrap")) or not tensors.wrong("grads", "returned"):
        return ""  # a buffer of the first device holds what its own samples give
    if (alternative := tensors.alternative("first-part-of-a-tensor")) is None:
        return ""
    values = f"the first shard's values of tensor {alternative.index} of the batch"
    return f"{tensors.names[0]} is what one device gives when every shard has {values}"


@says("gathered-in-other-order", on_tensors)
def other_order(tensors: Tensors) -> str:
    """Detect gathered rows in the wrong order: a result has the rows of one device, but permuted."""
    for name in tensors.wrong("returned"):
        expected = tensors.expected.exact.get(name)
        if expected is None and name in tensors.expected.single.values:
            expected = tensors.expected.single.values[name].double()
        got = tensors.seen[tensors.relations.wrong[name][0]].values.get(name)
        if expected is None or got is None or expected.shape != got.shape or not expected.dim() or len(expected) < 2:
            continue
        rows, others = got.double().reshape(len(got), -1), expected.reshape(len(expected), -1)
        distance = (rows[:, None] - others[None]).abs().amax(-1)
        order = distance.argmin(1).tolist()
        near = bool((distance.amin(1) <= _EQUAL * float(others.abs().max())).all())
        if near and sorted(order) == list(range(len(rows))) != order:
            return f"{name} has the rows of one device in another order"
    return ""


_Rows = list[tuple[int, ...]]  # labels, a row for each sample
_BITS = 16.0
"""Evidence required, in bits: labels match the next tokens by chance with a probability of 2^-16 per layout."""


@on_tensors
def labels_shifted_after_split(tensors: Tensors) -> Finding | None:
    """Detect labels that each rank shifted within its own part of the sequence.

    Each label of a rank but the last is the next token of its part. At the end of a part the next token of the sequence
    is on another rank, and the label differs from one device.
    """
    alone = [] if tensors.alone is None else tensors.alone.labels
    ranks = [trace.labels for trace in tensors.traces]
    if not alone or len(ranks) < 2 or any(len(calls) != len(alone) for calls in ranks):
        return None
    for number, on_device in enumerate(alone):
        of_ranks = [calls[number] for calls in ranks]
        rows = _rows_of_labels(on_device, tensors.samples)
        if rows is None or len({labels.site for labels in of_ranks}) > 1:
            continue
        for pieces, chunks_of in _layouts(tensors.size):
            if (shifted := _shifted_within(rows, of_ranks, pieces, chunks_of, tensors.samples)) is not None:
                rank, got, expected = shifted
                return Finding(
                    "labels-shifted-after-split",
                    f"the labels of {of_ranks[0].site} are the next tokens within each of {pieces} parts of the "
                    f"sequence: where a part ends on rank {rank} the label is {got}, and {expected} on one device",
                    site=of_ranks[0].site,
                )
    return None


def _layouts(size: int) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """Yield layouts of a sequence: the number of parts, and a function from rank to the chunks that the rank holds.

    A rank holds one chunk, or one from each end, which balances causal attention. With fewer parts than ranks, groups
    of ranks hold different samples, and either neighbours share a group or neighbours share a part.
    """
    for pieces in range(size, 1, -1):
        if size % pieces:
            continue
        strided, blocks = (rank % pieces for rank in range(size)), (rank // (size // pieces) for rank in range(size))
        for index in dict.fromkeys((tuple(strided), tuple(blocks))):
            yield pieces, [(piece,) for piece in index]
            yield pieces, [(piece, 2 * pieces - 1 - piece) for piece in index]


def _shifted_within(
    rows: _Rows, of_ranks: Sequence[Labels], pieces: int, chunks_of: Sequence[tuple[int, ...]], samples: int
) -> tuple[int, str, int] | None:
    """Return the first wrong label as rank, label and right label; None without any, or in another layout.

    Return None also if the labels are too few to exclude chance.
    """
    size = len(of_ranks)
    shifted, bits, counts = None, 0.0, Counter(label for row in rows for label in row)
    for rank, labels in enumerate(of_ranks):
        chunks = chunks_of[rank]
        mine = _rows_of_labels(labels, samples * pieces // size) if samples * pieces % size == 0 else None
        if mine is None:
            return None
        shown = len(mine[0])  # the last one may be left out
        length_on_device = len(rows[0])
        for tokens in {length_on_device, length_on_device + 1}:
            # The positions whose tokens the rank holds.
            length, rest = divmod(tokens, pieces * len(chunks))
            positions = [position for chunk in chunks for position in range(chunk * length, (chunk + 1) * length)]
            if not rest and shown in (len(positions), len(positions) - 1):
                break
        else:
            return None
        candidates = [rows[start:][: len(mine)] for start in range(0, len(rows), len(mine))]
        own = next((own for own in candidates if _are_next(own, mine, positions)), None)
        if own is None:
            return None
        own_labels = [label for row in mine for label in row[: len(positions) - 1]]
        bits += sum(math.log2(counts.total() / counts[label]) for label in own_labels)
        odd = _odd(own, mine, positions, labels.ignored)
        shifted = shifted or (None if odd is None else (rank, *odd))
    return shifted if bits >= _BITS else None


def _are_next(rows: _Rows, mine: _Rows, places: Sequence[int]) -> bool:
    """Return whether each label of a rank but the last is the next token that the rank holds."""
    # The label of a position is the token of the next one.
    return all(
        label == row[following - 1]
        for row, own in zip(rows, mine, strict=True)
        for label, following in zip(own[: len(places) - 1], places[1:], strict=True)
    )


def _odd(rows: _Rows, mine: _Rows, positions: Sequence[int], ignored: int | None) -> tuple[str, int] | None:
    """Return the first label that differs from one device, and the right label; None if no label differs."""
    for row, own in zip(rows, mine, strict=True):
        for number, position in enumerate(positions):
            if position >= len(row) or row[position] == ignored:
                continue
            got = own[number] if number < len(own) else None
            if got != row[position]:
                return "left out" if got in (None, ignored) else str(got), row[position]
    return None


def _rows_of_labels(labels: Labels, samples: int) -> _Rows | None:
    length, rest = divmod(len(labels.values), samples) if samples else (0, 1)
    if rest or length < 2:
        return None
    return [labels.values[start : start + length] for start in range(0, len(labels.values), length)]
