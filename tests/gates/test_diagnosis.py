"""Mistakes that are near each other get their own names, and the report says where ranks first part."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from mgpu_check import ScalingMismatch, assert_step_scales
from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Trials
from tests.gates import (
    diagnosed_by_batch,  # it adds its programs, and so do the next two
    diagnosed_by_term,
)
from tests.gates import diagnosed_by_rank as diagnosed_by_rank
from tests.gates.diagnosed import ALL, Diagnosed
from tests.gates.pages import program_of

pytestmark = pytest.mark.gpus(2)


def step_of(program: Diagnosed, *, wrong: bool):
    if "rank" not in inspect.signature(program.step).parameters:
        return program.step(wrong)  # a class
    return functools.partial(program.step, wrong=wrong)


OFTEN = ("keeps_a_running_loss", "adds_a_head_of_its_own", "sums_all_terms")
"""Ranks part at a result, or at what a call is given, or not. That each mistake is named is shown by the programs of
the pages."""
EACH = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in ALL]


@pytest.mark.parametrize("name", EACH)
def test_a_program_is_named_by_its_mistake(ranks, name):
    program = ALL[name]
    options: dict[str, Any] = {"build": program.build, "batch": program.batch}
    options |= {"reference": program.reference, "sizes": program.samples}
    with pytest.raises(ScalingMismatch) as caught:
        assert_step_scales(ranks, step_of(program, wrong=True), world_sizes=[2], max_examples=1, **options)
    text = str(caught.value)
    assert caught.value.mistakes[:1] == (program.mistake,), text
    parting = re.search(r"ranks first part (?:at|after) \S*?(diagnosed\w*\.py):(\d+), (.*)", text)
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


def test_parts_that_no_weights_put_right_are_no_mean_of_means(ranks):
    step = functools.partial(diagnosed_by_batch.numbers_positions_anew, wrong=True)
    of: dict[str, Any] = {"build": diagnosed_by_batch.Positions, "batch": diagnosed_by_batch.sequences}
    of |= {"reference": diagnosed_by_batch.predicts, "world_sizes": [2], "sizes": 2, "max_examples": 1}
    with pytest.raises(ScalingMismatch) as caught:
        assert_step_scales(ranks, step, **of)
    assert caught.value.mistakes == ("positions-restart",)


@pytest.mark.slow  # the page of the mistake has a simpler program
@pytest.mark.gpus(4)
@pytest.mark.parametrize(
    ("step", "size", "named"), [("averages_over_parts", 2, False), ("shifts_parts_of_some_samples", 4, True)]
)
def test_labels_are_called_shifted_where_parts_of_the_sequence_end(ranks, step, size, named):
    of: dict[str, Any] = {"build": diagnosed_by_term.reader, "batch": diagnosed_by_term.texts}
    of["reference"] = diagnosed_by_term.read
    with pytest.raises(ScalingMismatch) as caught:
        assert_step_scales(ranks, getattr(diagnosed_by_term, step), world_sizes=[size], sizes=4, max_examples=1, **of)
    assert ("labels-shifted-after-split" in caught.value.mistakes) is named, str(caught.value)
    assert ("within each of 2 parts of the sequence" in str(caught.value)) is named


@pytest.mark.parametrize("name", ["experts", pytest.param("head", marks=pytest.mark.slow)])
def test_only_what_ranks_divide_are_experts(ranks, name):
    """The page's program with another gradient, of what all ranks hold, off by the size of the group."""
    page, _ = program_of("expert-gradients-factor", "right")

    def step(model, batch, rank):
        page.step(model, batch, rank)
        for parameter in getattr(model, name).parameters():
            if parameter.grad is not None:
                parameter.grad *= rank.size

    with pytest.raises(ScalingMismatch) as caught:
        assert_step_scales(ranks, step, build=page.build, batch=page.batch, world_sizes=[2], sizes=8, max_examples=1)
    assert caught.value.mistakes[0] == ("expert-gradients-factor" if name == "experts" else "world-size-factor")
