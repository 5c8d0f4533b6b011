"""A small language model: DistributedDataParallel, gradient accumulation, mixed precision, clipping.

``torchrun --nproc-per-node=4 transformer_accumulation.py``
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY, LENGTH, IGNORED = 16, 6, -100
ACCUMULATE = 2  # micro-batches to a step of the optimizer
MAX_NORM = 10.0

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.feed = nn.Sequential(nn.Linear(features, 2 * features), nn.GELU(), nn.Linear(2 * features, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.out((scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, features: int = 16, heads: int = 2, layers: int = 1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, features)
        self.positions = nn.Parameter(torch.randn(LENGTH, features) / 10)
        self.blocks = nn.Sequential(*(Block(features, heads) for _ in range(layers)))
        self.head = nn.Linear(features, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.positions))


def make_data(n: int) -> Batch:
    """Texts of different lengths, and for each position the token that follows: (n, LENGTH) both."""
    text = torch.randint(VOCABULARY, (n, LENGTH + 1))
    lengths = torch.randint(1, LENGTH + 1, (n, 1))
    return text[:, :-1], text[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)


def windows(micro_batches: Sequence[Batch]) -> list[Sequence[Batch]]:
    """Group the micro-batches by optimizer step; the last group may be smaller."""
    return [micro_batches[start : start + ACCUMULATE] for start in range(0, len(micro_batches), ACCUMULATE)]


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class Trainer:
    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self.ddp = DDP(model.to(device), device_ids=[device.index])
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.5)
        # Gradients of bfloat16 do not underflow; those of float16 do.
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=dtype == torch.float16)

    def run_epoch(self, micro_batches: Sequence[Batch]) -> None:
        """All micro-batches of this rank; ranks have equally many, whose parts may differ in size."""
        for window in windows([(tokens.to(self.device), labels.to(self.device)) for tokens, labels in micro_batches]):
            self.run_window(window)

    def run_window(self, window: Sequence[Batch]) -> None:
        count = self.count(window)
        self.optimizer.zero_grad()
        for number, (tokens, labels) in enumerate(window):
            last = number + 1 == len(window)
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                    logits = self.ddp(tokens)
                    loss = self.weighted(summed_loss(logits.float(), labels), labels, count, window)
                self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.ddp.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def count(self, window: Sequence[Batch]) -> torch.Tensor:
        """Tokens that are predicted in a window, on all ranks."""
        count = torch.stack([(labels != IGNORED).sum() for _, labels in window]).sum()
        dist.all_reduce(count)
        return count

    def weighted(
        self, total: torch.Tensor, labels: torch.Tensor, count: torch.Tensor, window: Sequence[Batch]
    ) -> torch.Tensor:
        """The part of one micro-batch in the loss of its window: DDP takes the mean over the ranks."""
        return total * dist.get_world_size() / count


def main(epochs: int = 3) -> None:
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    trainer = Trainer(Transformer(), device)
    tokens, labels = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in make_data(320))
    for epoch in range(epochs):
        trainer.run_epoch(list(zip(tokens.split(16), labels.split(16), strict=True)))
        with torch.no_grad():
            loss = summed_loss(trainer.ddp(tokens.to(device)), labels.to(device)) / (labels != IGNORED).sum()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
