"""Compare the samples that the loaders of the ranks give in an epoch, which a replay of batches cannot show.

A rank lists them in `mgpu_check.compare.replay_recording`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from mgpu_check.compare.trace import Trace
from mgpu_check.diagnosis.attempts import Attempts
from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.rules.order import findings_of

_WHOLE = 0.8
"""Part of the dataset: a loader that drops its last batch gives less than all, and one of two ranks gives half."""

_BY_CHANCE = 8
"""Samples: samplers that draw by seeds of their own may draw the same few."""


def mistakes_of(ranks: Sequence[Trace]) -> list[Finding]:
    """Return the mistakes that an epoch of the loaders shows."""
    attempts, world = Attempts(), len(ranks)
    found: list[Finding] = []
    for _, epochs in _loaders(ranks):
        if not _share_data(epochs):
            continue
        whole = [set(epoch["indices"]) for epoch in epochs]
        length = epochs[0]["length"]
        if length > 1 and all(len(own) > _WHOLE * length for own in whole):
            told = (
                f"in an epoch each of the {world} ranks gets {min(map(len, whole))} of {length} samples of the dataset"
            )
            found += findings_of(Evidence(world, same_samples=told), 1, attempts)
        elif (
            epochs[0]["endless"]
            and len(whole[0]) >= _BY_CHANCE
            and all(own == whole[0] for own in whole)
            and _saw_the_same(ranks)
        ):
            told = f"the samplers have no end, and give each of the {world} ranks the same {len(whole[0])} samples"
            found += findings_of(Evidence(world, same_samples=told), 1, attempts)
    trained = len(ranks[0].steps)  # `epoch_of` begins an epoch too, after the last step
    again = [
        event
        for event in ranks[0].of("sampler")
        if event["shuffle"] and not event["set_epoch"] and event["iteration"] > 1 and event["after"] < trained
    ]
    if again:
        told = f"epoch {again[0]['iteration']} begins at step {again[0]['after'] + 1}, and set_epoch was never called"
        found += findings_of(Evidence(world, repeated_epoch=told), 1, attempts)
    return list({one.mistake: one for one in found}.values())


def remarks_of(ranks: Sequence[Trace]) -> Iterator[str]:
    """Report what the loaders of the ranks give, in lines."""
    for number, epochs in _loaders(ranks):
        if not _share_data(epochs):
            lengths = ", ".join(str(len(set(epoch["indices"]))) for epoch in epochs)
            yield (
                f"in an epoch of loader {number} the ranks get {lengths} samples of datasets of their own, whose "
                "samples were not compared"
            )
            continue
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


def _share_data(epochs: Sequence[dict[str, Any]]) -> bool:
    """Return whether the ranks have the same dataset: an index means the same sample on all of them."""
    return len({epoch["data"] for epoch in epochs}) == 1


def _saw_the_same(ranks: Sequence[Trace]) -> bool:
    """Return whether the models had the same inputs on all ranks, which may also share the order, and slice it."""
    seen = [[step.seen for step in trace.steps] for trace in ranks]
    return any(seen[0]) and all(own == seen[0] for own in seen)


def _loaders(ranks: Sequence[Trace]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield each loader that all ranks have listed, with its number."""
    for number, epochs in enumerate(zip(*(trace.of("epoch") for trace in ranks), strict=False), 1):
        if all(epoch["indices"] for epoch in epochs):
            yield number, list(epochs)
