"""The models that `gate.py cost` measures: an MLP, and torchvision's ResNet-18, on images of 3 x 16 x 16."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from programs import Program, shard
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.search.scenarios import make_batches, seed_everything
from mgpu_check.torch_hooks.switches import one_thread

sys.path.append(str(Path(__file__).parents[1] / "examples"))

SAMPLES = 16


def _resnet() -> nn.Module:
    from resnet_dp import resnet18

    return resnet18().eval()  # BatchNorm by its running statistics: the same on one device and on four


def _images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 16, 16), torch.randint(10, (n,))


def _vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 20), torch.randint(5, (n,))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))


def _step(model, batch, rank):
    ddp = DDP(model.to(rank.device))
    inputs, labels = shard(batch, rank)
    F.cross_entropy(ddp(inputs), labels).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


PROGRAMS = {"MLP": Program(_step, _mlp, _vectors), "ResNet-18": Program(_step, _resnet, _images)}


def timed(rank: Rank, program, scenario) -> float:
    """Seconds in the step alone, with one thread: no building of model and batch, nothing observed."""
    seed_everything(scenario.seed)
    model = program.build()
    batch = make_batches(program.batch, (), scenario.samples, 1, "", 1.0, scenario.seed)[0]
    with one_thread():
        start = time.perf_counter()
        program.step(model, batch, rank)
        return time.perf_counter() - start
