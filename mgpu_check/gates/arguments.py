"""Check the functions and options that the gates for steps share."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from mgpu_check.diagnosis.results import KINDS
from mgpu_check.gates.program import Program
from mgpu_check.gates.worlds import check_tolerance
from mgpu_check.numerics.placement.declared import check_placement

_AS_IN = {
    "step": "step(model, batch, rank)",
    "build": "build() that makes the model",
    "batch": "batch(n) that makes n samples, or a strategy of batches",
    "reference": "reference(model, batch)",
}


def check_arguments(
    program: Program,
    observe: Collection[str],
    tolerance: float | Mapping[str, float] | None,
    max_examples: int | None,
) -> None:
    gate = program.gate
    for name, example in _AS_IN.items():
        value = getattr(program, name)
        if value is not None and (not callable(value) or isinstance(value, nn.Module)):
            raise ValueError(f"{gate}: {name}={value!r:.80} is not a function; give a function, as in {example}")
    if isinstance(observe, str) or not isinstance(observe, Collection) or not set(observe) or set(observe) - set(KINDS):
        raise ValueError(f"{gate}: observe={observe!r}; choose some of {', '.join(KINDS)}")
    check_tolerance(gate, tolerance)
    check_placement(gate, program.placement)
    if program.returned_by not in (None, "last") and not callable(program.returned_by):
        raise ValueError(
            f'{gate}: returned_by={program.returned_by!r}; give "last", or a function of the coordinates of a rank'
        )
    if max_examples is not None and (type(max_examples) is not int or max_examples < 1):
        raise ValueError(f"{gate}: max_examples={max_examples!r}; give an integer of at least 1")
