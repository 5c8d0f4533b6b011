"""Collect what stands in the way of a comparison, as far as the runs show it: reported at once, not one after the
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mgpu_check.compare.alignment import Aligned, deviation
from mgpu_check.compare.evidence import of_samples
from mgpu_check.compare.obstacles import OTHER_START, Obstacle, divided
from mgpu_check.mistakes.attempts import Attempts
from mgpu_check.mistakes.evidence import Evidence
from mgpu_check.mistakes.report import Finding
from mgpu_check.mistakes.rules.order import findings_of

__all__ = ["other_samples", "others_from_the_start"]

_FAR = 1e-3
"""Relative: sums of the same start, added in another order, are closer."""
_SAMPLER = "shards = DistributedSampler(dataset, world_size, rank) and batch_size=global_batch // world_size"
_OF_THE_SCRIPT = ("dataset-not-split", "epochs-not-reshuffled")
"""Mistakes of the training script itself, which are a difference."""


def others_from_the_start(aligned: Aligned) -> list[Obstacle]:
    """Return why ranks that begin alike cannot be compared, where they see so little of one device's first batch that
    no more runs are needed.
    """
    samples = aligned.samples(0)
    few = samples.common <= samples.one.total() / 2 or samples.together.total() > samples.one.total()
    starts = [trace.steps[0].before for trace in aligned.ranks]
    if not samples.known or samples.same or not few or any(start != starts[0] for start in starts):
        return []
    attempts = Attempts()
    evidence = attempts.of("the evidence of samples", Evidence(aligned.world), of_samples, aligned, 0)
    findings = findings_of(evidence, 1, attempts)
    # The diagnosis reports an error of this piece, too.
    if findings or attempts.remarks:
        return []
    return [*other_samples(aligned, 0, findings), *([OTHER_START] if _start_elsewhere(aligned) else [])]


def _start_elsewhere(aligned: Aligned) -> bool:
    for name in aligned.held:
        expected, here = aligned.found(0, "before", name)
        shape = aligned.parameter(name).shape
        if any(deviation(value, expected, shape).size > _FAR for value in here.values()):
            return True
    return False


def other_samples(aligned: Aligned, number: int, findings: Sequence[Finding]) -> list[Obstacle]:
    """Return why a step whose samples are not those of one device cannot be compared; nothing where that is the mistake
    itself.

    Args:
        findings: what the samples look like.
    """
    if any(finding.mistake in _OF_THE_SCRIPT for finding in findings):
        return []
    samples, world = aligned.samples(number), len(aligned.ranks)
    together, one = samples.together, samples.one
    why = (
        f"step {number + 1}: the ranks together saw {together.total()} samples, of which {samples.common} are those of one "
        f"device, which saw {one.total()}{_again(together, one)}: the script is not comparable as it is"
    )
    if together.total() == world * one.total():
        return [Obstacle(why, divided(one.total()))]
    if findings:
        padded = "for the comparison, take a multiple of the global batch as the dataset, or pass drop_last=True to sampler and loader"
        return [Obstacle(why, padded)]
    return [
        Obstacle(
            why,
            "let both see the same global batch at each step: one seed for the order of the samples on all ranks, "
            f"a sampler that splits it ({_SAMPLER}), also at world size 1",
        ),
        Obstacle(why, "draw augmentation from the sample's own index, or switch it off, for the comparison"),
    ]


def _again(together: Counter[int], one: Counter[int]) -> str:
    """Say how many of one device's samples came to the ranks too often, as a clause; empty where none did."""
    again = sum(count for sample, count in (together - one).items() if sample in one)
    if not again:
        return ""
    return f"; {again} of those on ranks came a second time, or to several ranks, and {(one - together).total()} are on no rank"
