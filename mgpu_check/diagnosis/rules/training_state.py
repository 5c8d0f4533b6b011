"""Detect mistakes of the optimizer and of checkpoints.

An optimizer makes wrong updates from right gradients, or steps with the gradients of one rank. A checkpoint lacks
state, so that a resumed run differs from an uninterrupted one.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.evidence import Restored
from mgpu_check.diagnosis.observations import Result, is_left, norms_of
from mgpu_check.diagnosis.report import Finding, on_checkpoint, on_experiments, on_tensors
from mgpu_check.diagnosis.rules import says
from mgpu_check.processes.rank_lists import by_ranks, few, grouped, named

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors

_RATE = "learning rate of group"


@on_tensors
def steps_other_tensors(tensors: Tensors) -> Finding | None:
    """Detect an optimizer that steps tensors outside of the model, so that its steps have no effect."""
    single = tensors.expected.single
    known = single.settings.keys()
    lost = [n for n, run in enumerate(tensors.seen) if run.optimizer_steps and not run.settings.keys() & known]
    if not single.settings or not lost or not tensors.wrong("params"):
        return None
    summary = (
        f"the optimizer of {named(lost)} steps tensors that do not belong to the model: was it made before the model "
        "was divided, or while it was gathered?"
    )
    return Finding("optimizer-differs", summary, tuple(lost))


@on_experiments
def optimizes_its_own(tensors: Tensors) -> Finding | None:
    """Detect an optimizer step with unsynchronized gradients, even if parameters are averaged later.

    The optimizer must be nonlinear in the gradient: otherwise averaging the parameters afterwards would be right. The
    step must be right with combined gradients: otherwise a wrong forward pass may be the reason why they differ.
    """
    change = tensors.right_with("combine")
    if change is None or not tensors.seen[0].nonlinear or not tensors.gradient_like:
        return None
    if any(not run.snapshots for run in tensors.seen):
        return None
    events = [list(itertools.takewhile(lambda event: event.kind != "step", trace.events)) for trace in tensors.traces]
    lasts = [next((event for event in reversed(before) if event.kind == "backward"), None) for before in events]
    recorded = [event for event in lasts if event is not None]
    gradients = [event.details.get("left", {}) for event in recorded]
    if len(recorded) < max(2, tensors.size):
        return None
    for name in tensors.seen[0].stepped:
        gradient = Result("grads", name)
        values = [run.snapshots[0][gradient] for run in tensors.seen if gradient in run.snapshots[0]]
        if all(name in run.stepped for run in tensors.seen) and is_left(gradient, gradients, values):
            step = tensors.traces[0].of("step")[0]
            return Finding(
                "gradients-not-synchronized",
                f"{step.where} steps with the {gradient} of each rank's own backward ({recorded[0].site}), with norm "
                f"{norms_of(name, gradients)}; with their {change.combination} the step is right",
                site=step.site,
            )
    return None


@on_tensors
def makes_something_else(tensors: Tensors) -> Finding | None:
    """Detect an optimizer step that makes wrong parameters from right gradients and right parameters.

    The reason is the settings of the parameter groups if these differ from one device, and the update rule otherwise.
    """
    step, parameters, ranks = _first_wrong_step(tensors)
    if not parameters:
        return _other_settings_of_the_only_step(tensors) or _rates_after_the_last_step(tensors)
    odd = tuple(ranks) if len(ranks) < tensors.size else ()
    reason = _settings(tensors, [name.of for name in parameters])
    return Finding(
        "optimizer-differs",
        f"the gradients of optimizer step {step + 1} are right, and it changes {few(parameters)} otherwise than on one "
        f"device{f' on {named(odd)}' if odd else ''}; "
        f"{reason or 'the settings of its group are those of one device: it is the update rule'}",
        odd,
    )


@says("optimizer-differs", on_tensors)
def starts_anew(tensors: Tensors) -> str:
    """Detect several optimizers that make as many steps together as one on one device: each begins without a state."""
    single = tensors.expected.single
    counts = {(run.optimizers, run.optimizer_steps) for run in tensors.seen}
    if len(counts) > 1 or not single.optimizers or not tensors.wrong("params"):
        return ""
    optimizers, steps = counts.pop()
    if steps != single.optimizer_steps or not single.optimizers < optimizers <= steps:
        return ""
    return (
        f"{optimizers} optimizers make {steps} steps together on ranks, and {single.optimizers} on one device: each "
        "starts without the moments that the one before has collected"
    )


def _other_settings_of_the_only_step(tensors: Tensors) -> Finding | None:
    """Detect settings that differ from one device, if the steps of some rank are not on record.

    There must be one step only, the gradients in the end must be right, and a wrong parameter must have other settings
    on a rank where it is wrong.
    """
    mismatches = tensors.wrong("params")
    steps = {run.optimizer_steps for run in (*tensors.seen, tensors.expected.single)}
    recorded = all(run.snapshots for run in tensors.seen)
    if steps != {1} or not mismatches or not tensors.has_right_gradients or recorded:
        return None
    reason = _settings(tensors, [name.of for name in mismatches])
    return Finding("optimizer-differs", f"gradients are right, but not {few(mismatches)}; {reason}") if reason else None


def _first_wrong_step(tensors: Tensors) -> tuple[int, list[Result], list[int]]:
    """Return the first wrong step, the parameters that are wrong after it, and the ranks where they are.

    Both lists are empty if its gradients are wrong too, or if the ranks start from wrong parameters.
    """
    start = tensors.expected.single.initial
    for run in tensors.seen:
        pairs = ((run.initial[name], value) for name, value in start.items() if name in run.initial)
        if any(own.shape != value.shape or not own.equal(value) for own, value in pairs):
            return 0, [], []
    for step, expected in enumerate(tensors.expected.snapshots):
        allowed = tensors.expected.allowances[step]
        mismatches: dict[Result, list[int]] = {}
        for rank, run in enumerate(tensors.seen):
            stage = run.snapshots[step] if step < len(run.snapshots) else {}
            for name, value in expected.items():
                got = stage.get(name)
                if got is None or got.shape != value.shape:
                    return step, [], []
                if bool(((got.double() - value).abs() > allowed[name]).any()):
                    mismatches.setdefault(name, []).append(rank)
        if mismatches:
            if any(name.kind == "grads" for name in mismatches):
                return step, [], []
            return step, list(mismatches), sorted({rank for ranks in mismatches.values() for rank in ranks})
    return 0, [], []


def _settings(tensors: Tensors, parameter_names: list[str]) -> str:
    """Describe a setting of a wrong parameter that differs from one device; "" if none differs or none is known."""
    single = tensors.expected.single
    for name in parameter_names:
        expected = single.settings.get(name)
        for rank, run in enumerate(tensors.seen):
            got = run.settings.get(name)
            own = run.own.get(Result("params", name))
            if expected is None or got is None or (own is not None and not bool(own.any())):
                continue
            differing = [key for key in expected if key in got and got[key] != expected[key]]
            if differing:
                key = differing[0]
                summary = f"{key} of {name} is {got[key]} on rank {rank}, and {expected[key]} on one device"
                if run.groups == single.groups:
                    return summary
                verb, plural = ("is", "") if run.groups == 1 else ("are", "s")
                return (
                    f"{summary}; there {verb} {run.groups} parameter group{plural}, and {single.groups} on one device"
                )
    return ""


def _rates_after_the_last_step(tensors: Tensors) -> Finding | None:
    """Detect a wrong learning rate after the last step, if all other results are right.

    The next update will be wrong.
    """
    mismatches = tensors.wrong()
    if not mismatches or not all(name.kind == "optimizer" and name.of.startswith(_RATE) for name in mismatches):
        return None
    rank, expected = tensors.relations.wrong[mismatches[0]][0], tensors.expected.exact.get(mismatches[0])
    got = tensors.seen[rank].values.get(mismatches[0])
    if got is None or expected is None or got.numel() != 1 or expected.numel() != 1:
        return None
    summary = (
        f"{mismatches[0]} is {float(got):.6g}, and {float(expected):.6g} on one device, after the same steps: does a "
        "scheduler step more often?"
    )
    return Finding("optimizer-differs", summary)


_SHOWN = 4
_UNSAID = "what train does not return (the optimizer, the schedule, the position in the data) was not restored"


# State that is lost right after loading comes before its consequences.
@says("resharded-wrongly", on_checkpoint)
def resharded_wrongly(restored: Restored) -> str:
    """Detect saved parts that other ranks hold in wrong places after loading."""
    return next(iter(restored.resharded.values()), "")


@says("steps-mixed", on_checkpoint)
def has_parts_of_other_steps(restored: Restored) -> str:
    """Detect entries that are right after loading, on all ranks, as an uninterrupted run has them at another step."""
    by_step = grouped((step, str(name)) for name, step in restored.of_other_steps.items())
    clauses = [f"{few(names, _SHOWN)} {'is' if len(names) == 1 else 'are'} as after step {s}" for s, names in by_step]
    return f"right after loading, {'; '.join(clauses)}" if clauses else ""


@says("restored-on-one-rank", on_checkpoint)
def loaded_on_some(restored: Restored) -> str:
    """Detect a checkpoint that only some ranks loaded: entries are right after loading on those ranks only."""
    return f"right after loading, not as saved: {by_ranks(restored.on_some, _SHOWN)}" if restored.on_some else ""


@says("state-not-restored", on_checkpoint)
def goes_on_in_another_epoch(restored: Restored) -> str:
    """Detect a sampler that continues in the wrong epoch: all its batches differ, even if generators are restored."""
    return restored.epochs and f"{restored.epochs}: call set_epoch with the epoch where training continues"


@says("state-not-restored", on_checkpoint)
def loaded_on_none(restored: Restored) -> str:
    """Detect entries that differ from the saved ones on every rank after loading."""
    lost = list(restored.nowhere)
    return f"right after loading, on no rank as saved: {few(lost, _SHOWN)}" if lost else ""


@says("state-not-restored", on_checkpoint)
def numbers_of_rank_0(restored: Restored) -> str:
    """Detect generators that every rank restored from the state of rank 0."""
    generators = by_ranks(restored.numbers_of_rank_0, _SHOWN)
    return generators and f"{generators}: what rank 0 had; each rank must save and load its own"


@says("state-not-restored", on_checkpoint)
def state_of_rank_0(restored: Restored) -> str:
    """Detect entries that every rank restored from rank 0, if no other entry is lost."""
    if restored.on_some or not restored.of_rank_0:
        return ""
    # DistributedDataParallel broadcasts buffers when it is constructed: they look the same here, and are harmless.
    return f"{by_ranks(restored.of_rank_0, _SHOWN)}: what rank 0 had, where each rank had saved its own; or {_UNSAID}"


@says("restored-on-one-rank", on_checkpoint)
def ranks_part_ways(restored: Restored) -> str:
    """Detect a checkpoint that only some ranks loaded, by the results that differ between ranks at the end."""
    if restored.parted:
        parted = by_ranks(restored.parted, _SHOWN)
        return f"ranks agree after an uninterrupted run, and not after the resumed one: {parted}"
    wrong = by_ranks(restored.right_on_rank_0, _SHOWN)
    return wrong and f"right on rank 0 only: {wrong} are wrong"


@says("state-not-restored", on_checkpoint)
def not_in_the_state(restored: Restored) -> str:
    """Detect state that the checkpoint lacks: every entry that train returns is restored, and the run still differs."""
    is_whole = restored.seen and not restored.lost
    return f"every entry that train returns is restored, so {_UNSAID}" if is_whole else ""


@says("state-not-restored", on_checkpoint)
def differs_at_the_end(restored: Restored) -> str:
    """Report the entries that differ at the end, if the state right after loading was not observed."""
    return "" if restored.seen else f"at the end differ {few(list(restored.at_the_end), _SHOWN)}"
