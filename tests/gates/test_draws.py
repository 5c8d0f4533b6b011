"""The operators that draw random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.gates.run.draws import Notes

X = torch.ones(1, 2, 4, 8)
ATTENTION = nn.MultiheadAttention(8, 2, batch_first=True)


@pytest.mark.parametrize(
    ("call", "draws"),
    [
        (lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.0, is_causal=True), False),
        (lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5), True),
        (lambda: F.dropout(X, 0.5), True),
        (lambda: F.dropout(X, 0.0), False),
        (lambda: F.dropout(X, 0.5, training=False), False),
        (lambda: F.rrelu(X, training=True), True),
        (lambda: F.rrelu(X), False),
        (lambda: ATTENTION(X[0], X[0], X[0]), False),
        (lambda: torch.rand(3), True),
        (lambda: torch.empty(3).bernoulli_(0.5), True),
        (lambda: X @ X.mT, False),
    ],
)
def test_dropout_with_a_probability_of_0_draws_nothing(call, draws):
    with Notes() as notes:
        call()
    assert bool(notes.drawn) is draws
