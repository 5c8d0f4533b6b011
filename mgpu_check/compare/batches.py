"""Find the reasons why ranks that saw other samples than one device cannot be compared with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mgpu_check.compare.alignment import Aligned, deviation
from mgpu_check.compare.evidence import of_samples
from mgpu_check.compare.obstacles import OTHER_START, Obstacle, divided
from mgpu_check.diagnosis.attempts import Attempts
from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.rules.order import findings_of

_FAR = 1e-3
"""Relative deviation of initial values: equal tensors whose sums are added in another order differ by less."""
_SAMPLER = "shards = DistributedSampler(dataset, world_size, rank) and batch_size=global_batch // world_size"
_OF_THE_SCRIPT = ("dataset-not-split", "epochs-not-reshuffled")
"""Mistakes in the sampling that the verdict is to report as a difference, not as a reason to refuse."""


def others_from_the_start(aligned: Aligned) -> list[Obstacle]:
    """Return why runs cannot be compared, if ranks saw other samples than one device from the start.

    The list is empty if more runs are needed to decide, or if the samples are evidence of a mistake.
    """
    samples = aligned.samples(0)
    few = samples.common <= samples.one.total() / 2 or samples.together.total() > samples.one.total()
    starts = [trace.steps[0].before for trace in aligned.ranks]
    if not samples.known or samples.same or not few or any(start != starts[0] for start in starts):
        return []
    attempts = Attempts()
    evidence = attempts.of("the evidence of samples", Evidence(aligned.world), of_samples, aligned, 0)
    findings = findings_of(evidence, 1, attempts)
    # The diagnosis evaluates the same evidence later, and reports its errors.
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
    """Return why a step with other samples than on one device cannot be compared; empty if the samples are the mistake.

    Args:
        findings: the mistakes that the samples are evidence of.
    """
    if any(finding.mistake in _OF_THE_SCRIPT for finding in findings):
        return []
    samples, world = aligned.samples(number), len(aligned.ranks)
    together, one = samples.together, samples.one
    why = (
        f"step {number + 1}: the ranks together saw {together.total()} samples; {samples.common} of them are among the "
        f"{one.total()} samples of one device{_again(together, one)}: the script is not comparable without changes"
    )
    if together.total() == world * one.total():
        return [Obstacle(why, divided(one.total()))]
    if findings:
        padded = (
            "for the comparison, take a multiple of the global batch as the dataset, or pass drop_last=True to "
            "sampler and loader"
        )
        return [Obstacle(why, padded)]
    return [
        Obstacle(
            why,
            "use the same global batch on one device and on the ranks at each step: one seed for the order of the "
            f"samples on all ranks, and a sampler that splits the batch ({_SAMPLER}), also at world size 1",
        ),
        Obstacle(why, "for the comparison, seed augmentation with the index of the sample, or switch augmentation off"),
    ]


def _again(together: Counter[int], one: Counter[int]) -> str:
    """Describe, in a clause, how many samples of one device the ranks saw too often; "" if they saw none too often."""
    again = sum(count for sample, count in (together - one).items() if sample in one)
    if not again:
        return ""
    return f"; {again} came a second time or to several ranks, and {(one - together).total()} are on no rank"
