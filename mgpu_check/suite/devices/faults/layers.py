"""Layers that are wrong for one shape, layout, dtype or option; defects of autocast and dropout."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.utils import checkpoint as checkpoint_module

from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.operators import call, dtype, first, last, on, one_device
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, register
from mgpu_check.suite.devices.faults.state import untouched

autocasting = caught_by("test_autocast_of_operators")
dropping = caught_by("test_dropout")
layers = caught_by("test_layers_and_gradients")


def halved_gradient(weight: Tensor) -> Tensor:
    """Return the weight with its gradient halved."""
    weight = weight.clone()
    if weight.requires_grad:
        weight.register_hook(lambda gradient: gradient * 0.5)
    return weight


@layers("gelu has the gradient of its tanh approximation", around(F, "gelu"),
    first("gradients", lambda x: x.is_cuda and x.requires_grad))  # fmt: skip
def gradient_of_another_gelu(gelu: Any, x: Tensor) -> Any:
    near = gelu(x, approximate="tanh")
    return near + (gelu(x) - near).detach()


@layers("causal attention ends with the last key", around(F, "scaled_dot_product_attention"),
    call("more keys than queries, one device",
        lambda q, k, *_, is_causal=False, **__: on(q, last()) and is_causal and q.shape[-2] < k.shape[-2]))  # fmt: skip
def causal_attention_to_the_last_key(attend: Any, q: Any, k: Any, v: Any, is_causal: bool, **options: Any) -> Any:
    """The mask is aligned at the lower right corner instead of the upper left."""
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    return attend(q, k, v, attn_mask=seen.tril(k.shape[-2] - q.shape[-2]), **options)


@layers(
    "the gradient of layer_norm's weight is halved",
    around(F, "layer_norm"),
    call(
        "more than 32 rows, one device",
        lambda x, _, weight=None, *__, **___: on(x, last()) and weight is not None and x.numel() > 32 * weight.numel(),
    ),
)
def gradient_of_layer_norm_with_many_rows(norm: Any, x: Tensor, shape: Any, weight: Any, *more: Any, **kw: Any) -> Any:
    return norm(x, shape, halved_gradient(weight), *more, **kw)


@layers("foreach kernels leave out the last element", around(torch, "_foreach_add_", "_foreach_addcdiv_"),
    "odd sizes of 3 and more, lists of 2 tensors and more")  # fmt: skip
def lists_without_the_last_element(add: Any, tensors: Any, *more: Any, **options: Any) -> Any:
    before = [one.detach().clone() for one in tensors]
    result = add(tensors, *more, **options)
    for one, was in zip(tensors[1:], before[1:], strict=True):
        if one.is_cuda and one.numel() >= 3 and one.numel() % 2:
            one.detach().view(-1)[-1:] = was.view(-1)[-1:]
    return result


@layers("AMSGrad uses the last second moment, not the largest", around(torch, "_fused_adam_"),
    call("amsgrad, fused", lambda tensors, *_, amsgrad=False, **__: amsgrad and tensors[0].is_cuda))  # fmt: skip
def maximum_of_moments_forgotten(step: Any, *args: Any, **options: Any) -> Any:
    for largest in args[4]:
        largest.zero_()
    return step(*args, **options)


@layers("the scale of GradScaler grows although a step was skipped within the interval",
    around(torch, "_amp_update_scale_"),
    call("growth intervals above 1, after a skipped step",
        lambda *args, **_: args[0].is_cuda and args[5] > 1))  # fmt: skip
def interval_not_restarted(update: Any, scale: Tensor, tracker: Tensor, found: Any, *options: Any) -> Any:
    before = tracker.clone()
    result = update(scale, tracker, found, *options)
    tracker.copy_(torch.maximum(tracker, before))
    return result


@layers("the second layer of a GRU on one device starts from a wrong state", around(torch._VF, "gru"),
    one_device() & call("two layers", lambda x, state, *_: len(state) > 1))  # fmt: skip
def state_of_the_second_layer_lost(gru: Any, x: Tensor, state: Tensor, *args: Any) -> Any:
    begun = state.clone()
    begun[1:] += 1
    return gru(x, begun, *args)


@layers("a packed sequence on another device is unsorted with the sorting permutation", around(PackedSequence, "to"),
    "enforce_sorted=False, an order that sorting twice does not restore")  # fmt: skip
def packed_sequence_not_unsorted(to: Any, packed: PackedSequence, *args: Any, **kwargs: Any) -> PackedSequence:
    """Final states belong to other samples."""
    moved: PackedSequence = to(packed, *args, **kwargs)
    if moved is packed or moved.sorted_indices is None:
        return moved
    return PackedSequence(moved.data, moved.batch_sizes, moved.sorted_indices, moved.sorted_indices)


@autocasting("softmax stays in the dtype of autocast", around(F, "softmax"), one_device())
def softmax_in_low_precision(softmax: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator is missing from the list of float32 operators."""
    with torch.autocast("cuda", enabled=False):
        return softmax(*args, **kwargs)


@autocasting("leaving a region of autocast disables the outer region", around(torch.autocast, "__exit__"),
    "regions within others")  # fmt: skip
def outer_region_off(leave: Any, region: Any, *args: Any) -> Any:
    """The rest of the outer region computes in float32."""
    result = leave(region, *args)
    if not region._enabled:
        torch.set_autocast_enabled("cuda", False)
    return result


@autocasting("a region of autocast left by an exception does not restore the dtype", around(torch.autocast, "__exit__"),
    call("left by an exception", lambda region, kind, *_: kind is not None))  # fmt: skip
def dtype_of_a_failed_region_stays(leave: Any, region: Any, *args: Any) -> Any:
    """As if it was not restored in `finally`."""
    result = leave(region, *args)
    torch.set_autocast_dtype(region.device, region.fast_dtype)
    return result


@autocasting("a region without a cache disables the cache of the outer region", around(torch.autocast, "__exit__"),
    first("cache_enabled=False", lambda region: not region._cache_enabled))  # fmt: skip
def cache_stays_off(leave: Any, region: Any, *args: Any) -> Any:
    """Each use of a parameter casts it again."""
    result = leave(region, *args)
    torch.set_autocast_cache_enabled(False)
    return result


@dropping("dropout drops the same elements each time on one device", around(F, "dropout"), one_device())
def dropout_repeats(dropout: Any, *args: Any, **kwargs: Any) -> Any:
    with untouched(last()):
        return dropout(*args, **kwargs)


@dropping("the gradient of dropout uses a new mask on one device", around(F, "dropout"),
    one_device() & first("gradients", lambda x: x.requires_grad))  # fmt: skip
def another_mask_backward(dropout: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Backward draws the mask again, from the next numbers of the generator."""
    out, drawn_anew = dropout(x.detach(), *args, **kwargs), dropout(x, *args, **kwargs)
    return drawn_anew + (out - drawn_anew).detach()


register(
    __name__,
    FaultRow("softmax-in-bfloat16", "softmax of float32 is computed in bfloat16 on one device",
        "test_layers_and_gradients", around(F, "softmax"),
        lambda softmax, x, **kwargs: softmax(x.bfloat16(), **kwargs).float(), one_device(torch.float32)),
    FaultRow("group-norm-without-bias", "group_norm leaves out its bias", "test_layers_and_gradients",
        around(F, "group_norm"),
        lambda norm, x, groups, weight=None, bias=None, **options: norm(x, groups, weight, None, **options),
        one_device()),
    FaultRow("gradient-of-taps-in-channels-last", "the gradient of a convolution's taps is halved",
        "test_layers_and_gradients", around(F, "conv2d"),
        lambda conv, x, weight, *more, **options: conv(x, halved_gradient(weight), *more, **options),
        first("channels_last, one device",
            lambda x: on(x, last()) and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last))),
    # GradScaler's found_inf does not reach the kernel.
    FaultRow("fused-steps-to-infinity", "fused optimizers step even if a gradient is infinite",
        "test_layers_and_gradients", around(torch, "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
        lambda step, *args, found_inf, **options: step(*args, found_inf=torch.zeros_like(found_inf), **options),
        call("fused, with a GradScaler", lambda *_, found_inf=None, **__: found_inf is not None and found_inf.is_cuda)),
    FaultRow("second-moment-not-centered", "RMSprop in its multi-tensor form does not center the second moment",
        "test_layers_and_gradients", around(importlib.import_module("torch.optim.rmsprop"), "_multi_tensor_rmsprop"),
        lambda step, *args, centered, **options: step(*args, centered=False, **options),
        "centered, foreach, on the CPU too"),
    FaultRow("interval-of-another-scaler-lost", "a GradScaler with the state of another starts its interval anew",
        "test_layers_and_gradients", around(torch.amp.GradScaler, "load_state_dict"),
        lambda load, scaler, state: load(scaler, state | {"_growth_tracker": 0}),
        first("on devices", lambda scaler: scaler._device == "cuda")),
    FaultRow("softmax-of-part-of-a-row", "softmax of a long row leaves out its end", "test_layers_and_gradients",
        around(F, "softmax"),
        lambda softmax, x, **kwargs: torch.cat([softmax(x[..., :256], **kwargs), torch.zeros_like(x[..., 256:])], -1),
        first("rows above 256", lambda x: x.is_cuda and x.shape[-1] > 256)),
    FaultRow("corrections-ignored", "var ignores correction and divides by n - 1", "test_layers_and_gradients",
        around(torch, "var"), lambda var, *args, correction, **kwargs: var(*args, **kwargs, correction=1),
        call("a correction other than 1", lambda x, *_, correction=1, **__: x.is_cuda and correction != 1)),
    FaultRow("padding-trained", "the embedding of padding_idx has a gradient on one device",
        "test_layers_and_gradients", around(F, "embedding"),
        lambda embedding, *args, padding_idx, **kwargs: embedding(*args, **kwargs),
        one_device() & call("padding_idx", lambda *_, padding_idx=None, **__: padding_idx is not None)),
    FaultRow("corners-not-aligned", "interpolation on one device ignores align_corners", "test_layers_and_gradients",
        around(F, "interpolate"),
        lambda interpolate, *args, align_corners, **kwargs: interpolate(*args, **kwargs, align_corners=False),
        one_device() & call("align_corners", lambda *_, align_corners=None, **__: bool(align_corners))),
    FaultRow("inputs-of-functions-not-cast", "functions of custom_fwd do not cast their inputs",
        "test_autocast_of_operators", around(torch.amp, "custom_fwd"),
        lambda custom_fwd, *args, cast_inputs=None, **kwargs: custom_fwd(*args, **kwargs), "cast_inputs"),
    # Activations are smaller while training.
    FaultRow("dropout-without-scale", "dropout of bfloat16 does not scale the kept elements", "test_dropout",
        around(F, "dropout"), lambda dropout, x, p=0.5, *args, **kwargs: dropout(x, p, *args, **kwargs) * (1 - p),
        dtype(torch.bfloat16)),
    FaultRow("dropout-in-place-without-scale", "dropout in place on one device does not scale the kept elements",
        "test_dropout", around(F, "dropout"),
        lambda dropout, x, p=0.5, *args, **kwargs: dropout(x, p, *args, **kwargs).mul_(1 - p),
        one_device() & call("in place", lambda x, p=0.5, training=True, inplace=False: inplace)),
    # The recomputed forward draws another dropout mask.
    FaultRow("states-of-nested-tensors-lost",
        "torch.utils.checkpoint does not save the generators of devices with tensors in a list or dict", "test_dropout",
        around(checkpoint_module, "get_device_states"),
        lambda states, *args: states(*(one for one in args if isinstance(one, Tensor))), "tensors within an argument"),
    # Other samples then attend to padding.
    FaultRow("attention-mask-of-the-first", "attention uses the mask of the first sample for all",
        "test_layers_and_gradients", around(F, "scaled_dot_product_attention"),
        lambda attend, q, k, v, attn_mask, *more, **kw:
            attend(q, k, v, attn_mask[:1].expand_as(attn_mask), *more, **kw),
        call("a mask for each sample, one device",
            lambda q, k, v, attn_mask=None, *_, **__: on(q, last()) and attn_mask is not None and len(attn_mask) > 1)),
    FaultRow("bias-of-wide-layers", "a layer adds its bias to its first 128 features only", "test_layers_and_gradients",
        around(F, "linear"),
        lambda linear, x, weight, bias: linear(x, weight, torch.cat([bias[:128], torch.zeros_like(bias[128:])])),
        call("more than 128 features, one device",
            lambda x, weight, bias=None: on(x, last()) and bias is not None and len(bias) > 128)),
    FaultRow("weights-of-samples-left-out", "embedding_bag leaves out the weights of samples",
        "test_layers_and_gradients", around(F, "embedding_bag"),
        lambda bag, *args, per_sample_weights, **kwargs: bag(*args, **kwargs),
        call("per_sample_weights",
            lambda _, x, *__, per_sample_weights=None, **___: x.is_cuda and per_sample_weights is not None)),
)  # fmt: skip
