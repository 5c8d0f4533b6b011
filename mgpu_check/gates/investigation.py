"""A failure looked into: run again with everything on record, weighed against known mistakes, and put into a report."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mgpu_check.engine.failures import Account, account_of
from mgpu_check.errors import CheckFailure, RankFailure, RankHang
from mgpu_check.gates.batch_parts import run_hypotheses
from mgpu_check.gates.evidence import calls_of, evidence_of
from mgpu_check.gates.experiments import changes_tried
from mgpu_check.gates.program import wants_world_size
from mgpu_check.gates.relations import PARITY, RANDOM, allowed_for, close, relations_of, repeats
from mgpu_check.gates.running import run_traced, run_traced_alone
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.trial import Trial, Trials
from mgpu_check.mistakes.attempts import Attempts
from mgpu_check.mistakes.evidence import Calls
from mgpu_check.mistakes.modules import first_wrong_module
from mgpu_check.mistakes.observed import Expected, Hypotheses, Observation, Relations, Trace
from mgpu_check.mistakes.parting import first_parting
from mgpu_check.mistakes.report import Finding, Observable, Report
from mgpu_check.mistakes.rules.order import findings_of, findings_of_calls
from mgpu_check.mistakes.tensors import Tensors
from mgpu_check.numerics.compare import difference
from mgpu_check.numerics.diagnosis import diagnose

__all__ = ["investigate", "report_of_hang"]

_SMALL = 2.0**-10
_FURTHER = 2
_LARGE = 1_000_000
_LIKELY = 2
"""Causes that a report names."""


def investigate(trials: Trials, failed: Trial, sizes: Sequence[int], axes: str = "") -> Report:
    """Return the report of a failure; runs the step a few more times.

    An error of the diagnosis is reported below the verdict, and not raised.

    Args:
        sizes: world sizes of the gate.
        axes: which axes of the mesh the failure needs, in words.
    """
    report = _investigated(trials, failed, sizes)
    return replace(report, axes=axes)


def _investigated(trials: Trials, failed: Trial, sizes: Sequence[int]) -> Report:
    attempts = Attempts()
    if failed.relations is None:
        assert failed.error is not None
        return _report_of_error(trials, failed.scenario, failed.error, attempts)
    seen = _as_seen(failed, failed.relations)
    tensors = attempts.of("the second look at the case", seen, _gather, trials, failed, sizes, attempts)
    findings = findings_of(evidence_of(tensors, attempts), _LIKELY, attempts)
    return _report(trials, failed.scenario, tensors, findings, attempts)


def _as_seen(failed: Trial, relations: Relations) -> Tensors:
    """Return what is known of a failure before anything is run again."""
    case, nothing = failed.scenario, Hypotheses([], [])
    return Tensors(case.world_size, case.samples, case.steps, failed.expected, relations, failed.seen, (), nothing)


def report_of_hang(name: str, scenario: Scenario, hang: RankHang) -> tuple[Report, list[str]]:
    """Return the report of ranks that did not return, and their stacks."""
    account, attempts = account_of(hang), Attempts()
    lines = str(hang).splitlines() if account is None else account.headlines(name)
    findings = _of_calls(account, scenario, lines, _LIKELY, attempts, hung=True)
    report = Report(
        f"{name} does not scale: {lines[0]}",
        scenario.described,
        findings=findings,
        remarks=["terminates: NO", *lines[1:], *attempts.remarks],
    )
    return report, [] if account is None else account.blocks()


def _report_of_error(trials: Trials, scenario: Scenario, error: RankFailure, attempts: Attempts) -> Report:
    account = account_of(error)
    lines = str(error).splitlines() if account is None else account.headlines()
    findings = _of_calls(account, scenario, lines, 1, attempts, hung=False)
    known_end = account is not None and bool(account.instead)
    ends = [] if known_end else ["terminates: NO, though it does on one device"]
    return Report(
        f"{trials.name} does not scale: {lines[0]}",
        scenario.described,
        findings=findings,
        remarks=[*ends, *lines[1:], *attempts.remarks],
    )


def _of_calls(
    account: Account | None,
    scenario: Scenario,
    lines: Sequence[str],
    most: int,
    attempts: Attempts,
    *,
    hung: bool,
) -> list[Finding]:
    calls = attempts.of(
        "the evidence of the calls",
        Calls(scenario.world_size, scenario.samples, " ".join(lines)),
        functools.partial(calls_of, hung=hung),
        account,
        scenario,
        lines,
    )
    return findings_of_calls(calls, most, attempts)


def _gather(trials: Trials, failed: Trial, sizes: Sequence[int], attempts: Attempts) -> Tensors:
    scenario, program = failed.scenario, trials.program
    expected = attempts.of("measuring each optimizer step", failed.expected, trials.expected, scenario, deep=True)
    size = 1 if program.single_process else scenario.world_size
    seen: Sequence[Observation]
    traces: Sequence[Trace] = ()
    try:
        pairs = trials.ranks.run(run_traced, program, scenario, size=size)
        seen = trials.assembled(scenario, [one for one, _ in pairs])
        traces = [trace for _, trace in pairs]
    except (CheckFailure, RankHang):  # it does not fail in the same way each time
        seen = failed.seen
    relations = relations_of(expected, seen, trials.kinds, trials.tolerance)
    if relations.holds:
        assert failed.relations is not None
        seen, relations = failed.seen, failed.relations
    attempts.of("the run once more", None, _repeat, trials, scenario, expected, seen, relations)
    elsewhere = attempts.of(
        "the run at another world size", None, _at_another_size, trials, scenario, expected, seen, relations, sizes
    )
    attempts.of("the run with permuted samples", None, _in_other_order, trials, scenario, seen, relations)
    windows = max((len(trace.of("backward")) for trace in traces), default=1) // max(1, scenario.steps)
    try:
        hypotheses = trials.ranks.run(run_hypotheses, program, scenario, max(1, windows), size=1)[0]
    except (CheckFailure, RankHang):
        hypotheses = Hypotheses([], [])
    further: list[Tensors] = []
    if hypotheses.divisions:
        further = attempts.of(
            "the runs with other seeds", further, _with_other_seeds, trials, scenario, max(1, windows)
        )
    shardwise = wants_world_size(program.reference)
    alone = (
        expected.own is not None
        and not shardwise
        and not relations_of(expected, [expected.own], trials.kinds, trials.tolerance).holds
    )
    small = attempts.of("the run with a small batch", None, _when_small, trials, scenario)
    return Tensors(
        scenario.world_size,
        scenario.samples,
        scenario.steps,
        expected,
        relations,
        seen,
        traces,
        hypotheses,
        wrong_alone=alone,
        right_when_small=small,
        further=further,
        elsewhere=elsewhere,
        shardwise=shardwise,
        alone=attempts.of("the record of one device", None, _trace_alone, trials, scenario),
        tried=attempts.of("changes to single calls", [], changes_tried, trials, scenario, traces),
    )


def _trace_alone(trials: Trials, scenario: Scenario) -> Trace | None:
    """Return what one device calls, for what ranks are compared with."""
    try:
        alone: Trace = trials.ranks.run(run_traced_alone, trials.program, scenario, size=1)[0]
    except (CheckFailure, RankHang):
        return None
    return alone


def _with_other_seeds(trials: Trials, scenario: Scenario, windows: int) -> list[Tensors]:
    """Return the same case with other random numbers: what explains the failure must explain what is seen there, too."""
    found: list[Tensors] = []
    if scenario.batches:
        return found
    for seed in range(scenario.seed + 1, scenario.seed + 1 + _FURTHER):
        other = replace(scenario, seed=seed)
        try:
            expected, seen = trials.expected(other), trials.on_ranks(other, whole=True)
            if expected.single.batch == trials.expected(scenario).single.batch:
                return found  # the user's own seeds rule: it is the same case again
            if sum(value.numel() for value in seen[0].values.values()) > _LARGE:
                return found
            hypotheses = trials.ranks.run(run_hypotheses, trials.program, other, windows, size=1)[0]
        except (CheckFailure, RankHang):
            continue
        relations = relations_of(expected, seen, trials.kinds, trials.tolerance)
        found.append(Tensors(other.world_size, other.samples, other.steps, expected, relations, seen, (), hypotheses))
    return found


def _when_small(trials: Trials, scenario: Scenario) -> bool | None:
    """Return whether the step is right for the same batch scaled down, so that no limit on a norm is reached."""
    if scenario.change not in ("", "scaled"):
        return None
    small = replace(scenario, change="scaled", factor=_SMALL)
    try:
        return relations_of(trials.expected(small), trials.on_ranks(small), trials.kinds, trials.tolerance).holds
    except (CheckFailure, RankHang):
        return None


def _repeat(
    trials: Trials, scenario: Scenario, expected: Expected, seen: Sequence[Observation], relations: Relations
) -> None:
    try:
        again = trials.on_ranks(scenario, whole=True)
    except (CheckFailure, RankHang):
        relations.remarks.append("a second run fails")
        return
    repeats(relations, expected, seen, again, trials.tolerance)


def _at_another_size(
    trials: Trials,
    scenario: Scenario,
    expected: Expected,
    seen: Sequence[Observation],
    relations: Relations,
    sizes: Sequence[int],
) -> tuple[int, Observation] | None:
    """Return what rank 0 leaves at the next other world size; add whether each observable is the same there."""
    other = min((size for size in sizes if size not in (1, scenario.world_size)), default=None)
    if other is None:
        return None
    try:
        there: Observation = trials.on_ranks(replace(scenario, world_size=other), whole=True)[0]
    except (CheckFailure, RankHang):
        return None
    low, high = sorted((other, scenario.world_size))
    for name, held in relations.held.items():
        if name == RANDOM or name not in expected.single.values:
            continue
        allowed = 2 * allowed_for(expected, name, trials.tolerance)
        held[f"same at {low} and {high}"] = close(there.values.get(name), seen[0].values.get(name), allowed)
    return other, there


def _in_other_order(trials: Trials, scenario: Scenario, seen: Sequence[Observation], relations: Relations) -> None:
    """Find out whether it matters which rank a sample lands on, where it does not matter to one device."""
    if scenario.batches or scenario.change or scenario.samples < 2:
        return
    permuted = replace(scenario, change="permuted")
    try:
        one, other = trials.expected(scenario, deep=True), trials.expected(permuted)
        there = trials.on_ranks(permuted)
    except (CheckFailure, RankHang):
        return
    for name, held in relations.held.items():
        exact, moved = one.exact.get(name), other.exact.get(name)
        if exact is None or moved is None or exact.shape != moved.shape:
            continue
        allowed = allowed_for(one, name, trials.tolerance) + allowed_for(other, name, trials.tolerance)
        if difference(exact, moved, allowed) is None:
            held["any order"] = close(there[0].values.get(name), seen[0].values.get(name), 2 * allowed)


def _report(
    trials: Trials, scenario: Scenario, tensors: Tensors, findings: Sequence[Finding], attempts: Attempts
) -> Report:
    relations = tensors.relations
    wrong = [name for name in relations.held if name in relations.wrong or name in relations.split] or [
        name for name, held in relations.held.items() if False in held.values()
    ]
    named_first = [finding.mistake for finding in findings[:1]]
    ranks_part = attempts.of("the line where ranks part", None, first_parting, tensors, named_first)
    parted = sum(relations.held[name].get(PARITY) is False for name in wrong)
    first = attempts.of("the first wrong step", "", _first_parting, tensors)
    where = f", first {first}" if first else f", first {wrong[0]}" if wrong else ""
    ranks = "1 rank" if scenario.world_size == 1 else f"{scenario.world_size} ranks"
    devices = f"{scenario.world_size} devices" if trials.program.single_process else ranks
    what = (
        f"{parted} of {len(relations.held)} results on {devices} differ from one device"
        if parted
        else f"{len(wrong)} of {len(relations.held)} results differ between ranks, or from run to run"
    )
    observables = [
        Observable(str(name), held, relations.details.get(name, "")) for name, held in relations.held.items()
    ]
    return Report(
        f"{trials.name} does not scale: {what}{where}",
        scenario.described,
        observables,
        findings,
        [*_remarks(tensors, not findings, attempts), *attempts.remarks],
        parting="" if ranks_part is None else str(ranks_part),
        known=[] if findings else attempts.of("the first wrong module", [], _known, tensors),
    )


def _first_parting(tensors: Tensors) -> str:
    """Return the first optimizer step, and in it the first result in the order of the model, that is wrong on a rank."""
    # Gradients first: where ranks update parameters of their own, the others follow after the optimizer's step.
    for of_gradients in (True, False):
        for step, exact in enumerate(tensors.expected.snapshots):
            allowed = tensors.expected.allowances[step]
            for name, value in exact.items():
                if name not in tensors.relations.wrong or (name.kind == "grads") is not of_gradients:
                    continue
                for rank, one in enumerate(tensors.seen):
                    if step >= one.optimizer_steps:
                        return f"optimizer step {step + 1}, which rank {rank} does not do"
                    taken = one.snapshots[step] if step < len(one.snapshots) else None  # the step may not be on record
                    if taken is not None and not close(taken.get(name), value, allowed[name]):
                        return f"{name} in optimizer step {step + 1} on rank {rank}"
    return ""


def _known(tensors: Tensors) -> list[str]:
    """Return what is known of a failure that no mistake explains."""
    found = [first_wrong_module(tensors)]
    factor = tensors.factor()
    if factor is not None:
        found.append(f"all that differs is {factor:.6g} times what one device gives")
    return [line for line in found if line]


def _patterns(tensors: Tensors) -> list[str]:
    """Describe what the first wrong values look like, where no known mistake explains them: a flipped bit, say."""
    found: list[str] = []
    for name in tensors.names[:1]:
        for rank in tensors.relations.wrong[name][:1]:
            got, exact = tensors.seen[rank].values.get(name), tensors.expected.exact[name]
            if got is not None and got.shape == exact.shape:
                lines = diagnose(got, exact, tensors.expected.tolerance[name], rank=rank)
                found += [f"{name} on rank {rank} {line}" for line in lines]
    return found


def _remarks(tensors: Tensors, unexplained: bool, attempts: Attempts) -> Iterator[str]:
    yield "terminates: yes"
    if unexplained:
        yield from attempts.of("the pattern of wrong values", [], _patterns, tensors)
    if tensors.wrong_alone:
        yield "the step differs from the reference at world size 1 already"
    yield from tensors.relations.remarks
    yield from tensors.expected.remarks
