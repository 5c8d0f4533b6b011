"""Dispatch ``scaled_dot_product_attention`` on simulated devices to the operators that CUDA uses.

C++ would choose by the backing device. So this module chooses the operator, and does the work of C++ around it, above
autograd: the operators have CUDA's backward functions, DTensor's strategies and ring attention's handlers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import handle_torch_function, has_torch_function

from mgpu_check.simulated.attention_choice import SINCE_2_14, Params, chosen_kernel, on_device
from mgpu_check.simulated.state import active_node
from mgpu_check.simulated.tensor import SimulatedTensor
from mgpu_check.torch_hooks.patches import Patches

_aten = torch.ops.aten
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_FLASH_ROWS = 8  # elements of a head that a flash kernel loads at once
_MASK_ROWS = 16  # elements of a mask that a memory-efficient kernel loads at once

Function = Callable[..., torch.Tensor]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
        given = [t for t in (query, key, value, attn_mask) if t is not None]
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if has_torch_function(given):
            handled: torch.Tensor = handle_torch_function(
                attention, given, query, key, value, attn_mask, dropout_p, is_causal, **options
            )
            return handled
        if not query.device == key.device == value.device:
            raise RuntimeError(
                "Expected query, key, and value to have the same device type, but got query.device: "
                f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
            )
        if not on_device(query) or _is_backed_by_gpu():  # C++ chooses the right operator for a real device
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


def _is_backed_by_gpu() -> bool:
    node = active_node()
    return node is not None and node.backing.type == "cuda"


def _cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t


def _refused(operands: Tensors, mask: torch.Tensor | None, dropout: float) -> bool:
    """Return whether C++ refuses these operands before its choice; then its own function raises the error."""
    dtype = operands[0].dtype
    return (
        any(t.dtype != dtype or t.dim() < 2 for t in operands)
        or any(t.layout is not torch.strided or t.is_nested for t in operands)
        or (mask is not None and mask.dtype not in (torch.bool, torch.float32, dtype))
        or not 0 <= dropout <= 1
    )


def _dispatched(
    operands: Tensors, mask: torch.Tensor | None, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> torch.Tensor:
    batched, full = operands, mask
    single = SINCE_2_14 and all(t.dim() == 3 for t in operands)
    if single:
        batched = operands[0].unsqueeze(0), operands[1].unsqueeze(0), operands[2].unsqueeze(0)
        full = None if mask is None else mask[(None,) * (4 - mask.dim())]
    backend = chosen_kernel(Params(*batched, full, dropout, causal, gqa))
    if backend == SDPBackend.MATH:
        return _math(operands, mask, dropout, causal, scale, gqa)
    found = _FUSED[backend](batched, full, dropout, causal, scale)
    return found.squeeze(0) if single else found


def _added(mask: torch.Tensor | None, dtype: torch.dtype, hidden: float = -math.inf) -> torch.Tensor | None:
    """Return the mask in the form that is added to the scores: convert a boolean mask, keep any other."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), hidden)


def _needs_logsumexp(operands: Tensors) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in operands)


def _flash(
    operands: Tensors, mask: torch.Tensor | None, dropout: float, causal: bool, scale: float | None
) -> torch.Tensor:
    size = operands[0].size(-1)
    scale = size**-0.5 if scale is None else scale  # before zeros are appended
    if missing := -size % _FLASH_ROWS:
        operands = tuple(F.pad(t, (0, missing)) for t in operands)  # type: ignore[assignment]
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention(*operands, dropout, causal, False, scale=scale)[0]
    return out[..., :size] if missing else out


def _efficient(
    operands: Tensors, mask: torch.Tensor | None, dropout: float, causal: bool, scale: float | None
) -> torch.Tensor:
    query, key, _ = operands
    added = _added(mask, query.dtype)
    if added is not None:
        columns = key.size(2)
        added = added.expand(*query.shape[:3], columns)
        if columns % _MASK_ROWS:
            added = F.pad(added, (0, -columns % _MASK_ROWS))[..., :columns]
        elif any(added.stride(i) % _MASK_ROWS for i in range(3)):
            added = added.contiguous()
    out: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        *operands, added, _needs_logsumexp(operands), dropout, causal, scale=scale
    )[0]
    return out


def _cudnn(
    operands: Tensors, mask: torch.Tensor | None, dropout: float, causal: bool, scale: float | None
) -> torch.Tensor:
    # cuDNN has no infinity: the least number of the dtype hides a key.
    added = _added(mask, operands[0].dtype, torch.finfo(operands[0].dtype).min)
    out: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(
        *operands, added, _needs_logsumexp(operands), dropout, causal, False, scale=scale
    )[0]
    return out


def _math(
    operands: Tensors, mask: torch.Tensor | None, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> torch.Tensor:
    query, key, value = operands
    if causal and mask is None and isinstance(query, SimulatedTensor):
        # C++ would make the mask on the backing device; see `composites`.
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        causal = False
    computed: torch.Tensor = _aten._scaled_dot_product_attention_math(
        query, key, value, _added(mask, query.dtype), dropout, causal, None, scale=scale, enable_gqa=gqa
    )[0]
    return computed


_FUSED = {
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
    SDPBackend.CUDNN_ATTENTION: _cudnn,
}


def install_attention(patches: Patches) -> None:
    function = torch.nn.functional.scaled_dot_product_attention
    patches.replace(function, _attention(function))
