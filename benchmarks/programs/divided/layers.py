"""The models that are divided: small transformers, whose plain `forward` is what one device computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Attention", "Experts", "Mlp", "Shape", "Transformer", "batch_of", "loss_of", "token_losses"]

BALANCE = 0.05
"""Weight of the auxiliary loss: the squared log-sum-exp of the router's logits, per token."""


@dataclass(frozen=True)
class Shape:
    """The composition of a model.

    Attributes:
        blocks: "mlp", "attention" or "experts", one after the other.
        tokens: the inputs are token ids; otherwise vectors.
        fused: rows of the QKV weight are those of Q, K, V one after the other; otherwise by heads.
        zeros: what is zero at first: "biases", "last" (the last layer of each block), "positions".
    """

    blocks: tuple[str, ...]
    width: int = 8
    hidden: int = 16
    heads: int = 4
    length: int = 4
    vocabulary: int = 16
    experts: int = 4
    tokens: bool = True
    tied: bool = False
    positions: bool = True
    bias: bool = True
    norm: str = "layer"
    last_norm: bool = True
    fused: bool = True
    zeros: tuple[str, ...] = ()


def _norm(shape: Shape) -> nn.Module:
    if shape.norm == "rms":
        return nn.RMSNorm(shape.width)
    return nn.LayerNorm(shape.width, bias=shape.bias)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = _norm(shape)
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.bias)
        self.down = nn.Linear(shape.hidden, shape.width, bias=shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Causal self-attention with one weight for Q, K and V."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = _norm(shape)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.size, self.fused = shape.width // shape.heads, shape.fused

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Q, K and V of the heads that are in `qkv`, [samples, heads, length, size]."""
        samples, length, width = qkv.shape
        heads = width // 3 // self.size
        if self.fused:
            parts = qkv.view(samples, length, 3, heads, self.size).permute(2, 0, 3, 1, 4)
        else:
            parts = qkv.view(samples, length, heads, 3, self.size).permute(3, 0, 2, 1, 4)
        return parts.unbind()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """The queries are those of the positions from `offset` on."""
        scores = q @ k.transpose(2, 3) / self.size**0.5
        places = torch.arange(k.shape[2], device=q.device)
        later = places[None, :] > places[offset : offset + q.shape[2], None]
        mixed = scores.masked_fill(later, -1e9).softmax(-1) @ v
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.attend(*self.split(self.qkv(self.norm(x)))))


class Experts(nn.Module):
    """A mixture of experts: each token goes to the one that its router prefers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = _norm(shape)
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(shape.width, shape.width, bias=shape.bias),
                nn.GELU(),
                nn.Linear(shape.width, shape.width, bias=shape.bias),
            )
            for _ in range(shape.experts)
        )
        self.balance: torch.Tensor | None = None

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The normed tokens, the expert of each, and the weight of its answer; `balance` becomes the auxiliary loss."""
        flat = self.norm(x).flatten(0, 1)
        logits = self.router(flat)
        self.balance = BALANCE * logits.logsumexp(-1).square().sum()
        chosen = logits.argmax(-1)
        return flat, chosen, logits.softmax(-1).gather(1, chosen[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, chosen, weight = self.routed(x)
        answers = sum((chosen == one)[:, None] * expert(flat) for one, expert in enumerate(self.experts))
        return x + (weight * answers).view_as(x)


KINDS = {"mlp": Mlp, "attention": Attention, "experts": Experts}


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width) if shape.tokens else nn.Linear(6, shape.width)
        self.positions = nn.Parameter(torch.randn(shape.length, shape.width)) if shape.positions else None
        self.blocks = nn.ModuleList(KINDS[kind](shape) for kind in shape.blocks)
        self.norm = _norm(shape) if shape.last_norm else nn.Identity()
        self.head = nn.Linear(shape.width, shape.vocabulary if shape.tokens else 4, bias=shape.bias)
        if shape.tied:
            self.head.weight = self.embed.weight
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if (
                    ("biases" in shape.zeros and name.endswith("bias"))
                    or ("last" in shape.zeros and name.endswith(("down.weight", "out.weight", "2.weight")))
                    or ("positions" in shape.zeros and name == "positions")
                ):
                    parameter.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(shape: Shape, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    if shape.tokens:
        tokens = torch.randint(shape.vocabulary, (n, shape.length))
        return tokens, tokens.roll(-1, 1)
    inputs = torch.randn(n, shape.length, 6)
    return inputs, inputs[..., :4].cumsum(1).tanh()


def token_losses(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over all tokens."""
    if labels.is_floating_point():
        return F.mse_loss(outputs, labels, reduction="sum") / labels.shape[-1]
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")


def loss_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
    """The loss of some samples, as a share in the mean over `tokens`; with the auxiliary losses in `model`."""
    total = token_losses(model(inputs), labels)
    for part in model.modules():
        if isinstance(part, Experts) and part.balance is not None:
            total = total + part.balance
            part.balance = None
    return total / tokens
