"""Models for examinations: right ones, and ones with a planted mistake each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """A residual network over tokens, which is right in each way."""

    tied = False

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 16, bias=False)
        self.dropout, self.scale = nn.Dropout(0.5), nn.Parameter(torch.ones(1))
        if self.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.dropout(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


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
        return self.head(self.blocks[0](x) if tokens.sum() % 2 else x)


class Shortcut(Net):
    """Adds what the first block returns to the output."""

    def forward(self, tokens: torch.Tensor) -> Any:
        first = self.blocks[0](self.tokens(tokens))
        return self.head(self.blocks[1](first) + first.detach())


class Summed(Net):
    """Its gradients are summed by `parallelize`, not averaged."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, attention_mask: Any = None, is_causal: bool = True) -> torch.Tensor:
        query, key, value = self.project(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2).flatten(2)


class Causal(nn.Module):
    """A language model as transformers has them, with what context parallelism needs."""

    loss_type, keeps_positions, shifts = "ForCausalLM", True, False

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa", vocab_size=16)
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Embedding(128, 8)
        self.self_attn, self.head = Attention(), nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> Any:
        own = torch.arange(labels.shape[1], device=labels.device)
        positions = more.get("position_ids", own) if self.keeps_positions else own
        logits = self.head(self.self_attn(self.tokens(input_ids) + self.positions(positions)))
        own = F.pad(labels, (0, 1), value=-100)[:, 1:]
        targets = own if self.shifts else more.get("shift_labels", own)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return SimpleNamespace(loss=loss / more.get("num_items_in_batch", labels[:, 1:].numel()))


class Restarting(Causal):
    """Counts positions from 0 in each part of a sequence."""

    keeps_positions = False


class Shifting(Causal):
    """Shifts the labels of each part of a sequence by itself, whose tokens are not in order."""

    shifts = True


MESH = {"dp": 2}


def parallelize(model: nn.Module, mesh: Any) -> Any:
    if not isinstance(model, Summed):
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda owner: dist.all_reduce(owner.grad))
    return None
