"""What a difference looks like where one device and the ranks were given other samples, or ranks the same ones."""

from __future__ import annotations

from typing import Any

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.first_difference import Diagnosis
from mgpu_check.compare.obstacles import divided
from mgpu_check.mistakes.report import Finding

__all__ = ["of_samples", "others_from_the_start"]

_SAMPLER = "shards = DistributedSampler(dataset, world_size, rank) and batch_size=global_batch // world_size"


def others_from_the_start(aligned: Aligned) -> Diagnosis | None:
    """What is said of ranks that begin alike, and see so little of one device's first batch that no more runs are needed."""
    samples = aligned.samples(0)
    few = samples.common <= samples.one.total() / 2 or samples.together.total() > samples.one.total()
    starts = [trace.steps[0].before for trace in aligned.ranks]
    if not samples.known or samples.same or not few or any(start != starts[0] for start in starts):
        return None
    found = of_samples(aligned, 0)
    return None if found.comparable or found.findings else found


def of_samples(aligned: Aligned, number: int) -> Diagnosis:
    """Of a step whose samples are known, and not those of one device, or the whole batch on each rank."""
    samples, world = aligned.samples(number), len(aligned.ranks)
    step = number + 1
    if samples.repeated_on_each_rank:
        return Diagnosis(
            findings=[
                Finding(
                    "dataset-not-split",
                    f"at step {step} all {world} ranks saw the same {samples.counts[0]} samples",
                )
            ]
        )
    repeated = _repeated_epoch(aligned, number)
    if repeated:
        return Diagnosis(findings=[repeated])
    together, one = samples.together, samples.one
    said = (
        f"step {step}: the ranks together saw {together.total()} samples, of which {samples.common} are those of one "
        f"device, which saw {one.total()}: the script is not comparable as it is"
    )
    if together.total() == world * one.total():
        return Diagnosis(
            comparable=False,
            why=said,
            todo=[divided(one.total())],
        )
    surplus = together - one
    if not one - together and surplus and _padded(aligned):
        return Diagnosis(
            comparable=False,
            findings=[
                Finding(
                    "padding-counted",
                    f"at step {step} {surplus.total()} samples came again, to give each rank as many as the others",
                )
            ],
            why=said,
            todo=["take a multiple of the global batch, or drop_last=True for sampler and loader, for the comparison"],
        )
    return Diagnosis(
        comparable=False,
        why=said,
        todo=[
            "let both see the same global batch at each step: one seed for the order of the samples on all ranks, "
            f"a sampler that splits it ({_SAMPLER}), also at world size 1",
            "draw augmentation from the sample's own index, or switch it off, for the comparison",
        ],
    )


def _padded(aligned: Aligned) -> bool:
    world = len(aligned.ranks)
    events = [event for trace in aligned.ranks for event in trace.of("sampler")]
    return any(not event["drop_last"] and event["length"] % world for event in events)


def _repeated_epoch(aligned: Aligned, step: int) -> Finding | None:
    """Whether the ranks see, at this step, what they saw in an earlier epoch, for want of set_epoch."""
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
            return Finding(
                "epochs-not-reshuffled",
                f"epoch {len(iterations)} begins at step {last + 1}; at step {step + 1} the ranks saw the samples "
                f"of step {twin + 1} again, and set_epoch was never called",
            )
    return None
