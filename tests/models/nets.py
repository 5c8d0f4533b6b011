"""Models for examinations: right ones, and ones with a planted mistake each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """A residual network over tokens, which is right in each way."""

    tied = False

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 16, bias=False)
        self.dropout = nn.Dropout(0.5)
        if self.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.dropout(self.tokens(tokens))
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


class Tied(Net):
    tied = True


class WithLoss(Net):
    """Returns its loss where it gets labels."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(tokens)
        return (
            {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
            if labels is not None
            else logits
        )


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


class Noise(Net):
    """Draws random numbers, which differ between ranks."""

    def forward(self, tokens: torch.Tensor) -> Any:
        return super().forward(tokens) + torch.randn(tokens.shape[0], 1, 1, device=tokens.device)


class Counted(Net):
    """Adds a loss that is divided by the number of samples of a rank, and summed."""

    def forward(self, tokens: torch.Tensor) -> Any:
        logits = super().forward(tokens)
        return logits * (len(tokens) ** 0.5)


class Contrastive(Net):
    """Compares each sample with those of its rank only."""

    def forward(self, tokens: torch.Tensor) -> Any:
        features = super().forward(tokens).mean(1)
        return {"loss": F.cross_entropy(features @ features.T, torch.arange(len(tokens), device=tokens.device))}


class Mean(Net):
    """Keeps a running mean of the samples of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> Any:
        if self.training:
            self.mean: torch.Tensor = self.mean.lerp(tokens.float().mean(), 0.5)
        return super().forward(tokens) + self.mean


class Gathered(Net):
    """Gathers features of all ranks without their gradients."""

    def forward(self, tokens: torch.Tensor) -> Any:
        features = super().forward(tokens).mean(1)
        every = [features]
        if dist.is_initialized() and self.training and dist.get_world_size() > 1:
            every = [torch.empty_like(features) for _ in range(dist.get_world_size())]
            dist.all_gather(every, features.detach())
        return {"loss": (features @ torch.cat(every).T).square().mean()}


class Interaction(Net):
    """Wrong on several ranks with autocast and micro-batches of two samples."""

    def forward(self, tokens: torch.Tensor) -> Any:
        several = dist.is_initialized() and dist.get_world_size() > 1
        wrong = several and torch.is_autocast_enabled(tokens.device.type) and len(tokens) == 2
        return super().forward(tokens) * (2.0 if wrong else 1.0)


class Switched(Net):
    """Uses its second block only for some batches."""

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.tokens(tokens)
        return self.head(x + self.blocks[0](x) if tokens.sum() % 2 else x)
