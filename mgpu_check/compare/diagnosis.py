"""Diagnose differences: the mistakes that the traces are evidence of."""

from __future__ import annotations

from mgpu_check.compare.batches import other_samples
from mgpu_check.compare.evidence import evidence_of, skipped_steps, skips_of
from mgpu_check.compare.first_difference import Diagnosis, Scene
from mgpu_check.compare.obstacles import DROPOUT, Obstacle, random_parts
from mgpu_check.mistakes.report import Finding
from mgpu_check.mistakes.rules.order import judged

__all__ = ["diagnose"]


def diagnose(scene: Scene) -> Diagnosis:
    """Diagnose the first step that parts ways."""
    findings = judged(evidence_of(scene), most=1)
    obstacles = _obstacles(scene, findings)
    return Diagnosis(
        not obstacles, findings, *((obstacles[0].why, [one.todo for one in obstacles]) if obstacles else ())
    )


def _obstacles(scene: Scene, findings: list[Finding]) -> list[Obstacle]:
    """Return why the difference is none of the training step: what the step was given; nothing where it is one."""
    mistakes = {finding.mistake for finding in findings}
    if scene.kind == "before":
        if scene.apart["before"]:
            return []
        return [
            Obstacle(
                "the ranks agree with each other, but start from other parameters than one device",
                "seed every process alike before the model is built, and build it before random numbers are drawn",
            )
        ]
    one, ranks = skips_of(scene.aligned.one, scene.step), skipped_steps(scene)
    if ranks.apart:
        return []
    if (here := skips_of(scene.aligned.ranks[0], scene.step)) != one:
        return [
            Obstacle(
                f"step {scene.step + 1}: GradScaler has skipped {len(one)} steps on one device, and {len(here)} on each rank",
                "begin with a smaller scale for the comparison: GradScaler(init_scale=1024.0)",
            )
        ]
    samples = scene.samples
    if samples.known and (not samples.same or scene.kind is None):
        return other_samples(scene.aligned, scene.step, findings)
    if "random-numbers-per-rank" in mistakes:
        random = ", ".join(random_parts(scene.aligned.ranks[0], scene.step))
        why = f"step {scene.step + 1}: {random} drops other elements on ranks than on one device"
        return [Obstacle(why, DROPOUT)]
    return []
