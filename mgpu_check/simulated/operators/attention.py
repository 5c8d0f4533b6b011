"""``scaled_dot_product_attention`` on simulated devices: choose the kernel that CUDA would use on a device of compute
capability 9.0, dispatch to its operator, and compute it with operators that every device has.

C++ would choose by the backing device. So this module chooses the operator, and does the work of C++ around it,
above autograd: the operators have CUDA's backward functions, DTensor's strategies and ring attention's handlers.

The conditions of the choice come from ``sdp_utils.cpp`` of torch 2.11 and later, for dense operands, in the same
order. Each returns torch's reason why its kernel cannot be used, or None.

The kernels compute in float32, as the tensor cores accumulate, and round the results to the dtype of the operands.
Backward functions recompute the weights from the given logsumexp. So a caller may pass a logsumexp over more keys
than the operands have, as ring attention does. Results have the shapes, dtypes and strides of CUDA's kernels.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mgpu_check.simulated.node import active_node
from mgpu_check.simulated.operators.arithmetic import product, rounded_weights
from mgpu_check.simulated.tensor import SimulatedTensor, raw
from mgpu_check.torch_hooks.patches import Patches

SINCE_2_14 = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 14)
"""Since torch 2.14 all kernels accept one head of keys and values for all queries, and unbatched operands."""

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # of the flash kernels, and of cuDNN's on this device
_SIXTEENTHS = 16  # cuDNN rounds the probability of dropout to multiples of 1/16

Params = torch.backends.cuda.SDPAParams
Condition = Callable[[Params], str | None]


def on_device(t: Any) -> bool:
    """Return whether ``t``, or the tensor that it wraps (as a DTensor does), is on a simulated device."""
    return isinstance(t, SimulatedTensor) or (is_traceable_wrapper_subclass(t) and bool(t.is_cuda))  # type: ignore[attr-defined]


def _tensors(params: Params) -> tuple[Tensor, Tensor, Tensor]:
    return params.query, params.key, params.value


def _four_dimensional(params: Params) -> str | None:
    query, key, value = (t.dim() for t in _tensors(params))
    if query == key == value == 4:
        return None
    return (
        "All fused kernels requires query, key and value to be 4 dimensional, but got Query dim: "
        f"{query}, Key dim: {key}, Value dim: {value} instead."
    )


def _on_cuda(params: Params) -> str | None:
    if all(map(on_device, _tensors(params))):
        return None
    query, key, value = (t.device for t in _tensors(params))
    return (
        f"All tensors need to be on cuda device. Got query on device: {query}, key on device: {key}, value on device: "
        f"{value}"
    )


def _dtype_in(*allowed: torch.dtype) -> Condition:
    """Return the condition that the three operands have the same dtype, one of ``allowed``."""

    def condition(params: Params) -> str | None:
        dtypes = [t.dtype for t in _tensors(params)]
        if dtypes[0] in allowed and len(set(dtypes)) == 1:
            return None
        allowed_names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        query, key, value = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return (
            f"Expected query, key and value to all be of dtype: {{{allowed_names}}}. Got Query dtype: {query}, Key "
            f"dtype: {key}, and Value dtype: {value} instead."
        )

    return condition


def _heads(gqa: bool, same_keys_and_values: bool) -> Condition:
    """Return the condition on batch sizes and numbers of heads.

    `gqa`: whether the kernel supports groups of query heads that share a head of keys and values.
    `same_keys_and_values`: whether it requires as many heads of values as of keys.
    """

    def condition(params: Params) -> str | None:
        shapes = "Query.sizes(): {}, Key sizes: {}, Value sizes: {} instead.".format(
            *(list(t.shape) for t in _tensors(params))
        )
        if len({t.size(0) for t in _tensors(params)}) > 1:
            return (
                "For dense inputs, both fused kernels require query, key and value to have the same batch_size. "
                + shapes
            )
        query, key, value = (t.size(-3) for t in _tensors(params))
        if not params.enable_gqa or not gqa:
            if query == key == value or (SINCE_2_14 and key == value == 1):
                return None
            return (
                "For dense input, both fused kernels require query, key and value to have the same num_heads. " + shapes
            )
        if same_keys_and_values and key != value:
            return (
                "Both fused kernels require key and value to have the same num_heads and batch_size but got: " + shapes
            )
        if not key or not value or query % key or query % value:
            return "The number of heads in key/value must divide number of heads in query." + shapes
        return None

    return condition


def _not_empty(params: Params) -> str | None:
    # torch checks only the lengths of sequences. CUDA refuses an empty batch too: a launch without blocks.
    if all(t.numel() for t in _tensors(params)):
        return None
    return "All fused kernels do not support zero seq_len_q or seq_len_kv."


def _last_stride_1(ignore_single: bool) -> Condition:
    """Return the condition that rows are contiguous; `ignore_single` exempts operands with rows of one element."""

    def condition(params: Params) -> str | None:
        rows = all(t.stride(-1) == 1 for t in _tensors(params))
        rows |= ignore_single and params.query.size(-1) == 1
        mask = params.attn_mask
        if rows and (mask is None or mask.stride(-1) == 1):
            return None
        strides = ", ".join(f"{t.stride(-1)}" for t in (*_tensors(params), *([] if mask is None else [mask])))
        return f"All fused kernels require the last dimension of the input to have stride 1. Got {strides}"

    return condition


def _enabled(is_enabled: Callable[[], bool], name: str) -> Condition:
    return lambda params: None if is_enabled() else f"{name} has been runtime disabled."


def _no_mask(params: Params) -> str | None:
    return None if params.attn_mask is None else "Flash Attention does not support non-null attn_mask."


def _flash_head(params: Params) -> str | None:
    sizes = [t.size(-1) for t in _tensors(params)]
    if len(set(sizes)) == 1 and sizes[0] <= _LARGEST_HEAD:
        return None
    return (
        "Flash attention requires q,k,v to have the same last dimension and to be less than or equal to 256. Got "
        "Query.size(-1): {}, Key.size(-1): {}, Value.size(-1): {} instead.".format(*sizes)
    )


def _square_if_causal(params: Params) -> str | None:
    # FlashAttention 2 aligns its causal mask to the lower right (Dao-AILab/flash-attention#517), torch to the upper
    # left (pytorch/pytorch#108108): they agree on squares.
    query, key = params.query.size(-2), params.key.size(-2)
    if not params.is_causal or query == key:
        return None
    return (
        f"Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. Got seqlen_q: {query} "
        f"seqlen_k: {key}. If you would like to use causal attention with non-square masks, please see CausalAttnMask."
    )


def _efficient_head(params: Params) -> str | None:
    # The tensor cores load 128 bits at once: 8 half-precision numbers, or 4 of float32.
    aligned = 8 if params.query.dtype in _HALF else 4
    query, key, value = (t.size(-1) for t in _tensors(params))
    if query == key and all(size > 0 and size % aligned == 0 for size in (query, value)):
        return None
    return (
        f"Mem efficient attention requires last dimension of inputs to be divisible by {aligned}. "
        f"Got Query.size(-1): {query}, Key.size(-1): {key}, Value.size(-1): {value} instead."
    )


def _aligned(params: Params) -> str | None:
    # CUDA's allocations are aligned, so only the offset can be unaligned.
    if not SINCE_2_14 or all(t.storage_offset() * t.element_size() % 16 == 0 for t in _tensors(params)):
        return None
    return (
        "Mem efficient attention on sm80 or newer requires q, k, and v storage offsets * element_size to be aligned "
        "to 16 bytes."
    )


def _may_vary(params: Params) -> str | None:
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return "cuDNN SDPA is not deterministic." if strict else None


def _cudnn_mask(params: Params) -> str | None:
    mask = params.attn_mask
    if mask is None:
        return None
    batch, heads, rows, _ = params.query.shape
    wanted = (batch, heads, rows, params.key.size(2))
    fits = mask.dim() in (2, 4) and all(
        have in (1, want) for have, want in zip(mask.shape, wanted[-mask.dim() :], strict=True)
    )
    if fits and not mask.requires_grad:
        return None
    return (
        "Please use the following attn mask shapes: 2d - ({Q_seq_len, 1}  x {KV_seq_len, 1}); "
        "4d - ({Batch, 1} x {Num_heads, 1} x {Q_seq_len, 1}  x {KV_seq_len, 1})"
    )


def _cudnn_dropout(params: Params) -> str | None:
    if (params.dropout * _SIXTEENTHS).is_integer():
        return None
    return (
        "cuDNN dropout probability resolution is limited to 1/16."
        "Use a dropout probability that is a multiple of 1/16 to select the cuDNN backend"
    )


def _cudnn_shapes(params: Params) -> str | None:
    sizes = params.query.size(-1), params.value.size(-1)
    if params.query.size(-1) != params.key.size(-1) or max(sizes) > _LARGEST_HEAD:
        return f"head_dim should be no more than {_LARGEST_HEAD}"
    if any(size == 0 or size % 8 for size in sizes):
        return "head_dim should be a multiple of 8"
    if params.key.size(-2) == 1:
        return "cudnn SDPA does not support key/value sequence length 1."
    if params.dropout and params.query.size(-2) == 1:
        return "cudnn SDPA does not support query sequence length 1 with dropout."
    return None


_FLASH: tuple[Condition, ...] = (
    _enabled(torch._C._get_flash_sdp_enabled, "Flash attention"),
    *(_on_cuda, _four_dimensional, _no_mask, _flash_head, _square_if_causal, _dtype_in(*_HALF)),
    *(_heads(gqa=True, same_keys_and_values=True), _not_empty, _last_stride_1(ignore_single=True)),
)
_EFFICIENT: tuple[Condition, ...] = (
    _enabled(torch._C._get_mem_efficient_sdp_enabled, "Memory Efficient attention"),
    *(_on_cuda, _four_dimensional, _efficient_head, _aligned, _not_empty, _last_stride_1(ignore_single=False)),
    *(_heads(gqa=SINCE_2_14, same_keys_and_values=True), _dtype_in(torch.float16, torch.float32, torch.bfloat16)),
)
_CUDNN: tuple[Condition, ...] = (
    _enabled(torch._C._get_cudnn_sdp_enabled, "cuDNN attention"),
    *(_on_cuda, _four_dimensional, _may_vary, _dtype_in(*_HALF), _cudnn_mask, _cudnn_dropout, _not_empty),
    *(_last_stride_1(ignore_single=True), _heads(gqa=True, same_keys_and_values=False), _cudnn_shapes),
)


def _asks(conditions: tuple[Condition, ...]) -> Callable[..., bool]:
    """Return a function that checks all conditions; with ``debug`` it warns about the first that fails."""

    def usable(params: Params, debug: bool = False) -> bool:
        for condition in conditions:
            if reason := condition(params):
                if debug:
                    warnings.warn(reason, UserWarning, stacklevel=3)
                return False
        return True

    return usable


_USABLE = {
    SDPBackend.EFFICIENT_ATTENTION: ("Memory efficient", _asks(_EFFICIENT)),
    SDPBackend.FLASH_ATTENTION: ("Flash attention", _asks(_FLASH)),
    SDPBackend.CUDNN_ATTENTION: ("cuDNN attention", _asks(_CUDNN)),
}


def chosen_kernel(params: Params) -> SDPBackend:
    """Return the first kernel, in torch's order of preference, that is enabled and accepts the operands."""
    for number in torch._C._get_sdp_priority_order():
        backend = SDPBackend(number)
        if backend in _USABLE:
            if _USABLE[backend][1](params):
                return backend
        elif backend == SDPBackend.MATH and torch._C._get_math_sdp_enabled():
            return backend
    for name, usable in _USABLE.values():
        warnings.warn(f"{name} kernel not used because:", UserWarning, stacklevel=4)
        usable(params, True)
    raise RuntimeError("No available kernel. Aborting execution.")


def choice_functions() -> dict[str, object]:
    return {
        "_can_use_flash_attention": _USABLE[SDPBackend.FLASH_ATTENTION][1],
        "_can_use_mem_efficient_attention": _USABLE[SDPBackend.EFFICIENT_ATTENTION][1],
        "_can_use_cudnn_attention": _USABLE[SDPBackend.CUDNN_ATTENTION][1],
        "_is_flash_attention_available": lambda: True,
    }


_FLASH_ROWS = 8  # the flash kernels load this many elements of a row at once
_LOGSUMEXP_ROWS = 32  # the memory-efficient kernels pad their logsumexp to a multiple of this many rows
_MASK_ROWS = 16  # and align the gradient of a mask to this many elements
_AT_ONCE = 1 << 20  # elements of a matrix of weights to compute at once: 4 MiB fit into caches

_aten = torch.ops.aten
Optional = Tensor | None
Attended = tuple[Tensor, Tensor]
Tensors = tuple[Tensor, Tensor, Tensor]


def _repeated_heads(t: Tensor, count: int) -> Tensor:
    """Return keys or values in float32, with each head repeated for the ``count`` query heads that share them."""
    wide = t.float()
    return wide if t.size(1) == count else wide.repeat_interleave(count // t.size(1), 1)


def _shared(gradient: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of the argument of `_repeated_heads`, given that of its result."""
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
            block, visible = slice(start, stop), slice(0, min(stop, columns) if self.causal else columns)
            scores = product(self.query[:, :, block].float() * self.scale, self.key[:, :, visible].mT)
            if self.bias is not None:
                scores += (self.bias[:, :, block] if self.bias.size(2) > 1 else self.bias)[..., visible]
            if self.causal:  # aligned to the upper left, as torch has it
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + start)
                scores.masked_fill_(hidden, -math.inf)
            kept = None
            if generator is not None:
                drawn = torch.rand(scores.shape, generator=generator, device=scores.device)
                kept = (
                    (drawn >= self.dropout).float() / (1 - self.dropout) if self.dropout < 1 else scores.new_zeros(())
                )
            yield block, visible, scores, kept


def _attend(weights: _Weights, value: Tensor) -> Attended:
    """Return the attention and the logsumexp of each row of scores, in float32; 0 and inf for a row without keys."""
    outs, sums = [], []
    for _, visible, scores, kept in weights.blocks():
        largest = scores.amax(-1, keepdim=True)
        largest.masked_fill_(largest == -math.inf, 0.0)
        shares = scores.sub_(largest).exp_()
        total = shares.sum(-1, keepdim=True)
        empty = total == 0
        shares = rounded_weights(shares, weights.query.dtype)
        out = product(shares if kept is None else shares.mul_(kept), value[:, :, visible])
        outs.append(out.div_(total.masked_fill(empty, 1.0)))
        sums.append(total.log_().add_(largest).masked_fill_(empty, math.inf).squeeze(-1))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _gradients(
    weights: _Weights, value: Tensor, gradient: Tensor, out: Tensor, logsumexp: Tensor, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Optional]:
    gradient, logsumexp = gradient.float(), logsumexp.float().unsqueeze(-1)
    mean = (gradient * out.float()).sum(-1, keepdim=True)
    of_queries, of_scores = [], []
    of_key, of_value = torch.zeros_like(weights.key), torch.zeros_like(value)
    for block, visible, scores, kept in weights.blocks():
        shares = scores.sub_(logsumexp[:, :, block]).exp_()
        of_shares = product(gradient[:, :, block], value[:, :, visible].mT)
        of_value[:, :, visible] += product((shares if kept is None else shares * kept).mT, gradient[:, :, block])
        if kept is not None:
            of_shares.mul_(kept)
        moved = of_shares.sub_(mean[:, :, block]).mul_(shares)
        of_queries.append(product(moved, weights.key[:, :, visible]))
        of_key[:, :, visible] += product(moved.mT, weights.query[:, :, block].float())
        if of_bias:
            of_scores.append(F.pad(moved, (0, value.size(2) - visible.stop)))
    of_query = torch.cat(of_queries, 2).mul_(weights.scale)
    return of_query, of_key.mul_(weights.scale), of_value, torch.cat(of_scores, 2) if of_bias else None


def _seed(dropout: float, device: torch.device) -> int:
    """Draw the seed of a dropout from the generator of the device; without dropout return 0 and draw nothing."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)) if dropout > 0 else 0


def _as_laid_out(like: Tensor, values: Tensor) -> Tensor:
    """Return values in the dtype of ``like``, with its order of dimensions in memory."""
    if like.shape == values.shape:
        return torch.empty_like(like).copy_(values)
    order = sorted(range(like.dim()), key=lambda i: like.stride(i) or math.inf, reverse=True)
    return torch.empty_permuted(values.shape, order, dtype=like.dtype, device=like.device).copy_(values)


def _rows_of_heads(like: Tensor, values: Tensor) -> Tensor:
    """Return values in the dtype of ``like``, with all heads of a position beside each other in memory."""
    return torch.empty_permuted(values.shape, (0, 2, 1, 3), dtype=like.dtype, device=like.device).copy_(values)


def _check_flash(call: SimpleNamespace) -> None:
    query, key, value = call.operands
    if query.dtype not in _HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    if query.size(-1) % _FLASH_ROWS:
        raise RuntimeError(
            "FlashAttention: head_size must be a multiple of 8; torch pads it before it calls this operator"
        )
    if call.is_causal and query.size(2) != key.size(2):
        raise RuntimeError(
            "FlashAttention aligns its causal mask to the lower right, torch to the upper left: is_causal wants as "
            f"many queries as keys, but got {query.size(2)} and {key.size(2)}"
        )


def _check_dtype(name: str, allowed: tuple[torch.dtype, ...], query: Tensor, bias: Optional) -> None:
    if query.dtype not in allowed:
        allowed_names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise RuntimeError(f"{name} takes {allowed_names}, but got {str(query.dtype).removeprefix('torch.')}")
    if bias is not None and bias.dtype != query.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")


def _weights(call: SimpleNamespace, bias: Optional, seed: int) -> _Weights:
    query, key, _ = call.operands
    scale = query.size(-1) ** -0.5 if call.scale is None else call.scale
    return _Weights(query, _repeated_heads(key, query.size(1)), bias, scale, call.is_causal, call.dropout_p, seed)


def _forward(call: SimpleNamespace, bias: Optional = None) -> tuple[Tensor, Tensor, int]:
    query, _, value = call.operands
    seed = _seed(call.dropout_p, query.device)
    return *_attend(_weights(call, bias, seed), _repeated_heads(value, query.size(1))), seed


def _backward(
    call: SimpleNamespace,
    bias: Optional,
    results: Tensors,
    seed: Tensor,
    laid_out: Callable[[Tensor, Tensor], Tensor] = _as_laid_out,
    of_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Optional]:
    """Return the gradients of query, key and value, laid out like these, and with `of_bias` of each score.

    `results`: the gradient of the attention, the attention, and the logsumexp of each row. `seed`: seed of the dropout,
    as the forward function returned it.
    """
    query, key, value = call.operands
    weights = _weights(call, bias, int(seed) if call.dropout_p > 0 else 0)
    of_query, of_key, of_value, of_scores = _gradients(
        weights, _repeated_heads(value, query.size(1)), *results, of_bias
    )
    of_key, of_value = _shared(of_key, key), _shared(of_value, value)
    return laid_out(query, of_query), laid_out(key, of_key), laid_out(value, of_value), of_scores


def _on_arguments(kernel: Callable[[SimpleNamespace], object]) -> Callable[..., object]:
    """Make a kernel of a function that takes the arguments by the names of torch's schema, on the backing device."""
    schema = getattr(_aten, kernel.__name__).default._schema

    @functools.wraps(kernel)
    def run(*args: object, **kwargs: object) -> object:
        values = {
            argument.name: args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            for i, argument in enumerate(schema.arguments)
        }
        bare = {name: raw(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        return kernel(SimpleNamespace(**bare, operands=(bare["query"], bare["key"], bare["value"])))

    return run


def _scaled_dot_product_flash_attention(call: SimpleNamespace) -> tuple[object, ...]:
    query, key, _ = call.operands
    _check_flash(call)
    if call.return_debug_mask:
        raise RuntimeError("return_debug_mask is not simulated: pass False")
    out, logsumexp, seed = _forward(call)
    return (
        _as_laid_out(query, out),
        logsumexp,
        None,
        None,
        query.size(2),
        key.size(2),
        torch.tensor([seed, 0], dtype=torch.int64, device=query.device).view(torch.uint64),
        torch.zeros((), dtype=torch.int64, device=query.device).view(torch.uint64),
        torch.empty(0, dtype=query.dtype, device=query.device),
    )


def _scaled_dot_product_flash_attention_backward(call: SimpleNamespace) -> tuple[Tensor, ...]:
    _check_flash(call)
    results = call.grad_out, call.out, call.logsumexp
    return _backward(call, None, results, call.philox_seed.view(torch.int64)[0])[:3]


def _scaled_dot_product_efficient_attention(call: SimpleNamespace) -> tuple[Tensor, ...]:
    query, bias = call.query, call.attn_bias
    _check_dtype("memory-efficient attention", (*_HALF, torch.float32), query, bias)
    out, logsumexp, seed = _forward(call, bias)
    if call.compute_log_sumexp:  # the backward function ignores the padding
        logsumexp = F.pad(logsumexp, (0, -query.size(2) % _LOGSUMEXP_ROWS), value=math.inf)
    else:
        logsumexp = logsumexp[..., :0].contiguous()
    return (
        _rows_of_heads(query, out),
        logsumexp,
        torch.tensor(seed, dtype=torch.int64, device=query.device),
        torch.zeros((), dtype=torch.int64, device=query.device),
    )


def _scaled_dot_product_efficient_attention_backward(call: SimpleNamespace) -> tuple[Optional, ...]:
    if call.grad_out_ is None:
        return None, None, None, None
    bias = call.attn_bias
    results = call.grad_out_, call.out, call.logsumexp[..., : call.query.size(2)]
    of_bias = bias is not None and bool(call.grad_input_mask[3])
    *gradients, of_scores = _backward(call, bias, results, call.philox_seed, _rows_of_heads, of_bias)
    return *gradients, None if of_scores is None else _of_bias(bias, of_scores)


def _of_bias(bias: Tensor, of_scores: Tensor) -> Tensor:
    columns = bias.size(-1)
    padded = torch.zeros((*bias.shape[:-1], columns + -columns % _MASK_ROWS), dtype=bias.dtype, device=bias.device)
    return padded[..., :columns].copy_(of_scores.sum_to_size(bias.shape))


def _four_dimensional_bias(bias: Optional) -> Optional:
    return None if bias is None else bias[(None,) * (4 - bias.dim())]


def _scaled_dot_product_cudnn_attention(call: SimpleNamespace) -> tuple[object, ...]:
    query, key, _ = call.operands
    _check_dtype("cuDNN attention", _HALF, query, call.attn_bias)
    bias = _four_dimensional_bias(call.attn_bias)
    out, logsumexp, seed = _forward(call, bias)
    return (
        _as_laid_out(query, out),
        logsumexp.unsqueeze(-1) if call.compute_log_sumexp else logsumexp.new_empty(0),
        None,
        None,
        query.size(2),
        key.size(2),
        torch.tensor(seed, dtype=torch.int64, device=query.device),
        torch.zeros((), dtype=torch.int64, device=query.device),
        None,
    )


def _scaled_dot_product_cudnn_attention_backward(call: SimpleNamespace) -> tuple[Tensor, ...]:
    results = call.grad_out, call.out, call.logsumexp.squeeze(-1)
    return _backward(call, _four_dimensional_bias(call.attn_bias), results, call.philox_seed)[:3]


ATTENTION_KERNELS: dict[str, Callable[..., object]] = {
    f"aten::{kernel.__name__}": _on_arguments(kernel)
    for kernel in (
        _scaled_dot_product_flash_attention,
        _scaled_dot_product_flash_attention_backward,
        _scaled_dot_product_efficient_attention,
        _scaled_dot_product_efficient_attention_backward,
        _scaled_dot_product_cudnn_attention,
        _scaled_dot_product_cudnn_attention_backward,
    )
}


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

Function = Callable[..., Tensor]


def _attention(original: Function) -> Function:
    @functools.wraps(original)
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Optional = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        operands = [t for t in (query, key, value, attn_mask) if t is not None]
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if has_torch_function(operands):
            return handle_torch_function(
                attention, operands, query, key, value, attn_mask, dropout_p, is_causal, **options
            )
        if not query.device == key.device == value.device:
            raise RuntimeError(
                "Expected query, key, and value to have the same device type, but got query.device: "
                f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
            )
        node = active_node()
        # C++ chooses the right operator for a real device.
        if not on_device(query) or (node is not None and node.backing.type == "cuda"):
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (_cast(t, dtype) for t in (query, key, value))
            attn_mask = None if attn_mask is None else _cast(attn_mask, dtype)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if _refused((query, key, value), attn_mask, dropout_p):
                return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
            return _dispatched((query, key, value), attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return attention


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t


def _refused(operands: Tensors, mask: Optional, dropout: float) -> bool:
    """Return whether C++ refuses these operands before its choice; then its own function raises the error."""
    dtype = operands[0].dtype
    return (
        any(t.dtype != dtype or t.dim() < 2 for t in operands)
        or any(t.layout is not torch.strided or t.is_nested for t in operands)
        or (mask is not None and mask.dtype not in (torch.bool, torch.float32, dtype))
        or not 0 <= dropout <= 1
    )


def _dispatched(
    operands: Tensors, mask: Optional, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    batched, full = operands, mask
    single = SINCE_2_14 and all(t.dim() == 3 for t in operands)
    if single:
        batched = operands[0].unsqueeze(0), operands[1].unsqueeze(0), operands[2].unsqueeze(0)
        full = None if mask is None else mask[(None,) * (4 - mask.dim())]
    backend = chosen_kernel(Params(*batched, full, dropout, causal, gqa))
    if backend == SDPBackend.MATH:
        return _math(operands, mask, dropout, causal, scale, gqa)
    output = _FUSED[backend](batched, full, dropout, causal, scale)
    return output.squeeze(0) if single else output


def _added(mask: Optional, dtype: torch.dtype, hidden: float = -math.inf) -> Optional:
    """Return the mask in the form that is added to the scores: convert a boolean mask, keep any other."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), hidden)


def _needs_logsumexp(operands: Tensors) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in operands)


def _flash(operands: Tensors, mask: Optional, dropout: float, causal: bool, scale: float | None) -> Tensor:
    size = operands[0].size(-1)
    scale = size**-0.5 if scale is None else scale  # before zeros are appended
    if missing := -size % _FLASH_ROWS:
        operands = tuple(F.pad(t, (0, missing)) for t in operands)  # type: ignore[assignment]
    out: Tensor = _aten._scaled_dot_product_flash_attention(*operands, dropout, causal, False, scale=scale)[0]
    return out[..., :size] if missing else out


def _efficient(operands: Tensors, mask: Optional, dropout: float, causal: bool, scale: float | None) -> Tensor:
    query, key, _ = operands
    added = _added(mask, query.dtype)
    if added is not None:
        columns = key.size(2)
        added = added.expand(*query.shape[:3], columns)
        if columns % _MASK_ROWS:
            added = F.pad(added, (0, -columns % _MASK_ROWS))[..., :columns]
        elif any(added.stride(i) % _MASK_ROWS for i in range(3)):
            added = added.contiguous()
    return _aten._scaled_dot_product_efficient_attention(
        *operands, added, _needs_logsumexp(operands), dropout, causal, scale=scale
    )[0]


def _cudnn(operands: Tensors, mask: Optional, dropout: float, causal: bool, scale: float | None) -> Tensor:
    # cuDNN has no infinity: the least number of the dtype hides a key.
    added = _added(mask, operands[0].dtype, torch.finfo(operands[0].dtype).min)
    return _aten._scaled_dot_product_cudnn_attention(
        *operands, added, _needs_logsumexp(operands), dropout, causal, False, scale=scale
    )[0]


def _math(operands: Tensors, mask: Optional, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Tensor:
    query, key, value = operands
    if causal and mask is None and isinstance(query, SimulatedTensor):
        # C++ would make the mask on the backing device; see `kernels`.
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        causal = False
    return _aten._scaled_dot_product_attention_math(
        query, key, value, _added(mask, query.dtype), dropout, causal, None, scale=scale, enable_gqa=gqa
    )[0]


_FUSED = {
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
    SDPBackend.CUDNN_ATTENTION: _cudnn,
}


def install_attention(patches: Patches) -> None:
    function = torch.nn.functional.scaled_dot_product_attention
    patches.replace(function, _attention(function))
