"""Further perturbed runs, before a difference counts that one of them may have missed."""

from __future__ import annotations

import pytest

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.processes import ProcessResult, ScriptRun
from mgpu_check.compare.verdict import FURTHER, measured, verdict_of
from tests.compare.conftest import script
from tests.compare.training import Training, gradients

TINY = 4e-7


def bias_off_by(size):
    """A training whose bias deviates, relative to its gradient."""
    made = Training()
    made.gradient = lambda number: [g * (1 + size * order) for order, g in enumerate(gradients(number))]
    return made


def judged(ranks, *others):
    """The verdict on ranks, and the number of further runs, if the perturbed runs are `others`, the last one again."""
    one = Training().trace()
    aligned = Aligned(one, [rank.trace() for rank in ranks], len(ranks))
    seeds = []

    def further(seed):
        seeds.append(seed)
        run = others[min(len(seeds), len(others) - 1)].trace()
        return ScriptRun("", [ProcessResult(0, 0, "finished", run, "", "")], 0.0, None)

    verdict = verdict_of(aligned, measured(aligned, [others[0].trace()], further), None)
    assert seeds == [*FURTHER][: len(seeds)]
    return verdict.kind, len(seeds)


def ranks_off_by(size):
    found = [Training(rank, 2) for rank in range(2)]
    for rank in found:
        rank.gradient = bias_off_by(size).gradient
    return found


def test_what_another_perturbed_run_moves_as_far_is_rounding():
    assert judged(ranks_off_by(1e-4), bias_off_by(TINY), bias_off_by(TINY), bias_off_by(5e-5)) == ("equal", 2)


@pytest.mark.parametrize(("size", "runs"), [(1e-4, len(FURTHER)), (0.5, 0)])
def test_what_no_perturbed_run_moves_is_a_difference(size, runs):
    assert judged(ranks_off_by(size), bias_off_by(TINY)) == ("differs", runs)


def test_right_ranks_need_no_further_run():
    assert judged([Training(rank, 2) for rank in range(2)], bias_off_by(TINY)) == ("equal", 0)


@pytest.mark.slow
def test_a_small_mistake_of_a_script_is_refuted(compare, changed):
    mistake = ("            p.grad /= world\n", "            p.grad /= world * (1 + 1e-4 * (p.dim() == 1))\n")
    outcome = compare(changed(script("by_hand"), mistake), "--steps=1", code=1, more=len(FURTHER))
    assert (outcome.json["step"], outcome.json["tensor"]) == (1, "gradient")
    labels = [run["label"] for run in outcome.json["runs"]]
    assert labels[4:] == ["one device, moved by other roundoffs"] * len(FURTHER)
