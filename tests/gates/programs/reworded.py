"""Tests that run where each process has reworded the texts of mgpu-check, after this module's conftest."""

from __future__ import annotations

import re

import pytest

from tests.compare.training import gradients, mistakes, start, verdict
from tests.gates.pages import alarm, judge

# Of each kind of evidence: combined values, calls, ranks that raise, loaders, checkpoints, evaluation.
WRONG = (
    "mean-of-means",
    "gradients-not-synchronized",
    "uneven-gather",
    "samples-missed",
    "state-not-restored",
    "evaluation-differs",
)


@pytest.mark.parametrize("name", WRONG)
def test_wrong(ranks, name):
    refuted = judge(ranks, name, "wrong", 8)
    assert refuted is not None
    assert refuted.mistakes[:1] == (name,)
    assert not re.search("does not scale|looks like|make_loader does", str(refuted))  # it is reworded, indeed
    assert name in str(refuted)


def test_right(ranks):
    assert alarm(ranks, "mean-of-means") is None


def doubled(training):
    training.gradient = lambda number: [2 * g for g in gradients(number)]


def elsewhere(training):
    training.begin = [value + training.rank for value in start()]


def rate(training):
    training.rate = 0.1 * (1 + training.rank)


def same(training):
    training.samples = lambda number: [8 * number + i for i in range(8)]


def test_comparisons():
    assert verdict().kind == "equal"
    assert mistakes(doubled) == ("world-size-factor",)
    assert mistakes(elsewhere) == ("different-initialization",)
    assert mistakes(rate) == ("decision-per-rank",)
    assert mistakes(same) == ("dataset-not-split",)
    assert "differs between ranks" not in str(verdict(rate).report)
