"""Implement operators that torch has only for CUDA, with operators that every device has.

They run on plain tensors of the backing device, below the simulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mgpu_check.simulated.attention_choice import Params, chosen_kernel
from mgpu_check.simulated.attention_kernels import ATTENTION_KERNELS
from mgpu_check.simulated.state import active_node


def _channels(x: Tensor) -> tuple[list[int], list[int]]:
    """Return the axes to reduce over (all but the channel's, axis 1) and the shape that broadcasts a channel vector."""
    return [d for d in range(x.dim()) if d != 1], [1, -1] + [1] * (x.dim() - 2)


def _accumulate(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    axes, _ = _channels(x)
    wide = _accumulate(x)
    variance, mean = torch.var_mean(wide, dim=axes, correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Combine the statistics of several ranks (rows of ``mean`` and ``invstd``) by the law of total variance."""
    weights = counts.to(mean.dtype).reshape(-1, 1)
    total = weights.sum()
    joined = (mean * weights).sum(0) / total
    variance = ((invstd.pow(-2) - eps + (mean - joined) ** 2) * weights).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(joined.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = variance * total / (total - 1)
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return joined, torch.rsqrt(variance + eps)


def batch_norm_gather_stats(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    counts = torch.full((mean.size(0),), float(count), dtype=mean.dtype, device=mean.device)
    return batch_norm_gather_stats_with_counts(x, mean, invstd, running_mean, running_var, momentum, eps, counts)


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    _, shape = _channels(x)
    out = (_accumulate(x) - mean.view(shape)) * invstd.view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(x.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    axes, shape = _channels(x)
    grad = _accumulate(grad_out)
    sum_dy = grad.sum(axes)
    sum_dy_xmu = (grad * (_accumulate(x) - mean.view(shape))).sum(axes)
    kind = sum_dy.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(kind), sum_dy.to(kind)


def batch_norm_backward_elemt(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    _, shape = _channels(x)
    total = count.sum().to(mean.dtype)
    centred = _accumulate(x) - mean.view(shape)
    projected = centred * (invstd**2 * sum_dy_xmu / total).view(shape)
    out = (_accumulate(grad_out) - (sum_dy / total).view(shape) - projected) * invstd.view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    return out.to(grad_out.dtype)


def _pack_padded_sequence(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    if lengths.is_cuda:
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D {lengths.device} Long tensor"
        )
    packed: tuple[Tensor, Tensor] = torch.ops.aten._pack_padded_sequence(x, lengths, batch_first)
    return packed


def _fused_sdp_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    return int(chosen_kernel(Params(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)).value)


def cudnn_convolution(
    x: Tensor, weight: Tensor, padding: list[int], stride: list[int], dilation: list[int], groups: int, *_: bool
) -> Tensor:
    none = [0] * len(padding)
    out: Tensor = torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, False, none, groups)
    return out


def cudnn_convolution_transpose(
    x: Tensor,
    weight: Tensor,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *_: bool,
) -> Tensor:
    out: Tensor = torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, True, output_padding, groups)
    return out


def _on_cpu(name: str, kernel: Callable[..., object]) -> Callable[..., object]:
    """Return a kernel for operands on the CPU; a real device behind the node has its own."""
    native = getattr(torch.ops.aten, name.removeprefix("aten::"))

    @functools.wraps(kernel)
    def run(*args: object, **kwargs: object) -> object:
        node = active_node()
        real = node is not None and node.backing.type == "cuda"
        return native(*args, **kwargs) if real else kernel(*args, **kwargs)

    return run


_WRITTEN_HERE: dict[str, Callable[..., object]] = {
    f"aten::{kernel.__name__}": kernel
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
        _pack_padded_sequence,
        cudnn_convolution,
        cudnn_convolution_transpose,
    )
}

_OF_ATTENTION = ATTENTION_KERNELS | {"aten::_fused_sdp_choice": _fused_sdp_choice}


def _product_in_another_dtype(name: str) -> Callable[..., Tensor]:
    product = getattr(torch.ops.aten, name)

    def run(*given: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        *operands, dtype = given
        made: Tensor = product(*(operand.to(dtype) for operand in operands), **options)
        return made if out is None else out.copy_(made)

    return run


_PRODUCTS = {
    f"aten::{name}.{overload}": _on_cpu(f"aten::{name}", _product_in_another_dtype(name))
    for name in ("mm", "bmm", "addmm", "baddbmm")
    for overload in ("dtype", "dtype_out")
}

KERNELS = _WRITTEN_HERE | _PRODUCTS | {name: _on_cpu(name, kernel) for name, kernel in _OF_ATTENTION.items()}
"""Operator, or overload of an operator -> its kernel."""
