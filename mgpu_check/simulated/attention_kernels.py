"""CUDA's attention kernels, written with operators that every device has.

They compute in float32, as the tensor cores accumulate, and round the results to the dtype of the operands. Backward
functions recompute the weights from the given logsumexp. So a caller may pass a logsumexp over more keys than the
operands have, as ring attention does. Results have the shapes, dtypes and strides of CUDA's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mgpu_check.simulated.tensor import raw

_HALF = (torch.float16, torch.bfloat16)
_FLASH_ROWS = 8  # the flash kernels load this many elements of a row at once
_LOGSUMEXP_ROWS = 32  # the memory-efficient kernels pad their logsumexp to a multiple of this many rows
_MASK_ROWS = 16  # and align the gradient of a mask to this many elements
_AT_ONCE = 1 << 20  # elements of a matrix of weights to compute at once: 4 MiB fit into caches

Optional = Tensor | None
Attended = tuple[Tensor, Tensor]


def _heads(t: Tensor, count: int) -> Tensor:
    """Return keys or values in float32, with each head repeated for the ``count`` query heads that share them."""
    wide = t.float()
    return wide if t.size(1) == count else wide.repeat_interleave(count // t.size(1), 1)


def _shared(gradient: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of the argument of `_heads`, given that of its result."""
    if gradient.size(1) == like.size(1):
        return gradient
    batch, _, rows, width = gradient.shape
    return gradient.view(batch, like.size(1), -1, rows, width).sum(2)


@dataclass(eq=False)
class _Weights:
    """The matrix of scores of one attention, computed one block of rows at a time."""

    query: Tensor
    key: Tensor
    bias: Optional
    scale: float
    causal: bool
    dropout: float
    seed: int

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor, Optional]]:
        """Yield rows, the columns that they see, their scores, and the factors of dropout for their weights."""
        batch, heads, rows, _ = self.query.shape
        columns = self.key.size(2)
        step = max(_AT_ONCE // max(batch * heads * columns, 1), 1)
        generator = None
        if self.dropout > 0:
            generator = torch.Generator(self.query.device).manual_seed(self.seed)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            block, seen = slice(start, stop), slice(0, min(stop, columns) if self.causal else columns)
            scores = (self.query[:, :, block].float() * self.scale) @ self.key[:, :, seen].mT
            if self.bias is not None:
                scores += (self.bias[:, :, block] if self.bias.size(2) > 1 else self.bias)[..., seen]
            if self.causal:  # aligned to the upper left, as torch has it
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + start)
                scores.masked_fill_(hidden, -math.inf)
            kept = None
            if generator is not None:
                drawn = torch.rand(scores.shape, generator=generator, device=scores.device)
                kept = (
                    (drawn >= self.dropout).float() / (1 - self.dropout) if self.dropout < 1 else scores.new_zeros(())
                )
            yield block, seen, scores, kept


def _attend(weights: _Weights, value: Tensor) -> Attended:
    """Return the attention and the logsumexp of each row of scores, in float32; 0 and inf for a row without keys."""
    outs, sums = [], []
    for _, seen, scores, kept in weights.blocks():
        largest = scores.amax(-1, keepdim=True)
        largest.masked_fill_(largest == -math.inf, 0.0)
        shares = scores.sub_(largest).exp_()
        total = shares.sum(-1, keepdim=True)
        empty = total == 0
        out = (shares if kept is None else shares.mul_(kept)) @ value[:, :, seen]
        outs.append(out.div_(total.masked_fill(empty, 1.0)))
        sums.append(total.log_().add_(largest).masked_fill_(empty, math.inf).squeeze(-1))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _gradients(
    weights: _Weights, value: Tensor, gradient: Tensor, out: Tensor, logsumexp: Tensor, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Optional]:
    """Return the gradients of query, key, value and, with ``of_bias``, of each score."""
    gradient, logsumexp = gradient.float(), logsumexp.float().unsqueeze(-1)
    mean = (gradient * out.float()).sum(-1, keepdim=True)
    of_queries, of_scores = [], []
    of_key, of_value = torch.zeros_like(weights.key), torch.zeros_like(value)
    for block, seen, scores, kept in weights.blocks():
        shares = scores.sub_(logsumexp[:, :, block]).exp_()
        of_shares = gradient[:, :, block] @ value[:, :, seen].mT
        of_value[:, :, seen] += (shares if kept is None else shares * kept).mT @ gradient[:, :, block]
        if kept is not None:
            of_shares.mul_(kept)
        moved = of_shares.sub_(mean[:, :, block]).mul_(shares)
        of_queries.append(moved @ weights.key[:, :, seen])
        of_key[:, :, seen] += moved.mT @ weights.query[:, :, block].float()
        if of_bias:
            of_scores.append(torch.nn.functional.pad(moved, (0, value.size(2) - seen.stop)))
    of_query = torch.cat(of_queries, 2).mul_(weights.scale)
    return of_query, of_key.mul_(weights.scale), of_value, torch.cat(of_scores, 2) if of_bias else None


def _seed(dropout: float, device: torch.device) -> int:
    """Draw the seed of a dropout from the generator of the device; without dropout return 0 and draw nothing."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)) if dropout > 0 else 0


def _scale_of(query: Tensor, scale: float | None) -> float:
    return query.size(-1) ** -0.5 if scale is None else scale


def _as_laid_out(like: Tensor, values: Tensor) -> Tensor:
    """Return values in the dtype of ``like``, with its order of dimensions in memory."""
    if like.shape == values.shape:
        return torch.empty_like(like).copy_(values)
    order = sorted(range(like.dim()), key=lambda i: like.stride(i) or math.inf, reverse=True)
    return torch.empty_permuted(values.shape, order, dtype=like.dtype, device=like.device).copy_(values)


def _rows_of_heads(like: Tensor, values: Tensor) -> Tensor:
    """Return values in the dtype of ``like``, with all heads of a position beside each other in memory."""
    return torch.empty_permuted(values.shape, (0, 2, 1, 3), dtype=like.dtype, device=like.device).copy_(values)


def _check_flash(query: Tensor, *others: Tensor) -> None:
    if query.dtype not in _HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(t.dtype != query.dtype for t in others):
        raise RuntimeError("query, key and value must have the same dtype")
    if query.size(-1) % _FLASH_ROWS:
        raise RuntimeError(
            "FlashAttention: head_size must be a multiple of 8; torch pads it before it calls this operator"
        )


def _check_dtype(name: str, known: tuple[torch.dtype, ...], query: Tensor, bias: Optional) -> None:
    if query.dtype not in known:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
        raise RuntimeError(f"{name} takes {names}, but got {str(query.dtype).removeprefix('torch.')}")
    if bias is not None and bias.dtype != query.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")


def _bare(*tensors: Optional) -> list[Tensor]:
    """Return the tensors on the backing device; None stays None, and only the caller's argument may be None."""
    return [None if t is None else raw(t) for t in tensors]  # type: ignore[misc]


def _causal_square(causal: bool, query: Tensor, key: Tensor) -> bool:
    if causal and query.size(2) != key.size(2):
        raise RuntimeError(
            "FlashAttention aligns its causal mask to the lower right, torch to the upper left: is_causal wants as "
            f"many queries as keys, but got {query.size(2)} and {key.size(2)}"
        )
    return causal


def _backward(
    operands: tuple[Tensor, Tensor, Tensor],
    bias: Optional,
    results: tuple[Tensor, Tensor, Tensor],
    dropout: float,
    seed: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, laid out as these are.

    Args:
        results: the gradient of the attention, the attention, and the logsumexp of each row.
        seed: seed of the dropout, as the forward function returned it.
    """
    query, key, value = operands
    heads, number = query.size(1), int(seed) if dropout > 0 else 0
    weights = _Weights(query, _heads(key, heads), bias, _scale_of(query, scale), causal, dropout, number)
    of_query, of_key, of_value, _ = _gradients(weights, _heads(value, heads), *results, False)
    return (
        _as_laid_out(query, of_query),
        _as_laid_out(key, _shared(of_key, key)),
        _as_laid_out(value, _shared(of_value, value)),
    )


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    query, key, value = _bare(query, key, value)
    _check_flash(query, key, value)
    if return_debug_mask:
        raise RuntimeError("return_debug_mask is not simulated: pass False")
    seed, heads, device = _seed(dropout_p, query.device), query.size(1), query.device
    causal = _causal_square(is_causal, query, key)
    weights = _Weights(query, _heads(key, heads), None, _scale_of(query, scale), causal, dropout_p, seed)
    out, logsumexp = _attend(weights, _heads(value, heads))
    return (
        _as_laid_out(query, out),
        logsumexp,
        None,
        None,
        query.size(2),
        key.size(2),
        torch.tensor([seed, 0], dtype=torch.int64, device=device).view(torch.uint64),
        torch.zeros((), dtype=torch.int64, device=device).view(torch.uint64),
        torch.empty(0, dtype=query.dtype, device=device),
    )


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Optional,
    cum_seq_k: Optional,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, key, value, out, logsumexp, state = _bare(grad_out, query, key, value, out, logsumexp, philox_seed)
    _check_flash(query, key, value)
    causal, seed = _causal_square(is_causal, query, key), state.view(torch.int64)[0]
    return _backward((query, key, value), None, (grad_out, out, logsumexp), dropout_p, seed, causal, scale)


def _scaled_dot_product_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Optional,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, bias = _bare(query, key, value, attn_bias)
    _check_dtype("memory-efficient attention", (*_HALF, torch.float32), query, bias)
    seed, heads, rows = _seed(dropout_p, query.device), query.size(1), query.size(2)
    weights = _Weights(query, _heads(key, heads), bias, _scale_of(query, scale), is_causal, dropout_p, seed)
    out, logsumexp = _attend(weights, _heads(value, heads))
    if compute_log_sumexp:  # the backward function ignores the padding
        logsumexp = torch.nn.functional.pad(logsumexp, (0, -rows % _LOGSUMEXP_ROWS), value=math.inf)
    else:
        logsumexp = logsumexp[..., :0].contiguous()
    return (
        _rows_of_heads(query, out),
        logsumexp,
        torch.tensor(seed, dtype=torch.int64, device=query.device),
        torch.zeros((), dtype=torch.int64, device=query.device),
    )


def _scaled_dot_product_efficient_attention_backward(
    grad_out_: Optional,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Optional,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Optional, Optional, Optional, Optional]:
    if grad_out_ is None:
        return None, None, None, None
    gradient, query, key, value, bias, out, logsumexp, seed = _bare(
        grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed
    )
    heads, rows = query.size(1), query.size(2)
    of_bias = bias is not None and bool(grad_input_mask[3])
    number = int(seed) if dropout_p > 0 else 0
    weights = _Weights(query, _heads(key, heads), bias, _scale_of(query, scale), is_causal, dropout_p, number)
    of_query, of_key, of_value, of_scores = _gradients(
        weights, _heads(value, heads), gradient, out, logsumexp[..., :rows], of_bias
    )
    return (
        _rows_of_heads(query, of_query),
        _rows_of_heads(key, _shared(of_key, key)),
        _rows_of_heads(value, _shared(of_value, value)),
        None if of_scores is None else _of_bias(bias, of_scores),
    )


def _of_bias(bias: Tensor, of_scores: Tensor) -> Tensor:
    columns = bias.size(-1)
    padded = torch.zeros((*bias.shape[:-1], columns + -columns % _MASK_ROWS), dtype=bias.dtype, device=bias.device)
    return padded[..., :columns].copy_(of_scores.sum_to_size(bias.shape))


def _scaled_dot_product_cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Optional,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, None]:
    query, key, value, bias = _bare(query, key, value, attn_bias)
    _check_dtype("cuDNN attention", _HALF, query, bias)
    seed, heads = _seed(dropout_p, query.device), query.size(1)
    bias = None if bias is None else bias[(None,) * (4 - bias.dim())]
    weights = _Weights(query, _heads(key, heads), bias, _scale_of(query, scale), is_causal, dropout_p, seed)
    out, logsumexp = _attend(weights, _heads(value, heads))
    return (
        _as_laid_out(query, out),
        logsumexp.unsqueeze(-1) if compute_log_sumexp else logsumexp.new_empty(0),
        None,
        None,
        query.size(2),
        key.size(2),
        torch.tensor(seed, dtype=torch.int64, device=query.device),
        torch.zeros((), dtype=torch.int64, device=query.device),
        None,
    )


def _scaled_dot_product_cudnn_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Optional,
    cum_seq_q: Optional,
    cum_seq_k: Optional,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, key, value, out, logsumexp, seed, bias = _bare(
        grad_out, query, key, value, out, logsumexp, philox_seed, attn_bias
    )
    bias = None if bias is None else bias[(None,) * (4 - bias.dim())]
    results = grad_out, out, logsumexp.squeeze(-1)
    return _backward((query, key, value), bias, results, dropout_p, seed, is_causal, scale)


ATTENTION_KERNELS: dict[str, Callable[..., object]] = {
    f"aten::{kernel.__name__}": kernel
    for kernel in (
        _scaled_dot_product_flash_attention,
        _scaled_dot_product_flash_attention_backward,
        _scaled_dot_product_efficient_attention,
        _scaled_dot_product_efficient_attention_backward,
        _scaled_dot_product_cudnn_attention,
        _scaled_dot_product_cudnn_attention_backward,
    )
}
