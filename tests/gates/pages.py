"""The programs of the pages of mistakes, and what the gates say of them."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

from mgpu_check import (
    ScalingMismatch,
    assert_evaluation_agrees,
    assert_loader_covers,
    assert_resume_continues,
    assert_step_scales,
)
from mgpu_check.gates.gate_arguments import Program, RanksFixture
from mgpu_check.gates.search.scenarios import Scenario
from tests.docs.pages import MISTAKES, first_files
from tests.gates.single_cases import failures

# The kinds of programs, by a name that they define: the gate, the function that it judges, and its other
# arguments.
GATES: dict[str, tuple[Callable[..., None], str, tuple[str, ...]]] = {
    "make_loader": (assert_loader_covers, "make_loader", ()),
    "train": (assert_resume_continues, "train", ("save_on", "load_on")),
    "evaluate": (assert_evaluation_agrees, "step", ("build", "batch", "evaluate")),
    "step": (assert_step_scales, "step", ("build", "batch", "reference", "sizes", "single_process")),
}


def source(name: str, kind: str) -> str:
    """The program of a page, complete: what the right one does not define is as in the wrong one."""
    shown = first_files(MISTAKES / f"{name}.md")
    return shown["wrong.py"] if kind == "wrong" else f"{shown['wrong.py']}\n\n{shown['right.py']}"


def gate_of(name: str) -> str:
    """Return the entry of `GATES` that judges the programs of a page."""
    text = source(name, "wrong")
    return next(known for known in GATES if re.search(rf"^def {known}\(", text, re.MULTILINE))


def program_of(name: str, kind: str) -> tuple[types.ModuleType, str]:
    """Return the program of a page as a module, and the entry of `GATES` that judges it."""
    text = source(name, kind)
    # No module that could be imported: so it travels to ranks by value, as a module of tests does.
    program = types.ModuleType(f"{name.replace('-', '_')}_{kind}")
    exec(compile(text, f"{name}.md", "exec"), program.__dict__)
    return program, gate_of(name)


def judge(ranks: RanksFixture, name: str, kind: str, max_examples: int | None) -> ScalingMismatch | None:
    """Hand the program of the page `name` to its gate; the mismatch that it raises, or None.

    Args:
        kind: "wrong" or "right".
        max_examples: for the gate of steps.
    """
    program, known = program_of(name, kind)
    gate, judged, taken = GATES[known]
    options: dict[str, Any] = {option: value for option, value in vars(program).items() if option in taken}
    if gate is assert_step_scales:
        options["max_examples"] = max_examples
    try:
        gate(ranks, getattr(program, judged), **options)
    except ScalingMismatch as mismatch:
        return mismatch
    return None


def alarm(ranks: RanksFixture, name: str) -> object:
    """Return the gate's error for the right program of a page; a step is tried in one case, a tenth of the
    time."""
    program, known = program_of(name, "right")
    if known != "step":
        return judge(ranks, name, "right", None)
    options = {option: value for option, value in vars(program).items() if option in ("reference", "single_process")}
    sizes: Any = getattr(program, "sizes", "divisible")
    step = Program(program.step, program.build, program.batch, **options)
    return next(iter(failures(ranks, step, Scenario(2, 8 if sizes == "divisible" else sizes[0]))), None)
