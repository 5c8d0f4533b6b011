"""Mistakes that are near each other get their own names, and the report says where ranks first part."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Trials
from tests.gates.diagnosed import ALL, Diagnosed
from tests.gates.pages import program_of
from tests.gates.steps import refuted

pytestmark = pytest.mark.gpus(2)


def step_of(program: Diagnosed, *, wrong: bool):
    if "rank" not in inspect.signature(program.step).parameters:
        return program.step(wrong)  # a class
    return functools.partial(program.step, wrong=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_program_is_named_by_its_mistake(ranks, name):
    program = ALL[name]
    options: dict[str, Any] = {"build": program.build, "batch": program.batch}
    options |= {"reference": program.reference, "sizes": program.samples}
    text = refuted(ranks, step_of(program, wrong=True), program.mistake, **{"max_examples": 1, **options})
    parting = re.search(r"ranks first part (?:at|after) \S*?(diagnosed\.py):(\d+), (.*)", text)
    assert (parting is None) == (not program.parting), text
    if parting is not None:
        assert program.parting in parting[3], text
        source = (Path(__file__).parent / parting[1]).read_text()
        where = f"where {name} parts"  # in a comment, if its line is what is tested
        assert where not in source or where in source.splitlines()[int(parting[2]) - 1], text


@pytest.mark.parametrize("name", ALL)
def test_its_twin_is_right(ranks, name):
    program = ALL[name]
    step = Program(step_of(program, wrong=False), program.build, program.batch, program.reference)
    trials = Trials(ranks, step, frozenset(KINDS), None, name)
    assert trials.run(Scenario(2, program.samples)) is None
    assert trials.completed[2, ()] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "head"])
def test_only_what_ranks_divide_are_experts(ranks, name):
    """The page's program with another gradient, of what all ranks hold, off by the size of the group."""
    page, _ = program_of("expert-gradients-factor", "right")

    def step(model, batch, rank):
        page.step(model, batch, rank)
        for parameter in getattr(model, name).parameters():
            if parameter.grad is not None:
                parameter.grad *= rank.size

    mistake = "expert-gradients-factor" if name == "experts" else "world-size-factor"
    refuted(ranks, step, mistake, build=page.build, batch=page.batch, sizes=8, max_examples=1)
