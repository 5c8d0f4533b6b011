"""The gate for metrics."""

from __future__ import annotations

import functools

import pytest

from mgpu_check import assert_metric_scales
from tests.gates.steps import batch, build, mine, passes, raised, refuted

pytestmark = pytest.mark.gpus(4)

metric_passes = functools.partial(passes, gate=assert_metric_scales)
metric_refuted = functools.partial(refuted, gate=assert_metric_scales)


def hits(model, batch, rank):
    x, y = mine(batch, rank)
    return (model.to(rank.device)(x).argmax(1) == y).float()


@pytest.mark.slow
def test_each_rank_its_own(ranks):
    def metric(model, batch, rank):
        return {"accuracy": hits(model, batch, rank).mean()}

    metric_refuted(ranks, metric, "value-of-one-rank", sizes=[4], max_examples=1)


def test_nothing_returned(ranks):
    with pytest.raises(ValueError, match="leaves no results of kind returned to compare"):
        metric_passes(ranks, lambda model, batch, rank: None, sizes=[2], max_examples=1)


@pytest.mark.slow
def test_ranks_that_agree_by_chance_are_no_group(ranks):
    def metric(model, batch, rank):
        return {"positive": (mine(batch, rank)[0][:, 2].max() > 0).float()}

    mismatch = raised(assert_metric_scales, ranks, metric, build=build, batch=batch, sizes=[4], world_sizes=[4])
    assert "seed 0" in str(mismatch)  # for which ranks 0 and 2 are alike, and ranks 1 and 3; see the other seeds
    assert "wrong-process-group" not in mismatch.mistakes, str(mismatch)
