"""How far runs lead from the usual one, element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_check.numerics.steps import envelopes, estimate, farthest


def test_the_farthest_of_all_runs_counts():
    value = torch.zeros(3, dtype=torch.float64)
    reached = farthest(value, [torch.tensor([1.0, 0.0, 2.0]), torch.tensor([-3.0, 0.0, 1.0])])
    assert reached.tolist() == [3.0, 0.0, 2.0]


def test_an_element_that_happens_to_be_right_is_granted_what_the_others_are():
    usual = {"w": torch.zeros(2), "none": torch.zeros(0)}
    found = envelopes(usual, [{"w": torch.tensor([4.0, 0.0])}, {"w": torch.tensor([0.0, torch.nan])}])
    assert found.keys() == {"w"}
    assert found["w"].tolist() == pytest.approx([4.0, 8.0**0.5], rel=1e-15)
    assert found["w"].dtype is torch.float64


def test_what_a_run_lacks_or_has_in_another_shape_is_passed_over():
    runs: list[dict[str, Any]] = [{}, {"w": None}, {"w": torch.ones(3)}]
    found = envelopes({"w": torch.zeros(2)}, iter(runs))
    assert found["w"].tolist() == [0.0, 0.0]


def test_rows_and_columns_that_move_more_are_granted_more_where_they_cross():
    moved = torch.tensor([[0.0, 4.0], [4.0, 4.0]], dtype=torch.float64)
    mean = 12.0**0.5
    assert estimate(moved).tolist() == [[mean, 4.0], [4.0, 4.0]]
    moved = torch.tensor([[0.0, 8.0], [8.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    raised = estimate(moved, crosswise=True)
    assert raised[0, 0] > raised[2, 0] == estimate(moved)[2, 0]
