"""Check the averagers of local SGD: the steps that average parameters, and the ranks that take part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from mgpu_check.asserts.findings import Findings
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.distributed.training import require

_STEPS = 6


def assert_averagers_average(rank: Rank) -> None:
    """Assert that averagers average parameters in the right steps over the right ranks, and only then. A collective.

    The state of `PostLocalSGDOptimizer` must survive loading into another optimizer. A parameter without a gradient
    must not change, as torch documents.
    """
    everybody = list(range(rank.size))
    with Findings() as findings:
        periodic = PeriodicModelAverager(period=3, warmup_steps=2)
        _judge(rank, findings, "PeriodicModelAverager", periodic.average_parameters, {2: everybody, 5: everybody})
        half = [member for member in everybody if member % 2 == rank.index % 2]
        groups = [dist.new_group(everybody[start::2]) for start in range(min(2, rank.size))]
        of_group = PeriodicModelAverager(period=2, process_group=groups[rank.index % 2])
        due = dict.fromkeys((0, 2, 4), half)
        _judge(rank, findings, "PeriodicModelAverager of a group", of_group.average_parameters, due)
        for group in groups:
            dist.destroy_process_group(group)
        local = PeriodicModelAverager(period=2, warmup_steps=1)
        due = dict.fromkeys((1, 3, 5), everybody)
        _judge(rank, findings, "PostLocalSGDOptimizer", _steps_of(local, rank), due)
        _resume(rank, findings)
        if rank.size % 2 == 0 and rank.size > 2:
            pair = [rank.index - rank.index % 2, rank.index - rank.index % 2 + 1]
            periods = OrderedDict([(2, 2), (4, rank.size)])
            hierarchical = HierarchicalModelAverager(periods, warmup_steps=1, process_group=rank.group)
            due = {2: pair, 4: everybody}
            _judge(rank, findings, "HierarchicalModelAverager", hierarchical.average_parameters, due)
            # The averager never destroys its group, and each example would keep another one, with memory on every GPU.
            dist.destroy_process_group(hierarchical.period_process_group_dict[2])


def _steps_of(averager: PeriodicModelAverager, rank: Rank) -> Callable[[list[nn.Parameter]], object]:
    """Return a function that moves parameters by the opposite of a step, and then takes the step, with its average."""

    def step(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.fill_(rank.index + 1)
                with torch.no_grad():
                    parameter.add_(parameter.grad, alpha=rank.size)
        PostLocalSGDOptimizer(torch.optim.SGD(parameters, lr=float(rank.size)), averager).step()

    return step


def _resume(rank: Rank, findings: Findings) -> None:
    """Check an optimizer that loads the state after a first step without averaging: its next step must average."""
    parameter, added = (nn.Parameter(torch.full((3,), float(rank.index), device=rank.device)) for _ in range(2))
    original, resumed = (
        PostLocalSGDOptimizer(torch.optim.SGD([parameter], lr=1.0), PeriodicModelAverager(period=2, warmup_steps=1))
        for _ in range(2)
    )
    for optimizer in (original, resumed):
        optimizer.add_param_group({"params": [added]})
        for set_to_none in (True, False):
            for value in (parameter, added):
                value.grad = torch.ones_like(value)
            optimizer.zero_grad(set_to_none=set_to_none)
    original.step()
    resumed.load_state_dict(original.state_dict())
    resumed.step()
    expected, got = (rank.size - 1) / 2, [*parameter.tolist(), *added.tolist()]
    subject = f"PostLocalSGDOptimizer on {rank.size} ranks, loaded after one step"
    text = f"after the next two parameters are {got}, expected the mean of all ranks, {expected}"
    require(findings, rank, got == [expected] * 6, subject, text)


def _judge(
    rank: Rank,
    findings: Findings,
    name: str,
    average: Callable[[list[nn.Parameter]], object],
    due: dict[int, list[int]],
) -> None:
    for step in range(_STEPS):
        # Multiples of the number of ranks, which is even if there are pairs: so every mean is a whole number.
        own = [float((member + 1 + step) * rank.size) for member in range(rank.size)]
        averaged, unaveraged = (nn.Parameter(torch.full((3,), own[rank.index], device=rank.device)) for _ in range(2))
        averaged.grad = torch.ones_like(averaged)
        average([averaged, unaveraged])
        members = due.get(step, [rank.index])
        expected = sum(own[member] for member in members) / len(members)
        got = (averaged.tolist(), unaveraged.tolist())
        text = f"a parameter, and one without a gradient, are {got}, expected the mean of ranks {members}, {expected}"
        text += f", and {own[rank.index]}"
        right = got == ([expected] * 3, [own[rank.index]] * 3)
        require(findings, rank, right, f"{name} on {rank.size} ranks, step {step}", text)
