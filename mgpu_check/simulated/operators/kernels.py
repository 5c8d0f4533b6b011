"""Operators that torch has only for CUDA, written with operators that every device has, and wrappers of functions
that meet the backing device in C++: they create a tensor there, or read where one is.

The operators run on plain tensors of the backing device, below the simulation.

A tensor that C++ created is returned, or combined with the input. `dispatch` recognises it by its reference count,
except under a `TorchDispatchMode`, which holds a reference too (a gate that perturbs a step uses one). So the
wrappers pass tensors of the simulated device, or tag the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._foreach_utils
from torch import Tensor

from mgpu_check.simulated.node import active_node
from mgpu_check.simulated.operators.attention import ATTENTION_KERNELS, Params, chosen_kernel
from mgpu_check.simulated.tensor import SimulatedTensor, raw, tag, tensors_in
from mgpu_check.torch_hooks.patches import Patches, around


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


def batch_norm_gather_stats(x: Tensor, mean: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *others, count = arguments
    counts = torch.full((mean.size(0),), float(count), dtype=mean.dtype, device=mean.device)
    return batch_norm_gather_stats_with_counts(x, mean, *(*others, counts))


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
    grad_out: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    axes, shape = _channels(x)
    grad = _accumulate(grad_out)
    sum_dy = grad.sum(axes)
    sum_dy_xmu = (grad * (_accumulate(x) - mean.view(shape))).sum(axes)
    dtype = sum_dy.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


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
    return torch.ops.aten._pack_padded_sequence(x, lengths, batch_first)


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


Sizes = list[int]


def cudnn_convolution(
    x: Tensor, weight: Tensor, padding: Sizes, stride: Sizes, dilation: Sizes, groups: int, *_: bool
) -> Tensor:
    none = [0] * len(padding)
    return torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, False, none, groups)


def cudnn_convolution_transpose(
    x: Tensor, weight: Tensor, padding: Sizes, output_padding: Sizes, stride: Sizes, dilation: Sizes, *rest: Any
) -> Tensor:
    groups = rest[0]
    return torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, True, output_padding, groups)


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
        *(batch_norm_stats, batch_norm_gather_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt),
        *(batch_norm_backward_reduce, batch_norm_backward_elemt, _pack_padded_sequence, cudnn_convolution),
        cudnn_convolution_transpose,
    )
}

_OF_ATTENTION = ATTENTION_KERNELS | {"aten::_fused_sdp_choice": _fused_sdp_choice}


def _product_in_another_dtype(name: str) -> Callable[..., Tensor]:
    product = getattr(torch.ops.aten, name)

    def run(*arguments: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        *operands, dtype = arguments
        output: Tensor = product(*(operand.to(dtype) for operand in operands), **options)
        return output if out is None else out.copy_(output)

    return run


def _histc(t: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count integers, too, as CUDA does, and the CPU does not (aten/src/ATen/native/cuda/SummaryOps.cu, torch 2.13)."""
    wide = t if t.is_floating_point() else t.double()
    return torch.histc(wide, bins, min, max).to(t.dtype)


_PRODUCTS = {
    f"aten::{name}.{overload}": _on_cpu(f"aten::{name}", _product_in_another_dtype(name))
    for name in ("mm", "bmm", "addmm", "baddbmm")
    for overload in ("dtype", "dtype_out")
}

KERNELS = (
    _WRITTEN_HERE
    | _PRODUCTS
    | {"aten::histc": _on_cpu("aten::histc", _histc)}
    | {name: _on_cpu(name, kernel) for name, kernel in _OF_ATTENTION.items()}
)
"""Operator, or overload of an operator -> its kernel."""


Function = Callable[..., Tensor]


@around
def _matrix_rank(original: Function, *args: object, **kwargs: object) -> Tensor:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else None
    together = all(isinstance(t, SimulatedTensor) and t.device == device for t in tensors)
    if device is None or not together or kwargs.get("out") is not None:
        return original(*args, **kwargs)
    bare = [raw(value) if isinstance(value, Tensor) else value for value in args]
    named = {name: raw(value) if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    return tag(original(*bare, **named), device)


@around
def _istft(
    original: Function,
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    *args: object,
    **kwargs: object,
) -> Tensor:
    """Wrap ``istft`` to pass a window of ones if the caller gives no window, as C++ does."""
    if window is None and isinstance(input, SimulatedTensor):
        dtype = torch.view_as_real(input).dtype if input.is_complex() else input.dtype
        length = n_fft if win_length is None else win_length
        if length > 0:
            window = torch.ones(length, dtype=dtype, device=input.device)
    return original(input, n_fft, hop_length, win_length, window, *args, **kwargs)


@around
def _one_hot(original: Function, tensor: Tensor, num_classes: int = -1) -> Tensor:
    encoded = original(raw(tensor), num_classes)
    return tag(encoded, tensor.device) if isinstance(tensor, SimulatedTensor) else encoded


@around
def _combinations(original: Function, input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Wrap ``combinations`` to select elements by index instead of by a mask."""
    if not isinstance(input, SimulatedTensor) or input.dim() != 1 or r < 0:
        return original(input, r, with_replacement)
    chosen = original(torch.arange(len(input)), r, with_replacement)
    return input[chosen.to(input.device)] if r else input.new_empty(0)


@around
def _quantile(original: Function, input: Tensor, q: float | Tensor, *args: object, **kwargs: object) -> Tensor:
    """Wrap ``quantile`` and ``nanquantile``, which make a tensor from a number ``q``."""
    if isinstance(input, SimulatedTensor) and isinstance(q, float | int) and 0 <= q <= 1:
        q = torch.tensor(q, dtype=input.dtype, device=input.device)
    return original(input, q, *args, **kwargs)


@around
def _unflatten(original: Callable[..., Sequence[Tensor]], flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Wrap the inverse of flattening, which creates new tensors for those without elements."""
    unflattened = original(flat, tensors)
    if not isinstance(flat, SimulatedTensor):
        return unflattened
    return tuple(tensor if isinstance(tensor, SimulatedTensor) else tag(tensor, flat.device) for tensor in unflattened)


@around
def _pad_packed_sequence(
    original: Callable[..., tuple[Tensor, Tensor]], data: Tensor, *args: object
) -> tuple[Tensor, Tensor]:
    """Wrap the padding of a packed sequence, whose result C++ creates; the lengths are always on the CPU."""
    padded, lengths = original(data, *args)
    on_device = isinstance(data, SimulatedTensor) and not isinstance(padded, SimulatedTensor)
    return (tag(padded, data.device) if on_device else padded), lengths


@around
def _recurrent(original: Callable[..., object], input: Tensor, *args: object) -> object:
    """Wrap recurrent networks, which compare an input on the host with their parameters in C++."""
    if not isinstance(input, SimulatedTensor):
        weights = next((number for number, value in enumerate(args) if isinstance(value, list)), len(args))
        for role, values in (("hidden", args[:weights]), ("parameter", args[weights:])):
            for tensor in tensors_in(values):
                if isinstance(tensor, SimulatedTensor):
                    raise RuntimeError(
                        f"Input and {role} tensors are not at the same device, found input tensor at {input.device} "
                        f"and {role} tensor at {tensor.device}"
                    )
    return original(input, *args)


def install_composites(patches: Patches) -> None:
    for function, wrap in (
        (torch.linalg.matrix_rank, _matrix_rank),
        (torch.istft, _istft),
        (torch.nn.functional.one_hot, _one_hot),
        (torch.combinations, _combinations),
        (torch.quantile, _quantile),
        (torch.nanquantile, _quantile),
        (torch._utils._unflatten_dense_tensors, _unflatten),
    ):
        patches.replace(function, wrap(function))
    for name in ("quantile", "nanquantile"):
        patches.wrap(torch.Tensor, name, _quantile)
    patches.wrap(torch._VF, "_pad_packed_sequence", _pad_packed_sequence)
    for name in ("gru", "lstm", "rnn_relu", "rnn_tanh"):
        patches.wrap(torch._VF, name, _recurrent)
