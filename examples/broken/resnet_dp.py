"""`resnet_dp`, but the weights of the samples are a list: DataParallel splits tensors, and gives a list to each GPU
whole.

Each GPU then weighs its samples by those of the first GPU; `zip` cuts off the rest without a word.
"""

from __future__ import annotations

import torch
from resnet_dp import WithLoss as Right
from resnet_dp import train_batch as train
from torch import nn
from torch.nn import functional as F


class WithLoss(Right):
    def forward(self, images: torch.Tensor, labels: torch.Tensor, weights: list[float]) -> torch.Tensor:
        losses = F.cross_entropy(self.net(images), labels, reduction="none")
        return torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=False)])


def train_batch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    return train(model, optimizer, images, labels, weights.tolist())  # weights
