"""The gate for checkpoints: what rounding explains passes, and more does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check import ScalingMismatch, assert_resume_continues
from tests.gates.checkpoints import refuted

pytestmark = pytest.mark.gpus(4)


def adam(*forgotten):
    def train(rank, directory, start, stop):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        # In its second step it reduces in other buckets, and so adds up in another order, than in its first.
        parallel = DistributedDataParallel(model)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
        torch.manual_seed(rank.index)
        if start:
            saved = torch.load(directory / "it.pt")
            for name, part in parts.items():
                if name not in forgotten:
                    part.load_state_dict(saved[name])
            torch.set_rng_state(torch.load(directory / f"{rank.index}.pt"))
        for step in range(start, stop):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step * 10 + rank.index))
            optimizer.zero_grad()
            parallel(x).square().mean().backward()
            optimizer.step()
            schedule.step()
        if rank.index == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, directory / "it.pt")
        torch.save(torch.get_rng_state(), directory / f"{rank.index}.pt")
        return parts

    return train


AT_FOUR: Any = {"steps": 3, "world_sizes": [4]}


@pytest.mark.slow
def test_another_order_of_sums(ranks):
    assert_resume_continues(ranks, adam(), **AT_FOUR)
    with pytest.raises(ScalingMismatch, match="does not continue"):
        assert_resume_continues(ranks, adam(), **AT_FOUR, tolerance=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["optimizer", "model", "schedule"])
def test_another_order_of_sums_excuses_nothing_that_is_forgotten(ranks, forgotten):
    text = refuted(ranks, adam(forgotten), "state-not-restored", match="does not continue", **AT_FOUR)
    assert f"on no rank as saved: {forgotten}." in text


def off(error):
    def train(rank, directory, start, stop):
        x = torch.load(directory / f"{rank.index}.pt") if start else torch.linspace(1, 2, 9)
        x = x * (1 + error) if start else x
        for _ in range(start, stop):
            x = x * 1.3
        torch.save(x, directory / f"{rank.index}.pt")
        return {"x": x}

    return train


def test_what_rounding_does_not_explain(ranks):
    assert_resume_continues(ranks, off(1e-7))
    text = refuted(ranks, off(1e-4), match=r"x on ranks 0-1: element .* ±")
    assert "right after loading, not as saved: x on ranks 0-1" in text and "no known mistake explains this" in text


def test_where_rounding_cannot_be_measured(ranks):
    inner = off(1e-7)

    def train(rank, directory, start, stop):
        assert not directory.name.startswith("of perturbed"), "no more disk"
        return inner(rank, directory, start, stop)

    text = refuted(ranks, train, match="x on")
    assert (
        "compared bit for bit, because the size of rounding errors could not be measured" in text
        and "no more disk" in text
    )
