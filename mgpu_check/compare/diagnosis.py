"""What a difference looks like: the classes of mistakes that the traces are evidence of."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mgpu_check.compare.batches import of_samples
from mgpu_check.compare.first_difference import Diagnosis, Scene, updates
from mgpu_check.compare.obstacles import DROPOUT, random_parts
from mgpu_check.compare.trace import Trace
from mgpu_check.mistakes.report import Finding
from mgpu_check.processes.rank_lists import few, grouped, named

__all__ = ["common_factor", "diagnose"]

_FACTOR = 1e-3  # what looks like a factor: what is left of a tensor when the factor is taken out


def diagnose(scene: Scene) -> Diagnosis:
    """What the first step that parts ways looks like."""
    if scene.kind == "before":
        return _start(scene)
    if skipped := _skipped(scene):
        return skipped
    samples = scene.samples
    if samples.known and (not samples.same or scene.kind is None):
        return of_samples(scene.aligned, scene.step)
    if scene.kind == "gradient":
        return _gradient(scene)
    return _update(scene)


def _start(scene: Scene) -> Diagnosis:
    aligned = scene.aligned
    if not scene.apart["before"]:
        return Diagnosis(
            comparable=False,
            why="the ranks agree with each other, but start from other parameters than one device",
            todo=["seed every process alike before the model is built, and build it before random numbers are drawn"],
        )
    restored = _restored(scene)
    if restored:
        return Diagnosis(
            findings=[Finding("restored-on-one-rank", f"{restored}, and ranks start from other parameters")]
        )
    names, ranks = few(scene.apart["before"], 3), named(range(len(aligned.ranks)))
    return Diagnosis(
        findings=[Finding("different-initialization", f"before its first step, {ranks} differ in {names}")]
    )  # fmt: skip


def _skipped(scene: Scene) -> Diagnosis | None:
    """Whether a GradScaler has skipped other steps on ranks than on one device."""

    def skips(trace: Trace) -> list[int]:
        return [event["after"] for event in trace.of("skipped") if event["after"] <= scene.step]

    aligned = scene.aligned
    one, ranks = skips(aligned.one), [skips(trace) for trace in aligned.ranks]
    if all(found == ranks[0] for found in ranks):
        if ranks[0] == one:
            return None
        return Diagnosis(
            comparable=False,
            why=f"step {scene.step + 1}: GradScaler has skipped {len(one)} steps on one device, and {len(ranks[0])} on each rank",
            todo=["begin with a smaller scale for the comparison: GradScaler(init_scale=1024.0)"],
        )
    said = ", ".join(f"{len(found)} on rank {rank}" for rank, found in list(enumerate(ranks))[:4])
    return Diagnosis(findings=[Finding("decision-per-rank", f"GradScaler has skipped steps: {said}")])


def _restored(scene: Scene) -> str:
    """Which ranks have called load_state_dict how often until this step; nothing where all have alike."""
    calls = [
        (len([e for e in trace.of("restore") if e["after"] <= scene.step]), trace.rank) for trace in scene.aligned.ranks
    ]
    groups = grouped(calls)
    if len(groups) == 1:
        return ""
    parts = [f"{count} time{'s' * (count != 1)} on {named(ranks)}" for count, ranks in groups]
    return "load_state_dict was called " + ", ".join(parts)


def _gradient(scene: Scene) -> Diagnosis:
    apart = scene.apart["gradient"]
    if apart:
        evidence = (
            f"at step {scene.step + 1} each rank goes into the optimizer with a gradient of its own for {few(apart, 3)}"
        )
        return Diagnosis(findings=[Finding("gradients-not-synchronized", evidence)])
    found = _clipped(scene) or _factor(scene) or _modules(scene) or _means(scene)
    return found or Diagnosis()


def _clipped(scene: Scene) -> Diagnosis | None:
    """Whether a call of clip_grad_norm_ has found other norms on some ranks; synchronized gradients have one norm."""
    calls = [[e for e in trace.of("clip") if e["after"] == scene.step] for trace in scene.aligned.ranks]
    for call in zip(*calls, strict=False):
        norms = [event["norm"] for event in call]
        if max(norms) - min(norms) > scene.rounding.margin * 2.0**-22 * max(norms):
            said = ", ".join(f"{norm:.5g} on rank {rank}" for rank, norm in list(enumerate(norms))[:4])
            evidence = f"clip_grad_norm_(…, {call[0]['most']:g}) found the norms {said}: of gradients that were not yet the same"
            return Diagnosis(findings=[Finding("clipped-before-synchronization", evidence)])
    return None


def common_factor(pairs: Iterable[tuple[float, float]]) -> float | None:
    """The factor by which all of (got, expected) differ; None where there is none, or it is 1."""
    kept = [(g, e) for g, e in pairs if math.isfinite(g) and math.isfinite(e)]
    square = math.fsum(e * e for _, e in kept)
    if not square:
        return None
    factor = math.fsum(g * e for g, e in kept) / square
    left = math.fsum((g - factor * e) ** 2 for g, e in kept)
    if abs(factor - 1) < 10 * _FACTOR or left > (_FACTOR * factor) ** 2 * square:
        return None
    return factor


def _factor(scene: Scene) -> Diagnosis | None:
    pairs = []
    for wrong in scene.wrong["gradient"]:
        expected, here = scene.aligned.found(scene.step, "gradient", wrong.name)
        got = here[wrong.worst_rank]
        if got is not None and expected is not None and expected.norm:
            pairs += [
                (g / expected.norm, e / expected.norm) for g, e in zip(got.samples, expected.samples, strict=True)
            ]
    factor = common_factor(pairs)
    if factor is None:
        return None
    what = f"at step {scene.step + 1} the gradient is {factor:.4g} times that of one device"
    return _of_factor(scene, factor, what)


def _of_factor(scene: Scene, factor: float, what: str) -> Diagnosis | None:
    world = scene.aligned.world
    micro = max(len(trace.steps[scene.step].losses) for trace in scene.aligned.ranks)
    for mistake, number, name in (
        ("world-size-factor", world, "the world size"),
        ("accumulation-factor", micro, "the number of micro-batches"),
    ):
        if number > 1 and any(abs(factor / value - 1) < 10 * _FACTOR for value in (number, 1 / number)):
            return Diagnosis(findings=[Finding(mistake, f"{what}: {name}{' inverted' if factor < 1 else ''}")])
    return None


def _modules(scene: Scene) -> Diagnosis | None:
    """What makes a model compute otherwise where its batch is split."""
    events = [event for event in scene.aligned.ranks[0].of("module") if event["after"] <= scene.step]
    norms = sorted({name for event in events for name in event["batch_norms"]})
    if norms:
        several = len(scene.aligned.ranks) > 1
        part = f"{scene.samples.counts[0]} samples on rank 0" if several else "the samples of each GPU"
        evidence = f"the model has {', '.join(norms)} in training mode, over {part}"
        return Diagnosis(findings=[Finding("batch-statistics-per-rank", evidence)])
    if random := random_parts(scene.aligned.ranks[0], scene.step):
        return Diagnosis(
            comparable=False,
            findings=[
                Finding("random-numbers-per-rank", f"{', '.join(random)} draws a mask of its own on each rank"),
            ],
            why=f"step {scene.step + 1}: {', '.join(random)} drops other elements on ranks than on one device",
            todo=[DROPOUT],
        )
    return None


def _means(scene: Scene) -> Diagnosis | None:
    counts = scene.samples.counts
    if all(counts) and len(set(counts)) > 1:
        parts = ", ".join(str(count) for count in counts[:8])
        evidence = f"at step {scene.step + 1} ranks saw {parts} samples, and their gradients count alike"
        return Diagnosis(findings=[Finding("mean-of-means", evidence)])
    one, mean, _ = scene.aligned.losses(scene.step)
    if one is None or mean is None or scene.rounding.of_loss(scene.step) * abs(one) >= abs(mean - one):
        return None
    if scene.aligned.samples(scene.step).known and common_factor([(mean, one)]) is not None:
        evidence = (
            f"at step {scene.step + 1}, from the same samples, the mean over ranks of their losses is {mean:.7g}, and the "
            f"loss of one device {one:.7g}: each rank divides by a count of its own"
        )
        return Diagnosis(findings=[Finding("mean-of-means", evidence)])
    return None


def _update(scene: Scene) -> Diagnosis:
    """The gradients are right, and what the optimizer has made of them is not."""
    restored = _restored(scene)
    if restored:
        return Diagnosis(findings=[Finding("restored-on-one-rank", f"{restored}, and the same gradient led elsewhere")])
    step = scene.step + 1
    if scene.apart["parameter"]:
        evidence = f"at step {step} all ranks have the gradient of one device, and change {scene.apart['parameter'][0]} by other amounts"
        return Diagnosis(findings=[Finding("decision-per-rank", evidence)])
    pairs = []
    for wrong in scene.wrong["parameter"]:
        changes = updates(scene, wrong.name)
        size = max((abs(wanted) for _, wanted in changes), default=0.0)
        pairs += [(got / size, wanted / size) for got, wanted in changes if size]
    factor = common_factor(pairs)
    if factor is not None:
        what = f"at step {step} the gradient is that of one device, and the change {factor:.4g} times (a learning rate by world size?)"
        return _of_factor(scene, factor, what) or Diagnosis()
    return Diagnosis()
