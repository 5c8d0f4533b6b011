"""Choose the kernel that CUDA would use for an attention, on a device of compute capability 9.0.

The conditions come from ``sdp_utils.cpp`` of torch 2.11 and later, for dense operands, in the same order. Each returns
torch's reason why its kernel cannot be used, or "".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mgpu_check.simulated.tensor import SimulatedTensor

SINCE_2_14 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
"""Since torch 2.14 all kernels accept one head of keys and values for all queries, and unbatched operands."""

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # of the flash kernels, and of cuDNN's on this device
_SIXTEENTHS = 16  # cuDNN rounds the probability of dropout to multiples of 1/16

Params = torch.backends.cuda.SDPAParams
Condition = Callable[[Params], str]


def on_device(t: Any) -> bool:
    """Return whether ``t``, or the tensor that it wraps (as a DTensor does), is on a simulated device."""
    return isinstance(t, SimulatedTensor) or (is_traceable_wrapper_subclass(t) and bool(t.is_cuda))  # type: ignore[attr-defined]


def _tensors(params: Params) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return params.query, params.key, params.value


def _four_dimensional(params: Params) -> str:
    query, key, value = (t.dim() for t in _tensors(params))
    if query == key == value == 4:
        return ""
    return (
        "All fused kernels requires query, key and value to be 4 dimensional, but got Query dim: "
        f"{query}, Key dim: {key}, Value dim: {value} instead."
    )


def _on_cuda(params: Params) -> str:
    if all(map(on_device, _tensors(params))):
        return ""
    query, key, value = (t.device for t in _tensors(params))
    return (
        f"All tensors need to be on cuda device. Got query on device: {query}, key on device: {key}, value on device: "
        f"{value}"
    )


def _dtype_in(*known: torch.dtype) -> Condition:
    """Return the condition that the three operands have the same dtype, one of ``known``."""

    def condition(params: Params) -> str:
        dtypes = [t.dtype for t in _tensors(params)]
        if dtypes[0] in known and len(set(dtypes)) == 1:
            return ""
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
        query, key, value = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return (
            f"Expected query, key and value to all be of dtype: {{{names}}}. Got Query dtype: {query}, Key dtype: "
            f"{key}, and Value dtype: {value} instead."
        )

    return condition


def _heads(gqa: bool, same_keys_and_values: bool) -> Condition:
    """Return the condition on batch sizes and numbers of heads.

    Args:
        gqa: whether the kernel supports groups of query heads that share a head of keys and values.
        same_keys_and_values: whether it requires as many heads of values as of keys.
    """

    def condition(params: Params) -> str:
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
                return ""
            return (
                "For dense input, both fused kernels require query, key and value to have the same num_heads. " + shapes
            )
        if same_keys_and_values and key != value:
            return (
                "Both fused kernels require key and value to have the same num_heads and batch_size but got: " + shapes
            )
        if not key or not value or query % key or query % value:
            return "The number of heads in key/value must divide number of heads in query." + shapes
        return ""

    return condition


def _not_empty(params: Params) -> str:
    # torch checks only the lengths of sequences. CUDA refuses an empty batch too: a launch without blocks.
    if all(t.numel() for t in _tensors(params)):
        return ""
    return "All fused kernels do not support zero seq_len_q or seq_len_kv."


def _last_stride_1(ignore_single: bool) -> Condition:
    """Return the condition that rows are contiguous; `ignore_single` exempts operands with rows of one element."""

    def condition(params: Params) -> str:
        rows = all(t.stride(-1) == 1 for t in _tensors(params))
        rows |= ignore_single and params.query.size(-1) == 1
        mask = params.attn_mask
        if rows and (mask is None or mask.stride(-1) == 1):
            return ""
        strides = ", ".join(f"{t.stride(-1)}" for t in (*_tensors(params), *([] if mask is None else [mask])))
        return f"All fused kernels require the last dimension of the input to have stride 1. Got {strides}"

    return condition


def _flash_on(params: Params) -> str:
    return "" if torch._C._get_flash_sdp_enabled() else "Flash attention has been runtime disabled."


def _no_mask(params: Params) -> str:
    return "" if params.attn_mask is None else "Flash Attention does not support non-null attn_mask."


def _flash_head(params: Params) -> str:
    sizes = [t.size(-1) for t in _tensors(params)]
    if len(set(sizes)) == 1 and sizes[0] <= _LARGEST_HEAD:
        return ""
    return (
        "Flash attention requires q,k,v to have the same last dimension and to be less than or equal to 256. Got "
        "Query.size(-1): {}, Key.size(-1): {}, Value.size(-1): {} instead.".format(*sizes)
    )


def _square_if_causal(params: Params) -> str:
    # FlashAttention 2 aligns its causal mask to the lower right, torch to the upper left: they agree on squares.
    query, key = params.query.size(-2), params.key.size(-2)
    if not params.is_causal or query == key:
        return ""
    return (
        f"Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. Got seqlen_q: {query} "
        f"seqlen_k: {key}. If you would like to use causal attention with non-square masks, please see CausalAttnMask."
    )


def _efficient_on(params: Params) -> str:
    return "" if torch._C._get_mem_efficient_sdp_enabled() else "Memory Efficient attention has been runtime disabled."


def _efficient_head(params: Params) -> str:
    # The tensor cores load 128 bits at once: 8 half-precision numbers, or 4 of float32.
    aligned = 8 if params.query.dtype in _HALF else 4
    query, key, value = (t.size(-1) for t in _tensors(params))
    if query == key and all(size > 0 and size % aligned == 0 for size in (query, value)):
        return ""
    return (
        f"Mem efficient attention requires last dimension of inputs to be divisible by {aligned}. "
        f"Got Query.size(-1): {query}, Key.size(-1): {key}, Value.size(-1): {value} instead."
    )


def _aligned(params: Params) -> str:
    # CUDA's allocations are aligned, so only the offset can be unaligned.
    if not SINCE_2_14 or all(t.storage_offset() * t.element_size() % 16 == 0 for t in _tensors(params)):
        return ""
    return (
        "Mem efficient attention on sm80 or newer requires q, k, and v storage offsets * element_size to be aligned "
        "to 16 bytes."
    )


def _cudnn_on(params: Params) -> str:
    return "" if torch._C._get_cudnn_sdp_enabled() else "cuDNN attention has been runtime disabled."


def _may_vary(params: Params) -> str:
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return "cuDNN SDPA is not deterministic." if strict else ""


def _cudnn_mask(params: Params) -> str:
    mask = params.attn_mask
    if mask is None:
        return ""
    batch, heads, rows, _ = params.query.shape
    wanted = (batch, heads, rows, params.key.size(2))
    fits = mask.dim() in (2, 4) and all(
        have in (1, want) for have, want in zip(mask.shape, wanted[-mask.dim() :], strict=True)
    )
    if fits and not mask.requires_grad:
        return ""
    return (
        "Please use the following attn mask shapes: 2d - ({Q_seq_len, 1}  x {KV_seq_len, 1}); "
        "4d - ({Batch, 1} x {Num_heads, 1} x {Q_seq_len, 1}  x {KV_seq_len, 1})"
    )


def _cudnn_dropout(params: Params) -> str:
    if (params.dropout * _SIXTEENTHS).is_integer():
        return ""
    return (
        "cuDNN dropout probability resolution is limited to 1/16."
        "Use a dropout probability that is a multiple of 1/16 to select the cuDNN backend"
    )


def _cudnn_shapes(params: Params) -> str:
    sizes = params.query.size(-1), params.value.size(-1)
    if params.query.size(-1) != params.key.size(-1) or max(sizes) > _LARGEST_HEAD:
        return f"head_dim should be no more than {_LARGEST_HEAD}"
    if any(size == 0 or size % 8 for size in sizes):
        return "head_dim should be a multiple of 8"
    if params.key.size(-2) == 1:
        return "cudnn SDPA does not support key/value sequence length 1."
    if params.dropout and params.query.size(-2) == 1:
        return "cudnn SDPA does not support query sequence length 1 with dropout."
    return ""


_FLASH: tuple[Condition, ...] = (
    _flash_on,
    _on_cuda,
    _four_dimensional,
    _no_mask,
    _flash_head,
    _square_if_causal,
    _dtype_in(*_HALF),
    _heads(gqa=True, same_keys_and_values=True),
    _not_empty,
    _last_stride_1(ignore_single=True),
)
_EFFICIENT: tuple[Condition, ...] = (
    _efficient_on,
    _on_cuda,
    _four_dimensional,
    _efficient_head,
    _aligned,
    _not_empty,
    _last_stride_1(ignore_single=False),
    _heads(gqa=SINCE_2_14, same_keys_and_values=True),
    _dtype_in(torch.float16, torch.float32, torch.bfloat16),
)
_CUDNN: tuple[Condition, ...] = (
    _cudnn_on,
    _on_cuda,
    _four_dimensional,
    _may_vary,
    _dtype_in(*_HALF),
    _cudnn_mask,
    _cudnn_dropout,
    _not_empty,
    _last_stride_1(ignore_single=True),
    _heads(gqa=True, same_keys_and_values=False),
    _cudnn_shapes,
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
