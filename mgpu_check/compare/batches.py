"""What a difference looks like where one device and the ranks were given other samples, or ranks the same ones."""

from __future__ import annotations

from typing import Any

from mgpu_check.compare.obstacles import divided
from mgpu_check.compare.scene import Diagnosis, Scene
from mgpu_check.gate.report import Finding

__all__ = ["of_samples"]

_SAMPLER = "shards = DistributedSampler(dataset, world_size, rank) and batch_size=global_batch // world_size"


def of_samples(scene: Scene) -> Diagnosis:
    """Of a scene whose samples are known, and not those of one device, or the whole batch on each rank."""
    samples, world = scene.samples, len(scene.aligned.ranks)
    step = scene.step + 1
    if samples.repeated_on_each_rank:
        return Diagnosis(
            findings=[
                Finding(
                    "dataset-not-split",
                    f"at step {step} all {world} ranks saw the same {samples.counts[0]} samples",
                )
            ]
        )
    repeated = _repeated_epoch(scene)
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
    if not one - together and surplus and _padded(scene):
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


def _padded(scene: Scene) -> bool:
    world = len(scene.aligned.ranks)
    events = [event for trace in scene.aligned.ranks for event in trace.of("sampler")]
    return any(not event["drop_last"] and event["length"] % world for event in events)


def _repeated_epoch(scene: Scene) -> Finding | None:
    """Whether the ranks see, at this step, what they saw in an earlier epoch, for want of set_epoch."""
    epochs: dict[int, list[dict[str, Any]]] = {}
    for event in scene.aligned.ranks[0].of("sampler"):
        if event["shuffle"] and not event["set_epoch"] and event["after"] <= scene.step:
            epochs.setdefault(event["sampler"], []).append(event)
    for iterations in epochs.values():
        first, last = iterations[0]["after"], iterations[-1]["after"]
        if last == first:
            continue
        twin = first + scene.step - last
        if scene.aligned.samples(twin).ranks == scene.samples.ranks:
            return Finding(
                "epochs-not-reshuffled",
                f"epoch {len(iterations)} begins at step {last + 1}; at step {scene.step + 1} the ranks saw the samples "
                f"of step {twin + 1} again, and set_epoch was never called",
            )
    return None
