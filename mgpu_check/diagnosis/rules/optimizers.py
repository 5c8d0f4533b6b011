"""Detect mistakes of the optimizer: wrong updates from right gradients, or steps with the gradients of one rank."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.observations import Result, is_left
from mgpu_check.diagnosis.registry import Precedence, mistake, on_evidence, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.processes.rank_lists import few, named

if TYPE_CHECKING:
    from mgpu_check.diagnosis.evidence import Evidence
    from mgpu_check.diagnosis.observations import ObservedRun
    from mgpu_check.diagnosis.tensors import Tensors

_RATE = "learning rate of group"
_SHOWN = 4
"""Most ranks whose values a message lists, so that it stays one line."""

mistake(
    "optimizer-differs",
    "gradients are right, but the optimizer updates the parameters differently than on one device",
    "after wrapping, compare learning rates, parameter groups and their settings with those of one device; step a "
    "scheduler once per optimizer step; take norms and other products of whole tensors, not of shards",
)


@on_tensors(Precedence.ANOTHER_BATCH + 100)
def steps_other_tensors(tensors: Tensors) -> Finding | None:
    """Detect an optimizer that steps tensors outside of the model, so that its steps have no effect."""
    single = tensors.expected.single
    lost = [
        rank
        for rank, one in enumerate(tensors.seen)
        if one.optimizer_steps and not one.settings.keys() & single.settings.keys()
    ]
    if not single.settings or not lost or not tensors.wrong("params"):
        return None
    told = (
        f"the optimizer of {named(lost)} steps tensors that do not belong to the model: was it made before the model "
        "was divided, or while it was gathered?"
    )
    return Finding("optimizer-differs", told, tuple(lost))


@on_tensors(Precedence.SUMS + 310)  # before a mean of parts, which averaged parameters also fit
def optimizes_its_own(tensors: Tensors) -> Finding | None:
    """Detect an optimizer step with unsynchronized gradients, even if parameters are averaged later.

    The optimizer must be nonlinear in the gradient: otherwise averaging the parameters afterwards would be right. The
    step must be right with combined gradients: otherwise a wrong forward pass may be the reason why they differ.
    """
    change = tensors.right_with("combine")
    if change is None or not tensors.seen[0].nonlinear or not tensors.gradient_like:
        return None
    if any(not one.snapshots for one in tensors.seen):
        return None
    events = [list(itertools.takewhile(lambda event: event.kind != "step", trace.events)) for trace in tensors.traces]
    lasts = [next((event for event in reversed(before) if event.kind == "backward"), None) for before in events]
    known = [event for event in lasts if event is not None]
    left = [event.details.get("left", {}) for event in known]
    if len(known) < max(2, tensors.size):
        return None
    for name in tensors.seen[0].stepped:
        gradient = Result("grads", name)
        values = [one.snapshots[0][gradient] for one in tensors.seen if gradient in one.snapshots[0]]
        if all(name in one.stepped for one in tensors.seen) and is_left(gradient, left, values):
            step = tensors.traces[0].of("step")[0]
            told = ", ".join(f"{one[name]['norm']:.4g} on rank {rank}" for rank, one in enumerate(left[:_SHOWN]))
            return Finding(
                "gradients-not-synchronized",
                f"{step.where} steps with the {gradient} of each rank's own backward ({known[0].site}), with norm "
                f"{told}; with their {change.combination} the step is right",
                site=step.site,
            )
    return None


@on_evidence(Precedence.UPDATES + 20)
def updates_otherwise(evidence: Evidence) -> Finding | None:
    """Detect wrong updates from right gradients, as the evidence describes them."""
    return Finding("optimizer-differs", evidence.updates) if evidence.updates else None


@on_tensors(Precedence.UPDATES + 10)
def makes_something_else(tensors: Tensors) -> Finding | None:
    """Detect an optimizer step that makes wrong parameters from right gradients and right parameters.

    The reason is the settings of the parameter groups if these differ from one device, and the update rule otherwise.
    """
    step, names, ranks = _first_wrong_step(tensors)
    if not names:
        return _other_settings_of_the_only_step(tensors) or _rates_after_the_last_step(tensors)
    told = (
        f"the gradients of optimizer step {step + 1} are right, and it changes {few(names)} otherwise than on one "
        "device"
    )
    if len(ranks) < tensors.size:
        told += f" on {named(ranks)}"
    why = (
        _settings(tensors, [name.of for name in names])
        or "the settings of its group are those of one device: it is the update rule"
    )
    return Finding("optimizer-differs", f"{told}; {why}", tuple(ranks) if len(ranks) < tensors.size else ())


def _other_settings_of_the_only_step(tensors: Tensors) -> Finding | None:
    """Detect settings that differ from one device, if the steps of some rank are not on record.

    There must be one step only, the gradients in the end must be right, and a wrong parameter must have other settings
    on a rank where it is wrong.
    """
    wrong = tensors.wrong("params")
    judged = any(name.kind == "grads" for name in tensors.relations.held)
    steps = {one.optimizer_steps for one in (*tensors.seen, tensors.expected.single)}
    if steps != {1} or not wrong or not judged or tensors.wrong("grads", "returned"):
        return None
    if all(one.snapshots for one in tensors.seen):
        return None
    why = _settings(tensors, [name.of for name in wrong])
    return Finding("optimizer-differs", f"gradients are right, but not {few(wrong)}; {why}") if why else None


def _first_wrong_step(tensors: Tensors) -> tuple[int, list[Result], list[int]]:
    """Return the first wrong step, the parameters that are wrong after it, and the ranks where they are.

    Both lists are empty if its gradients are wrong too, or if the ranks start from wrong parameters.
    """
    start = tensors.expected.single.initial
    for one in tensors.seen:
        if any(
            one.initial[name].shape != value.shape or not one.initial[name].equal(value)
            for name, value in start.items()
            if name in one.initial
        ):
            return 0, [], []
    for step, right in enumerate(tensors.expected.snapshots):
        allowed = tensors.expected.allowances[step]
        wrong: dict[Result, list[int]] = {}
        for rank, one in enumerate(tensors.seen):
            stage = one.snapshots[step] if step < len(one.snapshots) else {}
            for name, value in right.items():
                got = stage.get(name)
                if got is None or got.shape != value.shape:
                    return step, [], []
                if bool(((got.double() - value).abs() > allowed[name]).any()):
                    wrong.setdefault(name, []).append(rank)
        if wrong:
            if any(name.kind == "grads" for name in wrong):
                return step, [], []
            return step, list(wrong), sorted({rank for ranks in wrong.values() for rank in ranks})
    return 0, [], []


def _settings(tensors: Tensors, names: list[str]) -> str:
    """Describe a setting of a wrong parameter that differs from one device; "" if none differs or none is known."""
    single = tensors.expected.single
    for name in names:
        right = single.settings.get(name)
        for rank, one in enumerate(tensors.seen):
            got = one.settings.get(name)
            own = one.own.get(Result("params", name))
            if right is None or got is None or (own is not None and not bool(own.any())):
                continue
            apart = [key for key in right if key in got and got[key] != right[key]]
            if apart:
                key = apart[0]
                return (
                    f"{key} of {name} is {got[key]} on rank {rank}, and {right[key]} on one "
                    f"device{_groups(single, one)}"
                )
    return ""


def _groups(single: ObservedRun, one: ObservedRun) -> str:
    if one.groups == single.groups:
        return ""
    return (
        f"; there {'is' if one.groups == 1 else 'are'} {one.groups} parameter group{'s' * (one.groups != 1)}, and "
        f"{single.groups} on one device"
    )


def _rates_after_the_last_step(tensors: Tensors) -> Finding | None:
    """Detect a wrong learning rate after the last step, if all other results are right.

    The next update will be wrong.
    """
    wrong = tensors.wrong()
    if not wrong or not all(name.kind == "optimizer" and name.of.startswith(_RATE) for name in wrong):
        return None
    rank, right = tensors.relations.wrong[wrong[0]][0], tensors.expected.exact.get(wrong[0])
    got = tensors.seen[rank].values.get(wrong[0])
    if got is None or right is None or got.numel() != 1 or right.numel() != 1:
        return None
    told = (
        f"{wrong[0]} is {float(got):.6g}, and {float(right):.6g} on one device, after the same steps: does a "
        "scheduler step more often?"
    )
    return Finding("optimizer-differs", told)
