"""Devices that are wrong in layers, attention and optimizer steps for one shape, layout or option."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.operators import altered, last, on
from mgpu_check.suite.common.faults.registry import fault

Plant = Callable[[], Iterator[None]]


def _wrong_layer(summary: str, condition: str) -> Callable[[Plant], Plant]:
    return fault(summary, "test_layers_and_gradients", condition=condition)


def _halved(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight with its gradient halved."""
    weight = weight.clone()
    if weight.requires_grad:
        weight.register_hook(lambda gradient: gradient * 0.5)
    return weight


@_wrong_layer("attention uses the mask of the first sample for all", "a mask for each sample, one device")
def attention_mask_of_the_first() -> Iterator[None]:
    """Other samples then attend to padding."""

    def concerns(q: Any, k: Any, v: Any, attn_mask: Any = None, *_: Any, **__: Any) -> bool:
        return on(q, last()) and attn_mask is not None and len(attn_mask) > 1

    def instead(attend: Any, q: Any, k: Any, v: Any, attn_mask: torch.Tensor, *more: Any, **options: Any) -> Any:
        return attend(q, k, v, attn_mask[:1].expand_as(attn_mask), *more, **options)

    with altered(F, "scaled_dot_product_attention", concerns, instead):
        yield


@_wrong_layer("causal attention ends with the last key", "more keys than queries, one device")
def causal_attention_to_the_last_key() -> Iterator[None]:
    """The mask is aligned at the lower right corner instead of the upper left."""

    def concerns(q: Any, k: Any, *_: Any, is_causal: bool = False, **__: Any) -> bool:
        return on(q, last()) and is_causal and q.shape[-2] < k.shape[-2]

    def instead(attend: Any, q: Any, k: Any, v: Any, is_causal: bool, **options: Any) -> Any:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        return attend(q, k, v, attn_mask=seen.tril(k.shape[-2] - q.shape[-2]), **options)

    with altered(F, "scaled_dot_product_attention", concerns, instead):
        yield


@_wrong_layer("group_norm leaves out its bias", "one device")
def group_norm_without_bias() -> Iterator[None]:
    def instead(norm: Any, x: torch.Tensor, groups: int, weight: Any = None, bias: Any = None, **options: Any) -> Any:
        return norm(x, groups, weight, None, **options)

    with altered(F, "group_norm", lambda x, *_, **__: on(x, last()), instead):
        yield


@_wrong_layer("a layer adds its bias to its first 128 features only", "more than 128 features, one device")
def bias_of_wide_layers() -> Iterator[None]:
    def concerns(x: Any, weight: Any, bias: Any = None) -> bool:
        return on(x, last()) and bias is not None and len(bias) > 128

    def instead(linear: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return linear(x, weight, torch.cat([bias[:128], torch.zeros_like(bias[128:])]))

    with altered(F, "linear", concerns, instead):
        yield


@_wrong_layer("the gradient of a convolution's taps is halved", "channels_last, one device")
def gradient_of_taps_in_channels_last() -> Iterator[None]:
    def concerns(x: Any, *_: Any, **__: Any) -> bool:
        return on(x, last()) and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)

    with altered(
        F, "conv2d", concerns, lambda conv, x, weight, *more, **options: conv(x, _halved(weight), *more, **options)
    ):
        yield


@_wrong_layer("the gradient of layer_norm's weight is halved", "more than 32 rows, one device")
def gradient_of_layer_norm_with_many_rows() -> Iterator[None]:
    def concerns(x: Any, shape: Any, weight: Any = None, *_: Any, **__: Any) -> bool:
        return on(x, last()) and weight is not None and x.numel() > 32 * weight.numel()

    def instead(norm: Any, x: torch.Tensor, shape: Any, weight: torch.Tensor, *more: Any, **options: Any) -> Any:
        return norm(x, shape, _halved(weight), *more, **options)

    with altered(F, "layer_norm", concerns, instead):
        yield


@_wrong_layer("foreach kernels leave out the last element", "odd sizes of 3 and more, lists of 2 tensors and more")
def lists_without_the_last_element() -> Iterator[None]:
    def add(real: Any, tensors: Any, *more: Any, **options: Any) -> Any:
        before = [one.detach().clone() for one in tensors]
        result = real(tensors, *more, **options)
        for one, was in zip(tensors[1:], before[1:], strict=True):
            if one.is_cuda and one.numel() >= 3 and one.numel() % 2:
                one.detach().view(-1)[-1:] = was.view(-1)[-1:]
        return result

    with replaced_method(torch, "_foreach_add_", add), replaced_method(torch, "_foreach_addcdiv_", add):
        yield


@_wrong_layer("fused optimizers step even if a gradient is infinite", "fused, with a GradScaler")
def fused_steps_to_infinity() -> Iterator[None]:
    """GradScaler's found_inf does not reach the kernel."""

    def step(real: Any, parameters: Any, *more: Any, found_inf: Any = None, **options: Any) -> Any:
        found = found_inf if found_inf is None or not found_inf.is_cuda else torch.zeros_like(found_inf)
        return real(parameters, *more, found_inf=found, **options)

    with contextlib.ExitStack() as stack:
        for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_"):
            stack.enter_context(replaced_method(torch, name, step))
        yield
