"""Models with integer outputs and gradients for integer parameters, inputs and targets, so that no sum rounds.

Each maps (batch, 16) to (batch, 4). Every order of summation, also over devices and ranks, gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

FEATURES = 16
CLASSES = 4
_SIDE = 4
_WORDS = 12
_WIDE = 4200
"""Hidden units of "wide": its first weight has 67,200 elements, to cover sizes above 64 Ki."""
PER_BATCH = (1 << 58) + 5
"""Increment of the count of "counting" per batch, in addition to the rows. At this magnitude float64 holds only
multiples of 64. The count starts between -3 and 3 and has up to 50 rows per batch, so a count that passes through
float64 comes back wrong."""


def draw(model: nn.Module, seed: int, most: int = 3) -> nn.Module:
    """Set each parameter and buffer of `model` to random integers from -`most` to `most`, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            drawn = torch.randint(-most, most + 1, value.shape, generator=generator)
            value.copy_(drawn > 0 if value.dtype == torch.bool else drawn)
    return model


def settle(model: nn.Module, most: int = 3) -> None:
    """Round each parameter to integers, and wrap them into -`most` to `most`, so that the next step is exact as
    well."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.remainder(parameter.round() + most, 2 * most + 1) - most)


def _words(x: torch.Tensor) -> torch.Tensor:
    """Map integers of any shape to word indices, int64."""
    return x.detach().abs().long() * 3 % _WORDS


class Mixed(nn.Module):
    """Two layers in float32 and an inner layer in another dtype, as in models of mixed precision.

    In float64, the gradients of the inner layer need more than the 24 bits of float32.
    """

    def __init__(self, inner: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.inner = nn.Linear(8, 8).to(inner)
        self.last = nn.Linear(8, CLASSES)
        self.scale = (1 << 24) + 43 if inner == torch.float64 else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x))
        inner = self.inner(hidden.detach().to(self.inner.weight.dtype) * self.scale)
        return torch.as_tensor(self.last(hidden + inner.remainder(64).to(hidden.dtype)))


class WholeLeNet(nn.Module):
    """Two convolutions with ReLU, and sum pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 6, 2)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x.view(len(x), 1, _SIDE, _SIDE)))
        pooled = F.avg_pool2d(F.relu(self.second(hidden)), 1, divisor_override=1)
        return torch.as_tensor(self.last(pooled.flatten(1)))


class WholeResidual(nn.Module):
    """A residual block with a 1x1 convolution in its shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 2, stride=2)
        self.block = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.shortcut = nn.Conv2d(4, 4, 1, stride=2)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = F.relu(self.stem(x.view(len(x), 1, _SIDE, _SIDE)))
        return torch.as_tensor(self.last(F.relu(self.block(stem) + self.shortcut(stem)).flatten(1)))


class Embedded(nn.Module):
    """A bag of words and an embedding with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, 5, padding_idx=0)
        self.bag = nn.EmbeddingBag(_WORDS, 5, mode="sum")
        self.last = nn.Linear(10, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = _words(x)
        return torch.as_tensor(self.last(torch.cat([self.words(words).sum(1), self.bag(words)], 1)))


class Attention(nn.Module):
    """Linear attention over four tokens of four features. It has no softmax, because softmax rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(_SIDE, 3, bias=False) for _ in range(3))
        self.last = nn.Linear(3, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(len(x), _SIDE, _SIDE)
        attended = self.queries(tokens) @ (self.keys(tokens).transpose(1, 2) @ self.values(tokens))
        return torch.as_tensor(self.last(attended.sum(1)))


class Tied(nn.Module):
    """A language model whose output layer shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, 6)
        self.hidden = nn.Linear(6, 6)
        self.output = nn.Linear(6, CLASSES, bias=False)
        self.output.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.output(F.relu(self.hidden(self.words(_words(x) % CLASSES).sum(1)))))


class Heads(nn.Module):
    """A trunk with three heads; each call uses one head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 6)
        self.heads = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return torch.as_tensor(self.heads[head](F.relu(self.trunk(x))))


class Listed(nn.Module):
    """A model with its weights in a ParameterList and its biases in a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        widths = (FEATURES, 6, CLASSES)
        self.weights = nn.ParameterList(torch.zeros(after, before) for before, after in pairwise(widths))
        self.biases = nn.ParameterDict({"first": torch.zeros(6), "last": torch.zeros(CLASSES)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(F.linear(x, self.weights[0], self.biases["first"]))
        return torch.as_tensor(F.linear(hidden, self.weights[1], self.biases["last"]))


class Reused(nn.Module):
    """A model with a layer that is used twice, with checkpointed activations, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.twice = nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x))
        for _ in range(2):
            hidden = checkpoint(self.twice, hidden, use_reentrant=False)
        return torch.as_tensor(self.last(hidden))


class Counting(nn.Module):
    """A layer with statistics, updated in training only: rows (int64, see `PER_BATCH`), their sum (float32), flags
    (bool).

    The state dict does not contain the flags.
    """

    rows: torch.Tensor
    sums: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("rows", torch.tensor(0))
        self.register_buffer("sums", torch.zeros(CLASSES))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Before the update, so that the output depends on the statistics at the start of the call.
        out: torch.Tensor = self.layer(x) + self.sums.remainder(64) + self.rows.remainder(64)
        if self.training:
            with torch.no_grad():
                self.rows.add_(PER_BATCH + len(x))
                self.sums.add_(x[:, :CLASSES].sum(0))
                self.seen.logical_xor_(x[:, :2].sum(0) > 0)
        return out


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, _WIDE), nn.ReLU(), nn.Linear(_WIDE, CLASSES))


def _deep() -> nn.Module:
    """Build a model with many small parameters, which fill many buckets of DDP if the buckets are small."""
    return nn.Sequential(nn.Linear(FEATURES, 5), *(_Added(5) for _ in range(6)), nn.Linear(5, CLASSES))


class _Added(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.shift + self.scale


BUILDERS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "mlp": _mlp,
        "wide": _wide,
        "deep": _deep,
        "lenet": WholeLeNet,
        "residual": WholeResidual,
        "embedding": Embedded,
        "attention": Attention,
        "tied": Tied,
        "heads": Heads,
        "listed": Listed,
        "reused": Reused,
        "counting": Counting,
        "float64 inside": lambda: Mixed(torch.float64),
        "bfloat16 inside": lambda: Mixed(torch.bfloat16),
        "float16 inside": lambda: Mixed(torch.float16),
    }
)
"""The builder of each model, by name. `draw` sets the parameters afterwards."""
