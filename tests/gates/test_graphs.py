"""Steps that are captured in a CUDA graph and replayed: right ones pass, and one that forgets to copy its input does
not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check import ScalingMismatch, assert_step_scales
from tests.gates.steps import variant

pytestmark = pytest.mark.gpus(2)

WARM_UP = 3  # backward passes before a capture, of which DistributedDataParallel wants 11 on real devices


def build():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 1))


def batch(n):
    return torch.randn(n, 6), torch.randn(n, 1)


def eager(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss = F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach()}


class Captured:
    """A whole step in one graph: warmed up and captured on a side stream, as the documentation of torch has it."""

    as_view = False
    copies = True

    def __init__(self, model, rank):
        self.side = torch.cuda.Stream()
        with torch.cuda.stream(self.side):
            self.ddp = DistributedDataParallel(model.to(rank.device), gradient_as_bucket_view=self.as_view)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.graph = None

    def forward_and_backward(self):
        self.optimizer.zero_grad(set_to_none=not self.as_view)
        loss = F.mse_loss(self.ddp(self.static[0]), self.static[1])
        loss.backward()
        return loss

    def capture(self, part):
        self.static = [torch.empty_like(t).copy_(t) for t in part]
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for _ in range(WARM_UP):
                self.forward_and_backward()
        torch.cuda.current_stream().wait_stream(self.side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.side):
            self.loss = self.forward_and_backward()
            self.optimizer.step()

    def __call__(self, model, batch, rank):
        part = [t.chunk(rank.size)[rank.index].to(rank.device) for t in batch]
        if self.graph is None:
            self.capture(part)
        elif self.copies:
            for static, t in zip(self.static, part, strict=True):
                static.copy_(t)
        self.graph.replay()
        mean = self.loss.detach() / rank.size
        torch.distributed.all_reduce(mean)
        return {"loss": mean}


FEW: dict[str, Any] = {"build": build, "batch": batch, "sizes": 4, "max_examples": 1}


@pytest.mark.slow
@pytest.mark.parametrize("as_view", [False, True])
def test_a_captured_step_passes(ranks, as_view):
    assert_step_scales(ranks, variant(Captured, as_view=as_view), reference=eager, **FEW)


@pytest.mark.slow
def test_a_step_that_does_not_copy_its_input_is_refuted(ranks):
    with pytest.raises(ScalingMismatch, match="samples-missed") as caught:
        assert_step_scales(ranks, variant(Captured, copies=False), reference=eager, **FEW)
    assert "decision-per-rank" not in str(caught.value)  # the steps of replays count


def leave_a_capture(rank):
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda.CUDAGraph().capture_begin()


def streams_are_fresh(rank):
    torch.cuda.synchronize()
    return torch.cuda.current_stream().stream_id, torch.cuda.get_sync_debug_mode()


def test_ranks_have_fresh_streams_after_each_call(ranks):
    ranks.run(leave_a_capture, size=2)
    assert ranks.run(streams_are_fresh, size=2) == [(0, 0)] * 2
