"""A recorded run, and its view as a run on one device, which another run can be compared with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu_check.compare.alignment import KINDS, Samples, of_kind
from mgpu_check.compare.assembly import Assembly, assembled
from mgpu_check.compare.outputs import OutputSummary, whole_output
from mgpu_check.compare.trace import Parameter, State, Step, TensorSummary, Trace, named_state


@dataclass
class RecordedRun:
    """A run of a script, with whole tensors.

    Attributes:
        name: its name in reports: "a.trace".
        script: the script and its arguments.
        ranks: the trace of each rank.
        environment: what may change the results of the script.
        moved: the traces of a run that differs by rounding alone; empty if rounding was not measured.
        divided, reasons, holders, parts, partial: see `mgpu_check.compare.assembly.Assembly`.
        values: values of tensors, in the format safetensors; None without values.
        limit: the run was stopped at this step; None: it ran to its end.
    """

    name: str
    script: str
    ranks: list[Trace]
    environment: Mapping[str, Any] = field(default_factory=dict)
    moved: list[Trace] = field(default_factory=list)
    divided: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)
    holders: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    parts: Mapping[str, Mapping[int, object]] = field(default_factory=dict)
    partial: Mapping[str, str] = field(default_factory=dict)
    values: bytes | None = None
    limit: int | None = None

    @property
    def world(self) -> int:
        return len(self.ranks)


def whole(traces: Sequence[Trace], one: Trace | None = None) -> Assembly:
    """Assemble the tensors of ranks.

    Args:
        one: the run on one device that placed the slices; None: only slices that describe themselves are assembled.
    """
    return assembled(_outline(traces) if one is None else one, traces)


def _outline(traces: Sequence[Trace]) -> Trace:
    """Return the whole tensors of ranks without values: those that slices are of, and all others."""
    made = Trace(0, 1)
    for trace in traces:
        for parameter in trace.parameters.values():
            name = parameter.held.whole if parameter.held else parameter.name
            made.parameters.setdefault(name, replace(parameter, name=name, held=None))
        for state in trace.states.values():
            name = state.held.whole if state.held else state.name
            of = name.removeprefix(named_state(state.key, "")) if state.held else state.of
            made.states.setdefault(name, replace(state, name=name, of=of, held=None))
    return made


def disagreeing(ranks: Sequence[Trace]) -> set[str]:
    """Return the tensors that ranks hold with different bits at some step."""
    found: set[str] = set()
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        for kind in KINDS:
            first: dict[str, TensorSummary | None] = {}
            for step in steps:
                for name, value in of_kind(step, kind).items():
                    other = first.setdefault(name, value)
                    if (value and value.bits) != (other and other.bits):
                        found.add(name)
    return found


def renamed(trace: Trace, names: Mapping[str, str]) -> Trace:
    """Return the trace with other names for some parameters, states and buffers."""

    def named(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in entries.items()}

    def entry(one: Parameter) -> Any:
        moved = replace(one, name=names.get(one.name, one.name))
        return replace(moved, of=names.get(moved.of, moved.of)) if isinstance(moved, State) else moved

    return replace(
        trace,
        parameters=named({name: entry(one) for name, one in trace.parameters.items()}),
        states=named({name: entry(one) for name, one in trace.states.items()}),
        steps=[
            replace(
                step,
                before=named(step.before),
                gradients=named(step.gradients),
                parameters=named(step.parameters),
                states=named(step.states),
                options=named(step.options),
            )
            for step in trace.steps
        ],
    )


def merged(ranks: Sequence[Trace], divided: bool, but: Collection[str] = ()) -> Trace:
    """Return the trace of a run as if one device had made it, with the tensors of the first rank that holds each.

    Args:
        divided: ranks hold parts of the model, so several ranks may see the same samples.
        but: parameters, states and buffers to leave out.
    """
    made = Trace(0, 1, events=ranks[0].events)
    for trace in ranks:
        made.modules |= trace.modules
        for name, parameter in trace.parameters.items():
            if name not in but:
                made.parameters.setdefault(name, parameter)
        for name, state in trace.states.items():
            if name in but:
                continue
            made.states.setdefault(name, state)
            if not state.constant:
                made.states[name] = replace(made.states[name], constant=False)
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        seen = [step for trace, step in zip(ranks, steps, strict=True) if _is_first_stage(trace, made)]
        made.steps.append(
            Step(
                steps[0].optimizer,
                [] if (loss := _mean_loss(steps)) is None else [loss],
                [_together([step.seen for step in seen], divided)],
                [_together([step.seen_columns for step in seen], divided)],
                options=_first([step.options for step in steps], but),
                before=_first([step.before for step in steps], but),
                gradients=_first([step.gradients for step in steps], but),
                parameters=_first([step.parameters for step in steps], but),
                states=_first([step.states for step in steps], but),
                outputs=_outputs(steps),
            )
        )
    return made


def _outputs(steps: Sequence[Step]) -> dict[str, OutputSummary]:
    """Return the outputs of modules that the ranks of a step have together."""
    seen = {index: tuple(sorted(step.seen)) for index, step in enumerate(steps)}
    return {
        name: whole_output({i: step.outputs[name] for i, step in enumerate(steps) if name in step.outputs}, seen)
        for name in dict.fromkeys(name for step in steps for name in step.outputs)
    }


def _first(values: Sequence[Mapping[str, Any]], but: Collection[str]) -> dict[str, Any]:
    """Return the first value of each name that is not None, or None if all are, without the names `but`."""
    found: dict[str, Any] = {}
    for some in values:
        for name, value in some.items():
            if found.get(name) is None and name not in but:
                found[name] = value
    return found


def _is_first_stage(trace: Trace, whole: Trace) -> bool:
    """Return whether a rank holds the first parameter of the model: later stages receive no samples."""
    first = min(whole.parameters.values(), key=lambda parameter: parameter.order, default=None)
    return first is None or first.name in trace.parameters


def _together(seen: Sequence[Sequence[int]], divided: bool) -> list[int]:
    ranks = tuple(map(Counter, seen))
    return list(Samples(Counter(), ranks, divided).together.elements())


def _mean_loss(steps: Sequence[Step]) -> float | None:
    """Return the mean loss of ranks at a step, weighted by their samples; None if no rank has a finite loss."""
    known = [(len(step.seen) or 1, step.loss) for step in steps if step.loss is not None]
    return math.fsum(count * loss for count, loss in known) / sum(count for count, _ in known) if known else None
