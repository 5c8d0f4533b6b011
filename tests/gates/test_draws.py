"""Operators that draw random numbers are known, and in float64 they draw those of float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from mgpu_check.gates.run.draws import DrawsOfFloat32, Notes
from mgpu_check.torch_hooks.patches import entered

aten = torch.ops.aten
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randn": lambda x: torch.randn(50, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "normal_": lambda x: x.clone().normal_(1, 2),
    "random_": lambda x: x.clone().random_(),
    "bernoulli_ of a tensor": lambda x: x.clone().bernoulli_(x / 2),
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "multinomial": lambda x: torch.multinomial(x, 7),
    "poisson": torch.poisson,
    "binomial": lambda x: torch.binomial((8 * x).round(), x / 2),
    "gamma": torch._standard_gamma,
    "dropout": lambda x: functional.dropout(x, 0.3),
    # by which GPUs do it
    "native_dropout": lambda x: aten.native_dropout(x, 0.3, True)[0],
    "native_dropout of all": lambda x: aten.native_dropout(x, 1.0, True)[0],
    "attention": lambda x: functional.scaled_dot_product_attention(
        *(x.view(1, 5, 10), x.view(1, 5, 10), x.view(1, 5, 10)), dropout_p=0.3
    ),
    "rrelu": lambda x: functional.rrelu(x - 0.5, training=True),
    "rrelu in place": lambda x: functional.rrelu(x - 0.5, training=True, inplace=True),
}


@pytest.mark.parametrize("what", DRAWS)
def test_float64_has_the_numbers_of_float32(what):
    x = torch.linspace(0.1, 0.9, 50)
    torch.manual_seed(3)
    with Notes() as narrow:
        expected = DRAWS[what](x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    notes = Notes()
    with entered(DrawsOfFloat32(), notes):
        found = DRAWS[what](x.double())
    assert torch.equal(torch.get_rng_state(), state)
    assert found.dtype == (torch.float64 if expected.is_floating_point() else expected.dtype)
    assert torch.allclose(found.double(), expected.double(), rtol=1e-6)
    assert notes.drew == narrow.drew != []


def test_gradients_are_those_of_the_same_mask():
    x = torch.linspace(0.1, 0.9, 50, dtype=torch.float64, requires_grad=True)
    with DrawsOfFloat32():
        out = aten.native_dropout(x, 0.5, True)[0]
        out.sum().backward()
    assert torch.equal(out.detach(), x.detach() * x.grad) and set(x.grad.tolist()) == {0.0, 2.0}


def test_recurrent_networks_of_one_operator_are_noticed():
    with Notes() as notes, torch.no_grad():
        torch.nn.LSTM(2, 3)(torch.ones(4, 1, 2))
    assert notes.fused
    with Notes() as notes:
        torch.nn.LSTMCell(2, 3)(torch.ones(1, 2))
    assert not notes.fused


X = torch.ones(1, 2, 4, 8)
ATTENTION = nn.MultiheadAttention(8, 2, batch_first=True)


@pytest.mark.parametrize(
    ("call", "draws"),
    [
        (lambda: functional.scaled_dot_product_attention(X, X, X, dropout_p=0.0, is_causal=True), False),
        (lambda: functional.scaled_dot_product_attention(X, X, X, dropout_p=0.5), True),
        (lambda: functional.dropout(X, 0.5), True),
        (lambda: functional.dropout(X, 0.0), False),
        (lambda: functional.dropout(X, 0.5, training=False), False),
        (lambda: functional.rrelu(X, training=True), True),
        (lambda: functional.rrelu(X), False),
        (lambda: ATTENTION(X[0], X[0], X[0]), False),
        (lambda: X @ X.mT, False),
    ],
)
def test_dropout_with_a_probability_of_0_draws_nothing(call, draws):
    with Notes() as notes:
        call()
    assert bool(notes.drawn) is draws
