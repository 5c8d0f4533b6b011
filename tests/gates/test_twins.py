"""Rules are silent about right programs: what a right program shows, too, is no evidence of a mistake."""

from __future__ import annotations

import pytest

from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.diagnosis.report import Attempts
from mgpu_check.diagnosis.rules.order import judged
from mgpu_check.gates.explanation.evidence import evidence_of
from mgpu_check.gates.explanation.investigation import SecondLook
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Trial, Trials
from tests.docs.mistakes import pages
from tests.gates.pages import gate_of, program_of

pytestmark = pytest.mark.gpus(2)


def findings(ranks, program, samples):
    """Return what rules find in the evidence of a right case, as if it had failed, without any control."""
    trials, case, attempts = Trials(ranks, program, frozenset(KINDS), None, "step"), Scenario(2, samples), Attempts()
    expected, runs = trials.expected(case), trials.on_ranks(case, all_values=True)
    relations = trials.compared(expected, runs)
    assert relations.holds
    tensors = SecondLook(trials, Trial(case, expected, relations, runs), (), attempts).at_the_case()
    mistakes = [
        (rule.__name__, finding.mistake, finding.evidence)
        for rule, finding in judged(evidence_of(tensors, attempts), attempts)
    ]
    assert not attempts.remarks
    return mistakes


STEPS = [page.stem for page in pages() if gate_of(page.stem) == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_no_rule_finds_a_mistake_in_the_right_program_of_a_page(ranks, name):
    page, _ = program_of(name, "right")
    options = {option: value for option, value in vars(page).items() if option in ("reference", "single_process")}
    sizes = getattr(page, "sizes", "divisible")
    program = Program(page.step, page.build, page.batch, **options)
    assert findings(ranks, program, 8 if isinstance(sizes, str) else sizes[0]) == []
