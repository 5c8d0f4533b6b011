"""Detect mistakes in the initial states of ranks, in their decisions, and in their random numbers.

Some show only when every rank evaluates the trained model.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.divergence import has_unlike_results
from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.observations import Change, Result
from mgpu_check.diagnosis.report import Finding, on_evidence, on_tensors
from mgpu_check.diagnosis.rules import on_change, says
from mgpu_check.processes.rank_lists import grouped, named

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors


@says("restored-on-one-rank", on_evidence)
def restores_on_some(evidence: Evidence) -> str:
    """Detect a checkpoint that only some ranks load, if ranks start from different parameters."""
    start, loads = evidence.start, evidence.loads
    return f"{loads.told}, and {start.briefly}" if start is not None and loads.apart else ""


@says("restored-on-one-rank", on_evidence)
def restores_later_on_some(evidence: Evidence) -> str:
    """Detect a checkpoint that only some ranks load, if ranks start alike and differ later."""
    later = evidence.start is None and evidence.loads.apart and evidence.parted
    return f"{evidence.loads.told}, and {evidence.parted}" if later else ""


@says("different-initialization", on_evidence)
def starts_apart(evidence: Evidence) -> str:
    """Detect different initial parameters, if all ranks load a checkpoint or no rank does."""
    return "" if evidence.start is None or evidence.loads.apart else evidence.start.told


@says("decision-per-rank", on_evidence)
def decides_by_rank(evidence: Evidence) -> str:
    """Detect steps, learning rates, loss scales or trained parameters that differ between ranks."""
    return next((each.told for each in evidence.decisions if each.apart), "")


@on_change("draw")
def right_with_numbers_of_rank_0(change: Change) -> Finding:
    """Detect random numbers that should be the same on all ranks."""
    seeded = f"; seeds are set at {change.site}" if change.site else ""
    summary = f"if all ranks draw the random numbers of rank 0, the step is right{seeded}"
    return Finding("random-numbers-per-rank", summary, site=change.site)


@says("decision-per-rank", on_evidence)
def decides_by_own_values(evidence: Evidence) -> str:
    """Detect a value that differs between ranks and decides, even if the ranks happened to decide alike."""
    return next((ground.told for ground in evidence.grounds if ground.apart), "")


@says("decision-per-rank", on_tensors)
def steps_unlike_one_device(tensors: Tensors) -> str:
    """Detect an optimizer that steps another number of times than on one device, which explains all wrong parameters.

    One of both ends with the parameters that the other has after as many steps.
    """
    on_ranks, on_device = tensors.seen[0].optimizer_steps, tensors.expected.single.optimizer_steps
    on_all = {run.optimizer_steps for run in tensors.seen}
    if not on_ranks or not on_device or on_ranks == on_device or not tensors.steps_alike or len(on_all) > 1:
        return ""  # the step may use no optimizer, and a reference may have others
    if not _ends_after(tensors, min(on_ranks, on_device)):
        return ""
    return f"the optimizer has stepped {on_ranks} times on {tensors.size} ranks, {on_device} times on one device"


def _ends_after(tensors: Tensors, steps: int) -> bool:
    """Return whether the side that steps less often ends with the parameters of the other side after as many steps."""
    expected, start = tensors.expected, tensors.expected.single.initial
    mismatches = [name for name in tensors.wrong("params", "returned") if name.of in start]
    for run, name in itertools.product(tensors.seen, mismatches):
        is_first = run.optimizer_steps == steps
        end = (run.values if is_first else expected.exact).get(name)
        stages = [{Result("params", parameter): value for parameter, value in start.items()}]
        stages += expected.snapshots if is_first else run.snapshots
        after = stages[steps].get(Result("params", name.of)) if steps < len(stages) else None
        allowed = expected.tolerance.get(name)
        if end is None or after is None or allowed is None or not end.shape == after.shape == allowed.shape:
            return False
        if bool(((end.double() - after.double()).abs() > allowed).any()):
            return False
    return bool(mismatches)


@says("value-of-one-rank", on_tensors)
def updates_on_some(tensors: Tensors) -> str:
    """Detect a parameter that only some ranks update, so that ranks differ."""
    odd = next(iter(_updated_unlike(tensors)), None)
    if odd is None or odd not in tensors.relations.split:
        return ""
    before = tensors.expected.single.initial[odd.of]
    values = [run.values.get(odd) for run in tensors.seen]
    shaped = {rank: value for rank, value in enumerate(values) if value is not None and value.shape == before.shape}
    updated = [rank for rank, value in shaped.items() if not value.to(before.dtype).equal(before)]
    if len(shaped) < tensors.size or not 0 < len(updated) < tensors.size:
        return ""
    return f"{odd} was updated on {named(updated)} only, and not sent to the other ranks"


@says("value-of-one-rank", on_tensors)
def kept_on_some(tensors: Tensors) -> str:
    """Detect a parameter or buffer that some ranks updated correctly, and that has its initial value on the others."""
    initial = tensors.expected.single.initial
    for name in tensors.relations.split:
        before = initial.get(name.of)
        values = [run.values.get(name) for run in tensors.seen]
        shaped = [value for value in values if value is not None and before is not None and value.shape == before.shape]
        if name.kind not in ("params", "buffers") or before is None or len(shaped) < tensors.size:
            continue
        moved = [rank for rank, value in enumerate(shaped) if not value.to(before.dtype).equal(before)]
        if not 0 < len(moved) < tensors.size or set(moved) & set(tensors.relations.wrong.get(name, [])):
            continue
        return f"{name} was updated on {named(moved)} only, and has its initial value on the others"
    return ""


@on_tensors
def calls_models_apart(tensors: Tensors) -> Finding | None:
    """Detect a copy or an average of the model that only some ranks keep: ranks call it with different parameters."""
    broken = [*tensors.wrong(), *tensors.relations.split]
    if not broken or any(tensors.is_of_model(name) for name in broken):
        return None
    for same in tensors.together("model"):
        sums_by_rank = [event.details["parameters"] for event in same]
        # Ranks may hold different parts of one model, not copies.
        if len({(event.name, event.site, event.details.get("owns")) for event in same}) > 1:
            continue
        common = [name for name in sums_by_rank[0] if all(name in own_sums for own_sums in sums_by_rank)]
        odd = next((name for name in common if any(own[name] != sums_by_rank[0][name] for own in sums_by_rank)), "")
        if not odd or not tensors.is_whole(odd):
            continue  # each rank holds a slice of the parameter, as FSDP1 does
        by_sum = grouped((own_sums[odd], rank) for rank, own_sums in enumerate(sums_by_rank))
        sums = ", ".join(f"{total:.6g} on {named(ranks)}" for total, ranks in by_sum)
        return Finding(
            "value-of-one-rank",
            f"{same[0].name} is called ({same[0].site}) with other parameters on some ranks than on others, {odd} "
            f"sums to {sums}, though the parameters that are trained are the same: a copy or an average of them is "
            "kept on some ranks only",
            site=same[0].site,
        )
    return None


@says("decision-per-rank", on_tensors)
def decides_for_its_parameters(tensors: Tensors) -> str:
    """Detect a decision per owner: only some parameters were updated, and one device updates all of them or none."""
    moved, should = _updates(tensors)
    odd = next(iter(_updated_unlike(tensors)), None)
    if odd is None or len(set(should.values())) != 1 or len(set(moved.values())) != 2 or updates_on_some(tensors):
        return ""
    all_stay = not should[odd]
    return (
        f"{odd} was {'updated' if all_stay else 'left as it was'} and other parameters were not, where one device "
        f"{'skips the step' if all_stay else 'updates all'}: the rank that owns it decided alone"
    )


def _updated_unlike(tensors: Tensors) -> list[Result]:
    """Return the parameters that one device updated and rank 0 did not, or the other way round.

    Parameters with a zero gradient are left out: they keep their values without any decision.
    """
    moved, should = _updates(tensors)
    gradients = {name.of: value for name, value in tensors.seen[0].values.items() if name.kind == "grads"}
    idle = {parameter for parameter, value in gradients.items() if not bool(value.any())}
    return [name for name in moved if moved[name] != should[name] and name.of not in idle]


def _updates(tensors: Tensors) -> tuple[dict[Result, bool], dict[Result, bool]]:
    """Return whether rank 0 updated each parameter, and whether one device did.

    A value that the step returns under the name of a parameter replaces the parameter itself.
    """
    moved: dict[Result, bool] = {}
    should: dict[Result, bool] = {}
    values, expected = tensors.seen[0].values, tensors.expected.single
    for name, before in expected.initial.items():
        returned = Result("returned", name)
        for label in (Result("params", name), returned):
            got, on_device = values.get(label), expected.values.get(label)
            if got is not None and on_device is not None and got.shape == before.shape == on_device.shape:
                if label != returned and returned in values:
                    continue
                moved[label] = not got.to(before.dtype).equal(before)
                should[label] = not on_device.to(before.dtype).equal(before)
    return moved, should


@says("value-of-one-rank", on_tensors)
def right_on_one_rank(tensors: Tensors) -> str:
    """Detect a result that is right on exactly one rank.

    A parameter may be right by chance, after the update by a wrong gradient. If a collective gave ranks different
    results, the code is not at fault.
    """
    if has_unlike_results(tensors.traces):
        return ""
    for name in tensors.relations.split:
        right_ranks = tensors.right_ranks(name)
        if len(tensors.relations.wrong.get(name, [])) < tensors.size - 1 or len(right_ranks) != 1:
            continue
        (rank,) = right_ranks
        wrong_before = tensors.relations.wrong.get(Result("grads", name.of), []) if name.kind == "params" else []
        if rank not in wrong_before and all(rank in case.right_ranks(name) for case in tensors.further):
            return f"{name} is right on rank {rank}, and not on the other ranks"
    return ""


@on_tensors
def buffers_alone_drift(tensors: Tensors) -> Finding | None:
    """Detect buffers that differ between ranks, if no other result is wrong.

    DistributedDataParallel overwrites some buffers with those of rank 0. Their differences are allowed, but the value
    of rank 0 is wrong too. With BatchNorm, other rules report the batch statistics in its buffers.
    """
    if any(name.kind != "buffers" for name in tensors.wrong()):
        return None
    if (drift := buffers_drift(tensors)) is not None or tensors.seen[0].normalized:
        return drift
    for name in tensors.wrong("buffers"):
        values = [run.values[name] for run in tensors.seen if name in run.values]
        if any(not value.equal(values[0]) for value in values):
            summary = f"{name} differs between ranks, and DistributedDataParallel keeps that of rank 0 alone"
            return Finding("buffers-drift", summary)
    return None


@says("buffers-drift", on_tensors)
def buffers_drift(tensors: Tensors) -> str:
    """Detect buffers that differ between ranks."""
    drifted = [name for name in tensors.relations.split if name.kind == "buffers"]
    return f"{drifted[0]} differs between ranks" if drifted else ""
