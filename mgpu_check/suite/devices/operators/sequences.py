"""List attention, embeddings and recurrent layers that `layer_cases` calls."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from mgpu_check.suite.common.operators import Function
from mgpu_check.suite.common.values import shaped

_COLUMNS = 16


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return indices of rows, each of them twice, not in order."""
    return torch.arange(2 * len(x), device=x.device) * 5 % len(x)


def attention(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attend from all but the last query to all keys."""
    queries, keys, values = x.unbind()
    count = max(1, queries.shape[-2] - 1)
    return F.scaled_dot_product_attention(queries[..., :count, :], keys, values, **options)


def _masks(x: torch.Tensor) -> torch.Tensor:
    """Return a mask for each of two samples: one key for the first, the other for the second."""
    return torch.eye(2, dtype=torch.bool, device=x.device).view(2, 1, 1, 2)


SEQUENCES: tuple[tuple[str, Function], ...] = (
    ("attention", lambda x: F.scaled_dot_product_attention(*x.view(3, 1, 4, _COLUMNS).unbind())),
    ("causal attention to more keys", lambda x: attention(x.view(3, 1, 4, _COLUMNS), is_causal=True)),
    ("attention with a mask for each", lambda x: attention(x.view(3, 2, 1, 2, _COLUMNS), attn_mask=_masks(x))),
    ("embedding with padding", lambda x: F.embedding(_words(x), x, padding_idx=5)),
    ("embedding_bag, sums", lambda x: F.embedding_bag(_words(x).view(8, 3), x, mode="sum")),
    (
        "embedding_bag, weighted sums",
        lambda x: F.embedding_bag(
            _words(x).view(8, 3), x, mode="sum", per_sample_weights=x.reshape(-1)[:24].view(8, 3)
        ),
    ),
    (
        "embedding_bag, means of bags of unequal sizes",
        lambda x: F.embedding_bag(_words(x), x, torch.tensor([0, 5, 5, 11], device=x.device), mode="mean"),
    ),
    ("embedding_bag, maxima", lambda x: F.embedding_bag(_words(x).view(8, 3), x, mode="max")),
)
"""Functions of one matrix of 16 columns with elements in (-2, 2)."""


def with_weights(build: Any, *args: Any, **options: Any) -> Function:
    """Return a function that makes from a matrix a layer's weights, and its input of three sequences of four steps."""

    def call(x: torch.Tensor) -> torch.Tensor:
        layer = build(*args, **options, device="meta")
        # cuDNN has gradients of recurrent networks only in training mode. In that mode other layers drop out elements.
        layer.train(isinstance(layer, nn.RNNBase) and x.requires_grad)
        steps = x.view(3, 4, _COLUMNS)[..., :4]
        result = _called(layer, x, (steps, steps, steps) if build is nn.MultiheadAttention else (steps,))
        whole: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return whole

    return call


def _called(layer: nn.Module, x: torch.Tensor, inputs: tuple[Any, ...]) -> Any:
    """Call a layer on the meta device with weights taken from a matrix."""
    flat = x.reshape(-1) / 4
    weights = {
        name: shaped(flat.roll(number), *parameter.shape)
        for number, (name, parameter) in enumerate(layer.named_parameters())
    }
    with warnings.catch_warnings():
        # The weights are not contiguous, so cuDNN copies them at each call and warns.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        return torch.func.functional_call(layer, weights, inputs)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Run a GRU on three sequences of unequal lengths that are packed on the CPU and moved to the device."""
    layer = nn.GRU(4, 3, batch_first=True, device="meta")
    # The permutation that sorts these lengths is not its own inverse.
    lengths = torch.tensor([2, 4, 3], device="cpu")
    # Any: the annotation of `PackedSequence.to` takes no device.
    steps: Any = rnn.pack_padded_sequence(x.view(3, 4, _COLUMNS)[..., :4].cpu(), lengths, True, enforce_sorted=False)
    outputs, last = _called(layer, x, (steps.to(x.device),))
    return torch.cat([last[0], rnn.pad_packed_sequence(outputs, batch_first=True)[0].flatten(1)], dim=1)


RECURRENT: tuple[tuple[str, Function], ...] = (
    ("RNN", with_weights(nn.RNN, 4, 4, batch_first=True)),
    ("GRU of two layers", with_weights(nn.GRU, 4, 3, num_layers=2, batch_first=True)),
    ("LSTM in both directions", with_weights(nn.LSTM, 4, 3, bidirectional=True)),
    ("GRU of packed sequences", _packed),
    ("MultiheadAttention", with_weights(nn.MultiheadAttention, 4, 2, batch_first=True)),
    ("TransformerEncoderLayer", with_weights(nn.TransformerEncoderLayer, 4, 2, 8, batch_first=True)),
    (
        "TransformerEncoderLayer, norm first",
        with_weights(nn.TransformerEncoderLayer, 4, 2, 8, norm_first=True, activation="gelu"),
    ),
)
"""Functions of one matrix of 12 rows and 16 columns that round in many successive steps."""
