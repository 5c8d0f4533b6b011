"""Diagnose a difference: name the mistakes that the traces are evidence of."""

from __future__ import annotations

from dataclasses import replace

from mgpu_check.compare.axes import told_axes
from mgpu_check.compare.batches import other_samples
from mgpu_check.compare.calls import told_slice
from mgpu_check.compare.evidence import evidence_of, skipped_steps, skips_of
from mgpu_check.compare.first_difference import Diagnosis, FirstDifference
from mgpu_check.compare.forward import told_outputs
from mgpu_check.compare.obstacles import OTHER_START, OTHER_START_OF_PARTS, Obstacle, drawing
from mgpu_check.diagnosis.attempts import Attempts
from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.rules.order import findings_of


def diagnose(difference: FirstDifference) -> Diagnosis:
    """Diagnose the first step that differs; `failed` names the parts of the diagnosis that raised an error."""
    attempts = Attempts()
    world = difference.aligned.world
    evidence = attempts.of("the evidence", Evidence(world), evidence_of, difference, attempts)
    findings = findings_of(evidence, 2 if evidence.start else 1, attempts)
    findings = [replace(finding, also=number > 0) for number, finding in enumerate(findings)]
    obstacles = attempts.of("the search for obstacles", [], _obstacles, difference, findings)
    why = list(dict.fromkeys(one.why for one in obstacles))
    todo = [one.todo for one in obstacles]
    axes = "" if obstacles else attempts.of("the search for axes", "", told_axes, difference)
    of_slices = "" if obstacles else attempts.of("the factor of a slice", "", told_slice, difference)
    outputs = "" if obstacles else attempts.of("the outputs of modules", "", told_outputs, difference)
    return Diagnosis(not obstacles, findings, " and ".join(why), todo, attempts.remarks, axes, of_slices, outputs)


def _obstacles(difference: FirstDifference, findings: list[Finding]) -> list[Obstacle]:
    """Return why the difference lies in the inputs of the training step; empty if it lies in the step itself."""
    mistakes = {finding.mistake for finding in findings}
    if difference.kind == "before":
        if difference.apart["before"]:
            return []
        samples = difference.samples
        others = (
            other_samples(difference.aligned, difference.step, findings) if samples.known and not samples.same else []
        )
        return [OTHER_START_OF_PARTS if difference.aligned.divided else OTHER_START, *others]
    one, ranks = skips_of(difference.aligned.one, difference.step), skipped_steps(difference)
    if ranks.apart:
        return []
    if (here := skips_of(difference.aligned.ranks[0], difference.step)) != one:
        return [
            Obstacle(
                f"step {difference.step + 1}: GradScaler skipped {len(one)} steps on one device, and {len(here)} on "
                "each rank",
                "for the comparison, start with a smaller scale: GradScaler(init_scale=1024.0)",
            )
        ]
    if difference.others_seen:
        return other_samples(difference.aligned, difference.step, findings)
    random = drawing(difference.aligned.ranks[0], difference.step)
    if "random-numbers-per-rank" in mistakes and random is not None:
        return [Obstacle(f"step {difference.step + 1}: {random.why}", random.todo)]
    return []
