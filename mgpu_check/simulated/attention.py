"""Choose the kernels of CUDA that an attention could use: asked for by name, or left by ``sdpa_kernel`` as the only
choice.

The backing device computes what they would. The rules are those of torch for a device of compute capability 9.0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from mgpu_check.simulated.tensor import SimulatedTensor
from mgpu_check.torch_hooks.patches import Patches

__all__ = ["attention_functions", "install_attention"]

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # of the flash kernels, and of cuDNN's on this device

Function = Callable[..., torch.Tensor]
Params = torch.backends.cuda.SDPAParams


def _dense(params: Params) -> bool:
    """Check what all kernels ask for: tensors of devices, of four dimensions, of one dtype, not empty, whose rows are
    in one piece.
    """
    tensors = (params.query, params.key, params.value)
    return all(
        isinstance(t, SimulatedTensor)
        and t.dim() == 4
        and t.dtype == params.query.dtype
        and t.numel() > 0
        and t.stride(-1) in (1, t.size(-1) == 1)
        for t in tensors
    )


def _heads(params: Params) -> bool:
    query, key, value = (t.size(-3) for t in (params.query, params.key, params.value))
    return query % key == query % value == 0 if params.enable_gqa else query == key == value


def _head_size(params: Params) -> int:
    return params.query.size(-1) if params.query.size(-1) == params.key.size(-1) else 0


def _flash(params: Params, debug: bool = False) -> bool:
    return (
        torch._C._get_flash_sdp_enabled()
        and _dense(params)
        and _heads(params)
        and params.query.dtype in _HALF
        and params.attn_mask is None
        and 0 < _head_size(params) == params.value.size(-1) <= _LARGEST_HEAD
    )


def _mem_efficient(params: Params, debug: bool = False) -> bool:
    if not torch._C._get_mem_efficient_sdp_enabled() or not _dense(params) or not _heads(params) or params.enable_gqa:
        return False
    aligned = 8 if params.query.dtype in _HALF else 4
    sizes = _head_size(params), params.value.size(-1)
    return params.query.dtype in (*_HALF, torch.float32) and all(size > 0 and size % aligned == 0 for size in sizes)


def _cudnn(params: Params, debug: bool = False) -> bool:
    sizes = _head_size(params), params.value.size(-1) if _dense(params) else 0
    return (
        torch._C._get_cudnn_sdp_enabled()
        and _dense(params)
        and _heads(params)
        and params.query.dtype in _HALF
        and all(0 < size <= _LARGEST_HEAD and size % 8 == 0 for size in sizes)
    )


def attention_functions() -> dict[str, object]:
    """Name in ``torch._C`` -> what stands there while simulated."""
    return {
        "_can_use_flash_attention": _flash,
        "_can_use_mem_efficient_attention": _mem_efficient,
        "_can_use_cudnn_attention": _cudnn,
        "_is_flash_attention_available": lambda: True,
    }


def _attention(original: Function) -> Function:
    @functools.wraps(original)
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if not query.device == key.device == value.device:
            raise RuntimeError(
                "Expected query, key, and value to have the same device type, but got query.device: "
                f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
            )
        asked = query, key, value, attn_mask, dropout_p, is_causal
        if isinstance(query, SimulatedTensor) and _by_operators(Params(*asked, enable_gqa), scale):
            mask = attn_mask
            if is_causal and mask is None:
                # What C++ makes is on no simulated device; see `composites`.
                mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
            causal = is_causal and attn_mask is not None  # which is refused
            if mask is not None and mask.dtype is torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
            computed: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, causal, None, scale=scale, enable_gqa=enable_gqa
            )
            return computed[0]
        return original(*asked, scale=scale, enable_gqa=enable_gqa)

    return attention


def _by_operators(params: Params, scale: float | None) -> bool:
    """Return whether plain operators compute what a kernel of CUDA would, or an attention that no kernel takes.

    Raises:
        RuntimeError: the code has left no kernel that takes it.
    """
    if not torch._C._get_math_sdp_enabled():
        if not (_flash(params) or _mem_efficient(params) or _cudnn(params)):
            raise RuntimeError("No available kernel. Aborting execution.")
        return True
    tensors = params.query, params.key, params.value, params.attn_mask
    if not params.is_causal or min(tensor.dim() for tensor in tensors if tensor is not None) < 2:
        return False
    chosen = torch._fused_sdp_choice(
        *tensors, params.dropout, params.is_causal, scale=scale, enable_gqa=params.enable_gqa
    )
    return bool(chosen == torch.nn.attention.SDPBackend.MATH.value)


def install_attention(patches: Patches) -> None:
    """Replace ``scaled_dot_product_attention``, for what it checks first, and for the choice of its kernel."""
    function = torch.nn.functional.scaled_dot_product_attention
    patches.replace(function, _attention(function))
