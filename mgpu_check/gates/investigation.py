"""Diagnose a failure: run it again, match the evidence with known mistakes, and gather the facts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from mgpu_check.diagnosis.attempts import Attempts
from mgpu_check.diagnosis.evidence import UnfinishedCall
from mgpu_check.diagnosis.modules import first_wrong_module
from mgpu_check.diagnosis.parting import first_parting
from mgpu_check.diagnosis.rules.order import findings_of, findings_of_calls
from mgpu_check.diagnosis.tensors import Tensors
from mgpu_check.engine.failures import account_of
from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.gates.definitions import definition_of
from mgpu_check.gates.evidence import calls_of, evidence_of
from mgpu_check.gates.failure import Axes, Failure, FirstWrong, Mismatch, NoReturn
from mgpu_check.gates.relations import close
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.second_look import SecondLook, as_seen
from mgpu_check.gates.trial import Trial, Trials
from mgpu_check.gates.unmoved import left_on_cpu
from mgpu_check.numerics.diagnosis import diagnose

_LIKELY = 2
"""Most causes that a report names."""


def failure_of(trials: Trials, failed: Trial, sizes: Sequence[int], axes: Axes | None = None) -> Failure:
    """Diagnose a failed trial; this runs the step a few more times.

    If a part of the diagnosis raises an error, the part is left out and the error is kept in `incomplete`.

    Args:
        axes: the axes of the mesh that the failure needs.
    """
    if failed.relations is None:
        assert failed.error is not None
        lost = no_return_of(trials.name, failed.scenario, failed.error, definition_of(trials.program.step))
        unmoved = left_on_cpu(
            trials.program, failed.error, functools.partial(trials.run_on_ranks, scenario=failed.scenario)
        )
        return replace(lost, against=trials.against, lines=[*filter(None, [unmoved]), *lost.lines])
    attempts = Attempts()
    look = SecondLook(trials, failed, sizes, attempts)
    tensors = attempts.of("the second look at the case", as_seen(failed, failed.relations), look.taken)
    findings = findings_of(evidence_of(tensors, attempts), _LIKELY, attempts)
    mistakes = [finding.mistake for finding in findings[:1]]
    first = attempts.of("the first wrong step", None, _first_wrong, tensors)
    return Mismatch(
        name=trials.name,
        case=failed.scenario.described,
        findings=findings,
        size=failed.scenario.world_size,
        single_process=trials.program.single_process,
        relations=tensors.relations,
        expected=tensors.expected,
        axes=axes,
        first=first,
        parting=attempts.of("the line where ranks part", None, first_parting, tensors, mistakes),
        module=attempts.of("the first wrong module", None, first_wrong_module, tensors),
        factor=attempts.of("the factor", None, tensors.factor),
        factor_of=tensors.names,
        of_update=_is_of_update(tensors),
        patterns=attempts.of("the pattern of wrong values", [], _patterns, tensors),
        wrong_alone=tensors.wrong_alone,
        repeated=look.repeated,
        incomplete=attempts.remarks,
        defined=definition_of(trials.program.step),
        against=trials.against,
    )


def no_return_of(name: str, scenario: Scenario, error: RankFailure | RankHang, defined: str = "") -> NoReturn:
    """Diagnose ranks that did not return because they hung, raised or died."""
    account, attempts = account_of(error), Attempts()
    hung = isinstance(error, RankHang)
    lines = str(error).splitlines() if account is None else account.headlines(name if hung else None)
    calls = attempts.of(
        "the evidence of the calls",
        UnfinishedCall(scenario.world_size, scenario.samples, " ".join(lines)),
        functools.partial(calls_of, hung=hung),
        account,
        scenario,
        lines,
    )
    findings = findings_of_calls(calls, _LIKELY if hung else 1, attempts)
    return NoReturn(
        name=name,
        case=scenario.described,
        findings=findings,
        account=account,
        lines=lines,
        hung=hung,
        incomplete=attempts.remarks,
        defined=defined,
    )


def _first_wrong(tensors: Tensors) -> FirstWrong | None:
    # Gradients first: if each rank updates its own parameters, it gets the others only after the optimizer step.
    for of_gradients in (True, False):
        for step, exact in enumerate(tensors.expected.snapshots):
            allowed = tensors.expected.allowances[step]
            for name, value in exact.items():
                if name not in tensors.relations.wrong or (name.kind == "grads") is not of_gradients:
                    continue
                for rank, one in enumerate(tensors.seen):
                    if step >= one.optimizer_steps:
                        return FirstWrong(step + 1, rank, None)
                    taken = one.snapshots[step] if step < len(one.snapshots) else None  # the step may not be on record
                    if taken is not None and not close(taken.get(name), value, allowed[name]):
                        return FirstWrong(step + 1, rank, name)
    return None


def _is_of_update(tensors: Tensors) -> bool:
    """Return whether gradients were compared and are right, and parameters are wrong."""
    held = tensors.relations.held
    gradients = [name for name in held if name.kind == "grads"]
    return bool(gradients) and not tensors.wrong("grads", "returned") and bool(tensors.wrong("params"))


def _patterns(tensors: Tensors) -> list[str]:
    """Describe patterns in the first wrong values, such as a flipped bit."""
    found: list[str] = []
    for name in tensors.names[:1]:
        for rank in tensors.relations.wrong[name][:1]:
            got, exact = tensors.seen[rank].values.get(name), tensors.expected.exact[name]
            if got is not None and got.shape == exact.shape:
                lines = diagnose(got, exact, tensors.expected.tolerance[name], rank=rank)
                found += [f"{name} on rank {rank} {line}" for line in lines]
    return found
