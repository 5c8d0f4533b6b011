"""A causal transformer: attention, layer norm, embedding, GELU."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

_DROPOUT = 0.1


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        mixed = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self._dropped(self.projection(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self._dropped(self.down(F.gelu(self.up(self.norm2(x)))))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class Transformer(nn.Module):
    """Predict the next token: int64 (batch, length) -> logits (batch, length, vocabulary).

    Args:
        tied: whether the output layer shares the weights of the embedding.
        dropout: whether to drop a tenth of the output of each half of a block.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        width: int,
        heads: int,
        layers: int,
        tied: bool = False,
        dropout: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(length, width).normal_(std=0.02))
        self.blocks = nn.ModuleList(_TransformerBlock(width, heads, _DROPOUT * dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
