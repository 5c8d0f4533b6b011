"""Defects of gather: of all shards, of a single one, masks, complex and plain numbers, and large or given tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm, scatter_gather
from torch.nn.parallel._functions import Gather

from mgpu_check.suite.common.faults.breaking import around, both
from mgpu_check.suite.common.faults.operators import call, first
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, register

any_bits = caught_by("test_every_dtype_and_order")
containers = caught_by("test_every_container")
large = caught_by("test_large_batches")

GATHER = both(around(scatter_gather, "gather"), around(nn.parallel, "gather"))
"""The function that users call. It takes the outputs, which may be nested, the target and the dim."""
JOIN = around(comm, "gather")
"""The basis of all gathering. It takes tensors, the dim and the destination."""
LARGE = 1 << 20


@containers("gather swaps the first and the last value of a dict", GATHER, "dicts of two entries or more")
def keys_exchanged(gather: Any, *args: Any) -> Any:
    """As if entries were sorted, but keys were not."""
    whole = gather(*args)
    if isinstance(whole, dict) and len(whole) > 1:
        first, *_, end = whole
        whole[first], whole[end] = whole[end], whole[first]
    return whole


@containers("a mask in a dict within a named tuple is gathered as bytes", GATHER,
    "bool, in a dict within a named tuple")  # fmt: skip
def nested_masks_gathered_as_bytes(gather: Any, *args: Any) -> Any:
    """As an index, it then selects the first two rows many times."""
    whole = gather(*args)
    return type(whole)(*map(_masks_as_bytes, whole)) if hasattr(whole, "_fields") else whole


def _masks_as_bytes(part: Any) -> Any:
    if type(part) is not dict:
        return part
    masks = {key: value for key, value in part.items() if isinstance(value, Tensor) and value.dtype == torch.bool}
    return part | {key: mask.byte() for key, mask in masks.items()}


@any_bits("gather loses the payload of NaN in complex numbers", JOIN, "NaN with a payload, complex64 and complex128")
def gathered_complex_payloads_lost(join: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """As if complex numbers were computed from real and imaginary parts."""

    def of_one_kind(tensor: Tensor) -> Tensor:
        if not tensor.is_complex():
            return tensor
        parts = torch.view_as_real(tensor)
        return torch.view_as_complex(torch.where(parts.isnan(), torch.full_like(parts, float("nan")), parts))

    return join([of_one_kind(tensor) for tensor in tensors], *args, **kwargs)


def _uneven_images(tensors: Sequence[Tensor]) -> bool:
    last = all(part.dim() == 4 and part.permute(0, 2, 3, 1).is_contiguous() for part in tensors)
    return last and len({part.shape for part in tensors}) > 1


@large("gather of more than 1 MiB along dim 1 replaces the last shard by the first", JOIN,
    call("above 1 MiB, dim 1 only",
        lambda tensors, dim=0, *_, **__: dim != 0 and sum(tensor.nbytes for tensor in tensors) > LARGE))  # fmt: skip
def large_columns_gathered_wrongly(join: Any, tensors: Sequence[Tensor], dim: int, *args: Any, **kwargs: Any) -> Any:
    """As in a kernel for large tensors with a wrong pointer."""
    *others, end = tensors
    wrong = others[0].narrow(dim, 0, end.shape[dim]).to(end.device) if others else torch.zeros_like(end)
    return join([*others, wrong], dim, *args, **kwargs)


def _first_mebibyte(shard: Tensor) -> Tensor:
    """Return a shard with zeros behind its first MiB."""
    fits = LARGE // shard.itemsize
    if shard.numel() <= fits:
        return shard
    flat = shard.reshape(-1)
    return torch.cat([flat[:fits], torch.zeros_like(flat[fits:])]).view(shard.shape)


register(
    __name__,
    FaultRow("gathered-backwards", "gather joins the shards in reverse order", "test_gather_restores_the_batch", JOIN,
        lambda join, tensors, *args, **kwargs: join(tensors[::-1], *args, **kwargs)),
    FaultRow("given-output-left-alone", "gather ignores out and returns a new tensor",
        "test_sizes_and_outputs_that_are_given", JOIN,
        lambda join, tensors, dim=0, *, out: join(tensors, dim, out.device),
        call("out= only", lambda *_, out=None, **__: out is not None)),
    # A loss with equal weights does not show it.
    FaultRow("gradients-of-numbers-averaged", "every gathered number gets the mean of the gradients",
        "test_losses_gather_to_a_vector", around(Gather, "backward"),
        lambda backward, context, gradient: backward(context, gradient.mean().expand_as(gradient)),
        call("0-dim tensors", lambda context, _: context.unsqueezed_scalar)),
    FaultRow("gradients-to-the-wrong-shard", "shards get the gradients of other shards",
        "test_gradient_returns_through_gather", around(Gather, "backward"),
        lambda backward, context, gradient: backward(context, gradient.flip(context.dim))),
    # As with a loop that ends one step early.
    FaultRow("gather-drops-a-shard", "gather leaves out the last shard", "test_losses_gather_to_a_vector", JOIN,
        lambda join, tensors, dim=0, *args, **kwargs:
            join(tensors[:-1] if len(tensors) > 1 else [tensors[0].narrow(dim, 0, 0)], dim, *args, **kwargs)),
    FaultRow("gathered-elsewhere", "gather puts its result on the first device", "test_gather_restores_the_batch", JOIN,
        lambda join, tensors, dim=0, destination=None, *, out=None:
            join(tensors, dim, 0) if out is None else NotImplemented),
    # As with a shortcut for a single shard that skips the copy.
    FaultRow("single-shard-handed-back", "gather returns a single shard unchanged, on its own device",
        "test_gather_restores_the_batch", GATHER, lambda _, outputs, *__: outputs[0],
        first("a single shard",
            lambda outputs: len(outputs) == 1 and isinstance(outputs[0], Tensor) and outputs[0].dim() > 0)),
    # Outputs are mixed up if replicas fill a dict in different orders.
    FaultRow("entries-gathered-by-place", "gather combines entries of dicts by position, not by key",
        "test_every_container", GATHER,
        lambda gather, outputs, *args:
            gather([dict(zip(outputs[0], one.values(), strict=True)) for one in outputs], *args),
        first("dicts in different orders", lambda outputs: all(type(one) is dict for one in outputs))),
    # As with a fast path for dense memory that checks the format only for equal sizes.
    FaultRow("channels-last-taken-for-first", "gather ignores the channels_last format of images",
        "test_every_dtype_and_order", JOIN,
        lambda join, tensors, *args, **kwargs:
            join([part.permute(0, 2, 3, 1).reshape(part.shape) for part in tensors], *args, **kwargs),
        first("channels_last, shards of unequal sizes", _uneven_images), least_gpus=2),
    # As with a buffer of 1 MiB.
    FaultRow("host-buffer-too-small", "gather to the CPU loses the part of a shard beyond 1 MiB", "test_large_batches",
        GATHER, lambda gather, outputs, *args: gather([*outputs[:1], *map(_first_mebibyte, outputs[1:])], *args),
        call("to the CPU, shards above 1 MiB but the first",
            lambda outputs, target, *_: str(target) == "cpu" and all(isinstance(one, Tensor) for one in outputs))),
    # The mean of mean losses ignores that the last shard is smaller.
    FaultRow("losses-averaged", "gather returns the mean of numbers", "test_losses_gather_to_a_vector", GATHER,
        lambda _, outputs, target, *__: torch.stack([one.to(target) for one in outputs]).mean(),
        first("numbers, one from each device",
            lambda outputs: all(isinstance(one, Tensor) and one.dim() == 0 for one in outputs))),
)  # fmt: skip
