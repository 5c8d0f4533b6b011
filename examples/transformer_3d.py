"""A small language model, divided among GPUs three ways: data, tensor and pipeline parallel.

``torchrun --nproc-per-node=8 transformer_3d.py``. Every GPU has one stage of the layers, and in it some of the heads
and hidden features. GPUs with the same part of the model divide the batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

VOCABULARY, LENGTH, FEATURES, HEADS, LAYERS = 16, 6, 16, 2, 2
MICRO_BATCHES = 2

Batch = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.heads(x))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, FEATURES // HEADS)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.mT / (FEATURES // HEADS) ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)
        self.attention: Any = Attention()
        self.feed: Any = Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, FEATURES)
        self.positions = nn.Parameter(torch.randn(LENGTH, FEATURES) / 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions


def build() -> nn.Sequential:
    head = nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, VOCABULARY))
    return nn.Sequential(Embedding(), *(Block() for _ in range(LAYERS)), head)


def make_data(n: int) -> Batch:
    text = torch.randint(VOCABULARY, (n, LENGTH + 1))
    return text[:, :-1], text[:, 1:]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _Copy(torch.autograd.Function):
    """The start of a parallel region: identity forward, sum of the group's gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """The end of a parallel region: sum of the group's parts forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class TensorParallel(nn.Module):
    """A layer that is divided among the GPUs of a group, up to `layer.out`."""

    def __init__(self, layer: Attention | Feed, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layer, self.group = layer, group
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)
        fused = 3 if isinstance(layer, Attention) else 1  # rows of q, of k, and of v
        first = layer.qkv if isinstance(layer, Attention) else layer.up
        first.weight, first.bias = self.shard(first.weight, 0, fused), self.shard(first.bias, 0, fused)
        layer.out.weight = self.shard(layer.out.weight, 1, 1)

    def shard(self, whole: torch.Tensor, dim: int, fused: int) -> nn.Parameter:
        parts = [part.chunk(self.size, dim)[self.index] for part in whole.detach().chunk(fused, dim)]
        return nn.Parameter(torch.cat(parts, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        x = _Copy.apply(x, self.group)
        hidden = layer.heads(x) if isinstance(layer, Attention) else F.gelu(layer.up(x))
        return _Sum.apply(F.linear(hidden, layer.out.weight), self.group) + layer.out.bias


class Trainer:
    """Trains one GPU's part of the model.

    Args:
        mesh: of the axes "dp", "pp" and "tp", or some of them.
    """

    def __init__(self, model: nn.Sequential, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self.stage, self.stages = self.place("pp")
        self.replica, self.replicas = self.place("dp")
        self.layers = self.layers_of_stage(model).to(device)
        if "tp" in self.axes():
            for block in self.layers:
                if isinstance(block, Block):
                    block.attention = TensorParallel(block.attention, mesh["tp"].get_group())
                    block.feed = TensorParallel(block.feed, mesh["tp"].get_group())
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-2)

    def axes(self) -> tuple[str, ...]:
        return self.mesh.mesh_dim_names or ()

    def place(self, axis: str) -> tuple[int, int]:
        return (self.mesh[axis].get_local_rank(), self.mesh[axis].size()) if axis in self.axes() else (0, 1)

    def layers_of_stage(self, model: nn.Sequential) -> nn.Sequential:
        share = len(model) // self.stages
        return model[self.stage * share : (self.stage + 1) * share]

    def run_batch(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """One step on this replica's samples; in the last stage the loss over all replicas."""
        tokens, labels = tokens.to(self.device), labels.to(self.device)
        self.optimizer.zero_grad()
        loss = self.forward_backward(tokens, labels)
        self.synchronize()
        self.optimizer.step()
        if loss is not None and self.replicas > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=self.mesh["dp"].get_group())
        return loss

    def forward_backward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        if self.stages == 1:
            loss = loss_of(self.layers(tokens), labels)
            loss.backward()
            return loss.detach()
        group = self.mesh["pp"].get_group()
        stage = PipelineStage(self.layers, self.stage, self.stages, self.device, group=group)
        schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_of)
        last, losses = self.stage == self.stages - 1, list[torch.Tensor]()
        given = {"target": labels, "losses": losses} if last else {}
        schedule.step(*([tokens] if self.stage == 0 else []), **given)
        return torch.stack(losses).mean().detach() if last else None

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.layers.parameters()

    def synchronize(self) -> None:
        """Average gradients over the replicas of this part of the model."""
        if self.replicas > 1:
            for parameter in self.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=self.mesh["dp"].get_group())


def main(steps: int = 20) -> None:
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)  # alike on all ranks: each takes its part of one model
    shape = (dist.get_world_size() // 4, 2, 2)
    trainer = Trainer(build(), init_device_mesh("cuda", shape, mesh_dim_names=("dp", "pp", "tp")), device)
    for step in range(steps):
        tokens, labels = (part.chunk(trainer.replicas)[trainer.replica] for part in make_data(64))
        loss = trainer.run_batch(tokens, labels)
        if loss is not None and step % 5 == 0 and dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
