"""Models whose outputs and gradients are whole numbers where parameters, inputs and targets are: no sum of them rounds.

Each maps (batch, 16) to (batch, 4). They are small: what they are for is that every order of summation, over devices
and ranks too, gives the same bits.
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

__all__ = ["BUILDERS", "CLASSES", "FEATURES", "PER_BATCH", "draw", "settle"]

FEATURES = 16
CLASSES = 4
_SIDE = 4
_WORDS = 12
_WIDE = 4200
"""Hidden units of "wide": its first weight has 67,200 elements, more than 64 Ki."""
PER_BATCH = (1 << 58) + 5
"""What "counting" adds to its count for each batch, beside the rows. Of such numbers float64 has the multiples of 64 only, and
the count, which begins from -3 to 3, is none after a batch of up to 50 rows."""


def draw(model: nn.Module, seed: int, most: int = 3) -> nn.Module:
    """Set each parameter and each buffer of `model` to whole numbers from -`most` to `most`; return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            drawn = torch.randint(-most, most + 1, value.shape, generator=generator)
            value.copy_(drawn > 0 if value.dtype == torch.bool else drawn)
    return model


def settle(model: nn.Module, most: int = 3) -> None:
    """Round each parameter to whole numbers, and wrap them to -`most` to `most`, so that the next step is exact, too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.remainder(parameter.round() + most, 2 * most + 1) - most)


def _words(x: torch.Tensor) -> torch.Tensor:
    """Turn whole numbers into words of the dictionary: any shape, int64."""
    return x.detach().abs().long() * 3 % _WORDS


class Mixed(nn.Module):
    """Two layers of float32, and one of another dtype beside the first of them, as in models that keep parts in other precision.

    In float64 the gradients of that one need more than the 24 bits that float32 has.
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


class LeNet(nn.Module):
    """Two convolutions with ReLU and a pooling that sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 6, 2)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x.view(len(x), 1, _SIDE, _SIDE)))
        pooled = F.avg_pool2d(F.relu(self.second(hidden)), 1, divisor_override=1)
        return torch.as_tensor(self.last(pooled.flatten(1)))


class Residual(nn.Module):
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
    """Linear attention over four tokens of four features: without softmax, which rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(_SIDE, 3, bias=False) for _ in range(3))
        self.last = nn.Linear(3, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(len(x), _SIDE, _SIDE)
        attended = self.queries(tokens) @ (self.keys(tokens).transpose(1, 2) @ self.values(tokens))
        return torch.as_tensor(self.last(attended.sum(1)))


class Tied(nn.Module):
    """A language model whose output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, 6)
        self.hidden = nn.Linear(6, 6)
        self.output = nn.Linear(6, CLASSES, bias=False)
        self.output.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.output(F.relu(self.hidden(self.words(_words(x) % CLASSES).sum(1)))))


class Heads(nn.Module):
    """A trunk with three heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 6)
        self.heads = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return torch.as_tensor(self.heads[head](F.relu(self.trunk(x))))


class Listed(nn.Module):
    """Weights in a list and biases in a dict, as models keep them that choose among their layers."""

    def __init__(self) -> None:
        super().__init__()
        widths = (FEATURES, 6, CLASSES)
        self.weights = nn.ParameterList(torch.zeros(after, before) for before, after in pairwise(widths))
        self.biases = nn.ParameterDict({"first": torch.zeros(6), "last": torch.zeros(CLASSES)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(F.linear(x, self.weights[0], self.biases["first"]))
        return torch.as_tensor(F.linear(hidden, self.weights[1], self.biases["last"]))


class Reused(nn.Module):
    """A layer that is used twice, its activations recomputed, and one that is never used."""

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
    """A layer with statistics, kept in training only: rows (int64, see `PER_BATCH`), their sum (float32), and flags (bool).

    State dicts leave the flags out.
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
        # Before they are counted: the output shows from which statistics the call began.
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
    """Build twelve layers that add to what they were given: many buckets, where these are small."""
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
        "lenet": LeNet,
        "residual": Residual,
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
"""What builds each model, by its name; parameters are drawn afterwards, by `draw`."""
