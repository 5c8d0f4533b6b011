"""Mistakes that lie in what ranks start from, decide and draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mgpu_check.mistakes.evidence import Evidence
from mgpu_check.mistakes.report import Finding
from mgpu_check.mistakes.results import Result
from mgpu_check.processes.rank_lists import grouped, named

if TYPE_CHECKING:
    from mgpu_check.mistakes.tensors import Tensors

__all__ = [
    "broadcast_of_another_rank",
    "broadcast_of_rank_0",
    "buffers_alone_drift",
    "buffers_drift",
    "calls_models_apart",
    "decides_by_own_values",
    "decides_by_rank",
    "decides_for_its_parameters",
    "draws_by_rank",
    "draws_other_numbers",
    "kept_on_some",
    "may_draw_by_rank",
    "restores_later_on_some",
    "restores_on_some",
    "right_on_one_rank",
    "starts_apart",
    "steps_unlike_one_device",
    "updates_on_some",
]


def restores_on_some(evidence: Evidence) -> Finding | None:
    """Name a checkpoint that only some ranks load, where ranks start from other parameters than each other."""
    if evidence.start is None or not evidence.loads.apart:
        return None
    return Finding("restored-on-one-rank", f"{evidence.loads.told}, and {evidence.start.briefly}")


def restores_later_on_some(evidence: Evidence) -> Finding | None:
    """Name a checkpoint that only some ranks load, where ranks start alike, and part ways."""
    if evidence.start is not None or not evidence.loads.apart or not evidence.parted:
        return None
    return Finding("restored-on-one-rank", f"{evidence.loads.told}, and {evidence.parted}")


def starts_apart(evidence: Evidence) -> Finding | None:
    """Name another initialization, where ranks start from other parameters, and all load a checkpoint, or none."""
    if evidence.start is None or evidence.loads.apart:
        return None
    return Finding("different-initialization", evidence.start.told)


def decides_by_rank(evidence: Evidence) -> Finding | None:
    """Name a decision that ranks have taken each for itself: a step, a rate, a step that is skipped, an update."""
    return next((Finding("decision-per-rank", one.told) for one in evidence.decisions if one.apart), None)


def decides_by_own_values(evidence: Evidence) -> Finding | None:
    """Name a decision per rank where what decides is another value on each rank, whatever has come of it."""
    return next((Finding("decision-per-rank", one.told) for one in evidence.grounds if one.apart), None)


def steps_unlike_one_device(tensors: Tensors) -> Finding | None:
    """Name a decision where ranks agree on a number of steps that is not that of one device."""
    here, there = tensors.seen[0].optimizer_steps, tensors.expected.single.optimizer_steps
    if (
        not there
        or here == there
        or (tensors.traces and not any(trace.of("step") for trace in tensors.traces) and not here)
    ):
        return None  # a step without an optimizer decides nothing about one
    return Finding(
        "decision-per-rank",
        f"the optimizer has stepped {here} times on {tensors.size} ranks, {there} times on one device",
    )


def updates_on_some(tensors: Tensors) -> Finding | None:
    """Name the value of one rank, where only some have updated a parameter."""
    odd = next(iter(_updated_unlike(tensors)), None)
    if odd is None or odd not in tensors.relations.split:
        return None
    before = tensors.expected.single.initial[odd.of]
    updated = [
        rank
        for rank, one in enumerate(tensors.seen)
        if odd in one.values and not one.values[odd].to(before.dtype).equal(before)
    ]
    if not 0 < len(updated) < tensors.size:
        return None
    told = f"{odd} was updated on {named(updated)} only, and nothing gives it to the others"
    return Finding("value-of-one-rank", told)


def kept_on_some(tensors: Tensors) -> Finding | None:
    """Name the value of one rank, where some ranks alone have brought a state up to date, and others have it as built."""
    initial = tensors.expected.single.initial
    for name in tensors.relations.split:
        before = initial.get(name.of)
        values = [one.values.get(name) for one in tensors.seen]
        known = [value for value in values if value is not None and before is not None and value.shape == before.shape]
        if name.kind not in ("params", "buffers") or before is None or len(known) < tensors.size:
            continue
        moved = [rank for rank, value in enumerate(known) if not value.to(before.dtype).equal(before)]
        if not 0 < len(moved) < tensors.size or set(moved) & set(tensors.relations.wrong.get(name, [])):
            continue
        return Finding(
            "value-of-one-rank", f"{name} was updated on {named(moved)} only, and is as it was built on the others"
        )
    return None


def calls_models_apart(tensors: Tensors) -> Finding | None:
    """Name the value of one rank, where ranks call a model of other parameters, though what they train is the same."""
    if any(tensors.is_of_model(name) for name in (*tensors.wrong(), *tensors.relations.split)):
        return None
    calls = [trace.of("model") for trace in tensors.traces]
    for same in zip(*calls, strict=False):
        held = [event.details["parameters"] for event in same]
        if len({(event.name, event.site) for event in same}) > 1 or all(one == held[0] for one in held):
            continue
        if len({event.details.get("owns") for event in same}) > 1:
            continue  # parts of one model, and no copies
        odd = next((name for name in held[0] if any(one.get(name) != held[0][name] for one in held)), "")
        if not odd or not tensors.is_whole(odd):
            continue  # each rank holds a part of it, as of a flat parameter
        told = ", ".join(f"{one.get(odd, math.nan):.6g} on {named(ranks)}" for one, ranks in _grouped(held, odd))
        return Finding(
            "value-of-one-rank",
            f"{same[0].name} is called ({same[0].site}) with other parameters on some ranks than on others, {odd} sums to "
            f"{told}, though the parameters that are trained are the same: a copy or an average of them is kept on some ranks "
            "only",
        )
    return None


def _grouped(held: Sequence[Mapping[str, float]], name: str) -> list[tuple[Mapping[str, float], list[int]]]:
    return [(held[ranks[0]], ranks) for _, ranks in grouped((one.get(name), rank) for rank, one in enumerate(held))]


def decides_for_its_parameters(tensors: Tensors) -> Finding | None:
    """Name a decision per rank where some parameters were updated, and one device updates all of them, or none."""
    moved, should = _updates(tensors)
    odd = next(iter(_updated_unlike(tensors)), None)
    if odd is None or len(set(should.values())) != 1 or len(set(moved.values())) != 2 or updates_on_some(tensors):
        return None
    all_stay = not should[odd]
    return Finding(
        "decision-per-rank",
        f"{odd} was {'updated' if all_stay else 'left as it was'} and other parameters were not, where one device "
        f"{'skips the step' if all_stay else 'updates all'}: its owner has decided for itself",
    )


def _updated_unlike(tensors: Tensors) -> list[Result]:
    """Find parameters that one device has updated and rank 0 has not, or the other way round.

    Whose gradient is zero stays as it is without anybody's decision.
    """
    moved, should = _updates(tensors)
    gradients = {name.of: value for name, value in tensors.seen[0].values.items() if name.kind == "grads"}
    idle = {of for of, value in gradients.items() if not bool(value.any())}
    return [name for name in moved if moved[name] != should[name] and name.of not in idle]


def _updates(tensors: Tensors) -> tuple[dict[Result, bool], dict[Result, bool]]:
    """Return whether rank 0, and one device, have updated each parameter, by what is returned of it, or else by itself."""
    moved: dict[Result, bool] = {}
    should: dict[Result, bool] = {}
    held, expected = tensors.seen[0].values, tensors.expected.single
    for name, before in expected.initial.items():
        returned = Result("returned", name)
        for label in (Result("params", name), returned):
            got, right = held.get(label), expected.values.get(label)
            if got is not None and right is not None and got.shape == before.shape == right.shape:
                if label != returned and returned in held:
                    continue
                moved[label] = not got.to(before.dtype).equal(before)
                should[label] = not right.to(before.dtype).equal(before)
    return moved, should


def right_on_one_rank(tensors: Tensors) -> Finding | None:
    """Name the value of one rank, where one alone is right."""
    for name in tensors.relations.split:
        wrong = tensors.relations.wrong.get(name, [])
        right = [rank for rank in range(tensors.size) if rank not in wrong]
        if wrong and len(right) == 1:
            return Finding("value-of-one-rank", f"{name} is right on rank {right[0]}, and not on the other ranks")
    return None


def broadcast_of_another_rank(tensors: Tensors) -> Finding | None:
    """Name the value of one rank, where ranks agree on something wrong, and a rank other than 0 broadcasts."""
    return _broadcast_wrong(tensors, from_rank_0=False)


def broadcast_of_rank_0(tensors: Tensors) -> Finding | None:
    """Name the value of one rank, where ranks agree on something wrong, and rank 0 broadcasts, as in many right programs."""
    return _broadcast_wrong(tensors, from_rank_0=True)


def _broadcast_wrong(tensors: Tensors, *, from_rank_0: bool) -> Finding | None:
    sent = next((event for _, event in tensors.events("collective") if event.name == "broadcast"), None)
    wrong = [name for name in tensors.wrong() if name not in tensors.relations.split]
    if sent is None or not wrong:
        return None
    source = sent.details.get("src", 0)
    if (not source) is not from_rank_0:
        return None
    return Finding(
        "value-of-one-rank",
        f"broadcast ({sent.site}) sends what rank {source} has, and {wrong[0]} is the same on all ranks, but not that of one "
        "device",
    )


def buffers_alone_drift(tensors: Tensors) -> Finding | None:
    """Name buffers that differ between ranks, where nothing else is wrong.

    Those that DistributedDataParallel is going to overwrite are not held against ranks, but what it overwrites them with is
    wrong then, as it is that of one rank. Where statistics of a batch are what they hold, others name them.
    """
    if any(name.kind != "buffers" for name in tensors.wrong()):
        return None
    if (drift := buffers_drift(tensors)) is not None or tensors.seen[0].normalized:
        return drift
    for name in tensors.wrong("buffers"):
        values = [one.values[name] for one in tensors.seen if name in one.values]
        if any(not value.equal(values[0]) for value in values):
            return Finding(
                "buffers-drift", f"{name} differs between ranks, and DistributedDataParallel keeps that of rank 0 alone"
            )
    return None


def buffers_drift(tensors: Tensors) -> Finding | None:
    """Name buffers that differ between ranks."""
    drifted = [name for name in tensors.relations.split if name.kind == "buffers"]
    return Finding("buffers-drift", f"{drifted[0]} differs between ranks") if drifted else None


def draws_by_rank(evidence: Evidence) -> Finding | None:
    """Name random numbers that each rank draws for its own part of the batch."""
    return Finding("random-numbers-per-rank", evidence.draws) if evidence.draws else None


def draws_other_numbers(evidence: Evidence) -> Finding | None:
    """Name random numbers of which each rank draws as many as one device, and others than the other ranks."""
    return Finding("random-numbers-per-rank", evidence.numbers_apart) if evidence.numbers_apart else None


def may_draw_by_rank(evidence: Evidence) -> Finding | None:
    """Name random numbers where some are drawn, which need not do any harm."""
    return Finding("random-numbers-per-rank", evidence.may_draw) if evidence.may_draw else None
