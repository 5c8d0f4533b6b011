"""List the activation functions that `layer_cases` calls in each floating dtype."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.operators import CALLS, Function

__all__ = ["ACTIVATIONS"]

ACTIVATIONS: tuple[tuple[str, Function], ...] = (
    ("sigmoid", lambda x: torch.sigmoid(x)),
    ("tanh", CALLS["tanh"]),
    ("exp", CALLS["exp"]),
    ("log", lambda x: torch.log(x.abs() + 1)),
    ("gelu", lambda x: F.gelu(x)),
    ("silu", lambda x: F.silu(x)),
    ("softplus", lambda x: F.softplus(x)),
    ("elu", lambda x: F.elu(x)),
    ("leaky_relu", lambda x: F.leaky_relu(x)),
    ("softmax", lambda x: F.softmax(x, dim=1)),
    ("softmax of a long row", lambda x: F.softmax(x.reshape(1, -1).repeat(1, 3), dim=1)),
    ("softmax of transposed", lambda x: F.softmax(x.t(), dim=1)),
    ("log_softmax", lambda x: F.log_softmax(x, dim=1)),
    ("dropout of an evaluation", lambda x: F.dropout(x, 0.5, training=False)),
    ("relu6", lambda x: F.relu6(4 * x)),
    ("hardtanh", lambda x: F.hardtanh(x, -0.75, 1.25)),
    ("hardsigmoid", lambda x: F.hardsigmoid(2 * x)),
    ("hardswish", lambda x: F.hardswish(2 * x)),
    ("hardshrink", lambda x: F.hardshrink(x, 0.75)),
    ("softshrink", lambda x: F.softshrink(x, 0.75)),
    ("threshold", lambda x: F.threshold(x, 0.25, -3.0)),
    ("mish", lambda x: F.mish(x)),
    ("selu", lambda x: F.selu(x)),
    ("celu", lambda x: F.celu(x, 0.75)),
    ("glu", lambda x: F.glu(x, dim=0)),
    ("logsigmoid", lambda x: F.logsigmoid(x)),
    ("softsign", lambda x: F.softsign(x)),
    ("softmin", lambda x: F.softmin(x, dim=0)),
    ("tanhshrink", lambda x: F.tanhshrink(x)),
    ("prelu", lambda x: F.prelu(x, x[0].abs())),
    ("rrelu of an evaluation", lambda x: F.rrelu(x, training=False)),
)
"""Functions of one matrix with elements in (-2, 2)."""
