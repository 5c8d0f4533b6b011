"""Training that saves and loads checkpoints, and may forget things, and what tests of the gate for checkpoints
assert."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check import Rank, assert_resume_continues
from mgpu_check.gates.gate_arguments import RanksFixture
from tests.gates.steps import raised_by


def rng(rank: Rank) -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state(rank.device), "python": random.getstate()}


def set_rng(state: dict[str, Any], rank: Rank) -> None:
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["device"], rank.device)
    random.setstate(state["python"])


def training(
    *forgotten: str,
    dropout: float = 0.0,
    per_rank_rng: bool = True,
    loads: Callable[[Rank], bool] = lambda rank: True,
    returned: Sequence[str] = ("model", "optimizer", "scheduler"),
    wrap_first: bool = False,
) -> Callable[..., dict[str, Any]]:
    """Training that does not restore what is `forgotten`.

    Args:
        per_rank_rng: each rank saves its own random numbers, and does not load those of rank 0.
        loads: whether a rank loads anything.
        returned: what of its state is to be compared.
        wrap_first: DistributedDataParallel is made before the checkpoint is loaded, and not after that.
    """

    def train(rank: Rank, directory: Path, start: int, stop: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(rank.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        parallel = DistributedDataParallel(model) if wrap_first else None
        if start and loads(rank):
            saved = torch.load(
                directory / f"{rank.index if per_rank_rng else 0}.pt", map_location="cpu", weights_only=False
            )
            for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
                if name not in forgotten:
                    part.load_state_dict(saved[name])
            if "rng" not in forgotten:
                set_rng(saved["rng"], rank)
        if not start:
            torch.manual_seed(100 + rank.index)  # dropout differs between ranks
            torch.cuda.manual_seed(100 + rank.index)
        parallel = parallel or DistributedDataParallel(model)
        data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
        for step in range(start, stop):
            batch = data[step * 8 : (step + 1) * 8][rank.index :: rank.size].to(rank.device)
            optimizer.zero_grad()
            parallel(batch).square().mean().backward()
            optimizer.step()
            scheduler.step()
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": rng(rank)}
        saved = {name: part if name == "rng" else part.state_dict() for name, part in parts.items()}
        torch.save(saved, directory / f"{rank.index}.pt")
        return {name: part for name, part in parts.items() if name in returned}

    return train


def refuted(ranks: RanksFixture, train: Callable[..., Any], *mistakes: str, match: str, **options: Any) -> str:
    return str(raised_by(assert_resume_continues, ranks, train, *mistakes, match=match, **options))
