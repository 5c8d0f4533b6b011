"""Compare the samples that the loaders of the ranks give in an epoch, which a replay of batches cannot show.

A rank lists the indices that the samplers of its loaders give, after its last recorded step, so that this changes
nothing. Of large datasets it lists every n-th index.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from mgpu_check.compare.trace import Trace
from mgpu_check.diagnosis.attempts import Attempts
from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.rules.order import findings_of

_LISTED = 2**14
"""Indices of a rank in the trace: a sampler that overlaps shows in any part of a dataset."""
_WHOLE = 0.8
"""Part of the dataset: a loader that drops its last batch gives less than all, and one of two ranks gives half."""
_LONGEST = 2**24  # entries of an epoch, because samplers may be endless


def epoch_of(loader: Any) -> dict[str, Any] | None:
    """Return the indices of an epoch of a loader, for an event; None for a loader without indices."""
    try:
        length = len(loader.dataset)
        stride = -(-length // _LISTED)
        drawn = itertools.islice(iter(loader._index_sampler), _LONGEST)
        entries = itertools.chain.from_iterable(one if isinstance(one, (list, tuple)) else [one] for one in drawn)
        indices = [int(index) for index in itertools.islice(entries, _LONGEST) if int(index) % stride == 0]
    except Exception:  # a sampler or a dataset of the user that has no epoch by itself
        return None
    return {"length": -(-length // stride), "indices": indices, "workers": loader.num_workers}


def mistakes_of(ranks: Sequence[Trace]) -> list[Finding]:
    """Return the mistakes that an epoch of the loaders shows."""
    attempts, world = Attempts(), len(ranks)
    found: list[Finding] = []
    for _, epochs in _loaders(ranks):
        whole = [set(epoch["indices"]) for epoch in epochs]
        length = epochs[0]["length"]
        if length > 1 and all(len(own) > _WHOLE * length for own in whole):
            told = (
                f"in an epoch each of the {world} ranks gets {min(map(len, whole))} of {length} samples of the dataset"
            )
            found += findings_of(Evidence(world, same_samples=told), 1, attempts)
    again = [e for e in ranks[0].of("sampler") if e["shuffle"] and not e["set_epoch"] and e["iteration"] > 1]
    if again:
        told = f"epoch {again[0]['iteration']} begins at step {again[0]['after'] + 1}, and set_epoch was never called"
        found += findings_of(Evidence(world, repeated_epoch=told), 1, attempts)
    return list({one.mistake: one for one in found}.values())


def remarks_of(ranks: Sequence[Trace]) -> Iterator[str]:
    """Report what the loaders of the ranks give, in lines."""
    for number, epochs in _loaders(ranks):
        counts = Counter(index for epoch in epochs for index in set(epoch["indices"]))
        shared = sum(count > 1 for count in counts.values())
        if shared >= len(ranks):  # fewer may come again, so that each rank has the same number
            yield f"in an epoch of loader {number} ranks share {shared} of {len(counts)} samples"
        else:
            yield f"in an epoch of loader {number} each rank gets samples of its own, {len(counts)} in all"
        seeds = {epoch["seed"] for epoch in epochs}
        if epochs[0]["workers"] and len(seeds) == 1:
            yield (
                f"the workers of loader {number} have the same seeds on each rank: random augmentation draws the same "
                "numbers there"
            )
    first = [event for event in ranks[0].of("sampler") if event["iteration"] == 1]
    if any(event["shuffle"] and not event["set_epoch"] for event in first):
        yield "set_epoch was not called before the first epoch: without it each epoch has the same order"


def _loaders(ranks: Sequence[Trace]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield each loader that all ranks have listed, with its number."""
    for number, epochs in enumerate(zip(*(trace.of("epoch") for trace in ranks), strict=False), 1):
        if all(epoch["indices"] for epoch in epochs):
            yield number, list(epochs)
