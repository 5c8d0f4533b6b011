"""`CUDA_VISIBLE_DEVICES` counts when the driver is first asked, as on real devices, and not when the node is
entered."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.simulated import simulated_node
from mgpu_check.simulated.node import uuid_of, visible
from tests.masking import CASES, VARIABLE, answers


@pytest.mark.slow
def test_when_the_variable_counts(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert answers(lambda: simulated_node(4)) == CASES


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        (" 2 , +0", (2, 0)),
        ("1gpu,2", (1, 2)),
        ("0,x,1", (0,)),
        ("0,3,1", (0,)),
        ("2,0,2", ()),
        (f"GPU-{uuid_of(2).upper()},0", (2, 0)),
        ("GPU-5107", ()),  # all of them begin so
        ("GPU-77", ()),
    ],
)
def test_what_the_variable_says(listed, seen):
    assert visible(listed, 3) == seen


def test_a_seed_that_is_set_before_the_first_use_holds(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with simulated_node(3):
        torch.cuda.manual_seed_all(5)
        assert not torch.cuda.default_generators and not torch.cuda._initialized
        monkeypatch.setenv(VARIABLE, "2,1")
        first = torch.rand(3, device="cuda:1")
        assert len(torch.cuda.default_generators) == 2 and torch.cuda._initialized
        torch.cuda.manual_seed_all(5)
        assert torch.equal(torch.rand(3, device="cuda:1"), first)
        assert len(torch.cuda.get_rng_state_all()) == 2
