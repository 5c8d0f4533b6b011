"""Averagers of local SGD: in which steps ranks average their parameters, and with whom."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

from mgpu_check.checks.findings import Findings
from mgpu_check.rank_side.rank import Rank

__all__ = ["assert_averagers_average"]

_STEPS = 6


def assert_averagers_average(rank: Rank) -> None:
    """Assert that averagers leave the mean in the steps that their periods say, and each rank's own in all others. A collective.

    One has a period of all ranks, after two steps to warm up; the other, where the ranks are even and more than two, another of
    pairs. A parameter without a gradient is left alone, as torch says.

    Raises:
        GradientMismatch: in some step a parameter has another value.
    """
    __tracebackhide__ = True
    everybody = list(range(rank.size))
    with Findings() as findings:
        periodic = PeriodicModelAverager(period=3, warmup_steps=2)
        _judge(rank, findings, "PeriodicModelAverager", periodic, {2: everybody, 5: everybody})
        if rank.size % 2 == 0 and rank.size > 2:
            pair = [rank.index - rank.index % 2, rank.index - rank.index % 2 + 1]
            hierarchical = HierarchicalModelAverager(OrderedDict([(2, 2), (4, rank.size)]))
            due = {0: everybody, 2: pair, 4: everybody}
            _judge(rank, findings, "HierarchicalModelAverager", hierarchical, due)


def _judge(rank: Rank, findings: Findings, name: str, averager: Any, due: dict[int, list[int]]) -> None:
    for step in range(_STEPS):
        # Multiples of the number of ranks, and so of two in pairs: each quotient is whole.
        own = [float((member + 1 + step) * rank.size) for member in range(rank.size)]
        averaged, left = (nn.Parameter(torch.full((3,), own[rank.index], device=rank.device)) for _ in range(2))
        averaged.grad = torch.ones_like(averaged)
        averager.average_parameters([averaged, left])
        members = due.get(step, [rank.index])
        expected = sum(own[member] for member in members) / len(members)
        got = (averaged.tolist(), left.tolist())
        message = (
            f"{name} on {rank.size} ranks, step {step}, rank {rank.index}: a parameter, and one without a gradient, are {got}, "
            f"expected the mean of ranks {members}, {expected}, and {own[rank.index]}"
        )
        findings.require(got == ([expected] * 3, [own[rank.index]] * 3), message, ranks=[rank.index])
