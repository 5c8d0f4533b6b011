"""The data and the models of the programs: small, of the kinds that people train."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

CLASSES, FEATURES, VOCABULARY, LENGTH, IGNORED = 4, 6, 12, 5, -100


def vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(n, FEATURES)
    return inputs, inputs[:, :CLASSES].argmax(1)


def numbers(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(n, FEATURES)
    return inputs, 3 * inputs.sum(1, keepdim=True).sin() * torch.rand(n, 1)


def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(CLASSES, (n,))
    return torch.randn(n, 2, 8, 8) + labels.view(-1, 1, 1, 1) / 2, labels


def texts(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (n, LENGTH))
    return tokens, tokens.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (n, 1)), IGNORED)


def mlp(outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, outputs))


def regressor() -> nn.Module:
    return mlp(1)


def convnet(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), norm(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, CLASSES)
    )


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8), nn.Linear(8, VOCABULARY))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device, torch.get_default_dtype())
        return self.head(self.layer(self.tokens(tokens), src_mask=mask))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.GRU) -> None:
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(VOCABULARY, 6), kind(6, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.tokens(tokens))[0][:, -1])


class Parallel(nn.Module):
    """Two layers whose hidden features can be divided over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.column, self.row = nn.Linear(FEATURES, 12), nn.Linear(12, CLASSES)


def text_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def counted(labels: torch.Tensor) -> torch.Tensor:
    count = (labels != IGNORED).sum()
    dist.all_reduce(count)
    return count
