"""Mechanisms of model parallelism without ranks: their tolerance, and what each rank holds."""

from __future__ import annotations

import itertools

import pytest
import torch

from mgpu_check.suite.parallelism.cases import MECHANISMS, MechanismCase
from mgpu_check.suite.parallelism.mechanisms import step_of, tolerance_of
from mgpu_check.suite.recipes import model_parallel


@pytest.mark.parametrize("name", MECHANISMS)
def test_rounding_of_one_device_is_far_within_the_tolerance(name):
    for number in range(5):  # each value of each size at least once
        sizes = {key: values[number % len(values)] for key, values in MECHANISMS[name].sizes.items()}
        case = MechanismCase(name, sizes, "float32", number)
        step = step_of(case, 2 + number % 3)
        exact, rounded = step.undivided(torch.float64), step.undivided(torch.float32)
        tolerance = tolerance_of(exact, torch.float32)
        for key, value in exact.items():
            off = (rounded[key].double() - value).abs()
            assert not value.numel() or float(off.max()) <= tolerance[key] / 4, (case, key)


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_result_depends_on_the_data(name):
    """A result that is 0 for any data would hide a defect."""
    sizes = {key: values[0] for key, values in MECHANISMS[name].sizes.items()}
    for key, value in step_of(MechanismCase(name, sizes, "float64", 1), 4).undivided(torch.float64).items():
        assert bool(value.abs().sum() > 0), key


@pytest.mark.parametrize("interleaved", [True, False])
def test_ranks_hold_all_rows_of_a_fused_weight(interleaved):
    for ranks, shared, each in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 3)):
        heads = model_parallel.FusedHeads(max(shared, ranks) * each, shared, 2, interleaved)
        rows = [model_parallel.rows_of(heads, rank, ranks)[0] for rank in range(ranks)]
        held = [row for own in rows for row in own]
        assert set(held) == set(range((heads.queries + 2 * shared) * heads.width))
        alike = ranks // min(shared, ranks)
        assert len(held) == (heads.queries + 2 * shared * alike) * heads.width


def test_a_rank_splits_its_rows_as_the_whole_is_split():
    heads = model_parallel.FusedHeads(8, 2, 3, True)
    whole = torch.arange(12.0 * 3).reshape(1, 1, -1)
    rows, own = model_parallel.rows_of(heads, 1, 2)
    for part, every in zip(
        model_parallel.split(whole[..., rows], own), model_parallel.split(whole, heads), strict=True
    ):
        assert torch.equal(part, every[:, every.shape[1] // 2 :])


def test_positions_cover_the_sequence_and_balance_its_ends():
    for ranks, zigzag in itertools.product((1, 2, 3), (True, False)):
        positions = model_parallel.positions_of(12, ranks, zigzag=zigzag)
        assert torch.cat(positions).sort().values.tolist() == list(range(12))
        whole = torch.cat(positions)
        assert model_parallel.in_order(whole, positions, 0).tolist() == list(range(12))
        if zigzag:
            assert len({int(one.sum()) for one in positions}) == 1


def test_an_expert_drops_what_exceeds_its_capacity():
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 1.0, 2.0], [1.0, 3.0, 2.0]])
    every, some = model_parallel.route(logits, 2), model_parallel.route(logits, 2, 1)
    assert every.expert.tolist() == [0, 1, 0, 2, 1, 2]
    assert (some.token.tolist(), some.expert.tolist()) == ([0, 0, 1], [0, 1, 2])
    assert some.weight.isclose(torch.tensor([1 / (1 + torch.e**-1), 1 / (1 + torch.e), 1.0])).all()
