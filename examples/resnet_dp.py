"""ResNet-18 for small images with nn.DataParallel, which needs no launcher: ``python resnet_dp.py``."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inside == outside
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride=stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18(width: int = 64, classes: int = 10) -> nn.Sequential:
    blocks: list[nn.Module] = []
    inside = width
    for stage in range(4):
        outside = width * 2**stage
        blocks += [Residual(inside, outside, 1 if stage == 0 else 2), Residual(outside, outside)]
        inside = outside
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


class WithLoss(nn.Module):
    """Computes the loss on each GPU, so that no logits have to be gathered: one value for each sample."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(images), labels, reduction="none") * weights


def make_data(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, labels, and how much each sample counts."""
    labels = torch.randint(10, (n,))
    return torch.randn(n, 3, 16, 16) + labels.view(-1, 1, 1, 1) / 10, labels, torch.rand(n) + 0.5


def train_batch(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor) -> torch.Tensor:
    """One step on images, labels and weights; `model` is a `WithLoss`, or nn.DataParallel of one."""
    optimizer.zero_grad()
    loss = model(*batch).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


def main(steps: int = 5) -> None:
    torch.manual_seed(0)
    model = nn.DataParallel(WithLoss(resnet18(width=16)).cuda())
    optimizer = make_optimizer(model)
    for step in range(steps):
        loss = train_batch(model, optimizer, *(part.cuda() for part in make_data(32)))
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
