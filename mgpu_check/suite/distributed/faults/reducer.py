"""Planted faults of the reducer of DistributedDataParallel: its buckets, parameters and process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as distributed_module

from mgpu_check.suite.common.faults.breaking import (
    DDP,
    communicated,
    replaced_method,
    slices,
    upper_bits,
    wrapped,
)
from mgpu_check.suite.common.faults.conditions import is_last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

_MANY = 1 << 16


class _Calls:
    """Counts how often each model reduced the bucket of one index."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[DistributedDataParallel, dict[int, int]] = WeakKeyDictionary()

    def next(self, bucket: Any, model: DistributedDataParallel) -> int:
        seen = self._seen.setdefault(model, {})
        seen[bucket.index()] = seen.get(bucket.index(), 0) + 1
        return seen[bucket.index()]


def _is_of_words(parameter: torch.Tensor) -> bool:
    """Return whether this is the weight of an embedding."""
    return parameter.dim() == 2 and parameter.shape[0] == 12


def _is_long(parameter: torch.Tensor) -> bool:
    return parameter.numel() > _MANY


# Models


@fault("DDP reduces gradients in TF32, with 11 bits of significand", "test_models")
def gradients_in_tf32() -> Iterator[None]:
    def narrow(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        return upper_bits(buffer)

    with communicated(narrow):
        yield


@fault(
    "the last rank adds the bucket of the previous step to its own",
    "test_models",
    condition="one rank, from the second step on",
)
def stale_bucket() -> Iterator[None]:
    kept: WeakKeyDictionary[DistributedDataParallel, dict[int, torch.Tensor]] = WeakKeyDictionary()

    def stale(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        own = kept.setdefault(model, {})
        before, own[bucket.index()] = own.get(bucket.index()), buffer.clone()
        return buffer + before if before is not None and before.shape == buffer.shape and is_last() else buffer

    with communicated(stale):
        yield


@fault("the gradient of a tied weight lacks one of its two uses", "test_models", condition="parameters with two names")
def tied_weight_counted_once() -> Iterator[None]:
    def once(real: Callable[..., Any], self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        shared = self.module
        words = getattr(shared, "words", None)
        if words is None or getattr(getattr(shared, "output", None), "weight", None) is not words.weight:
            return real(self, *args, **kwargs)
        with replaced_method(nn.Embedding, "forward", lambda embed, *given: embed(*given).detach().requires_grad_()):
            return real(self, *args, **kwargs)

    with replaced_method(DDP, "forward", once):
        yield


@fault("the last row of an odd number is a copy of the first", "test_models", condition="odd batch sizes")
def odd_rows_repeated() -> Iterator[None]:
    def repeat(real: Callable[..., Any], self: DistributedDataParallel, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, torch.Tensor) and len(x) % 2 and len(x) > 1:
            x = torch.cat([x[:-1], x[:1]])
        return real(self, x, *args, **kwargs)

    with replaced_method(DDP, "forward", repeat):
        yield


@fault("Adam computes in bfloat16 on the last rank", "test_models", condition="one rank, Adam only")
def adam_in_bfloat16() -> Iterator[None]:
    def step(real: Callable[..., Any], self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        if is_last():
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.copy_((parameter + 0.01).to(torch.bfloat16))
        return result

    with replaced_method(torch.optim.Adam, "step", step):
        # torch marks wrapped methods so. Without the mark, AdamW would keep a wrapper of this step after the fault.
        torch.optim.Adam.step.hooked = True  # type: ignore[attr-defined]
        yield


@fault("gradients of embeddings include the first rank only", "test_models", condition="embeddings only")
def embedding_left_local() -> Iterator[None]:
    def local(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        rank = dist.get_rank(model.process_group)
        for parameter, part in slices(buffer, bucket):
            if _is_of_words(parameter) and rank:
                part.zero_()
        return buffer

    with communicated(local, where=lambda model: any(map(_is_of_words, model.parameters()))):
        yield


# Buckets


@fault("DDP leaves out the fifth rank", "test_buckets", condition="worlds of 5 and more", least_gpus=5)
def fifth_rank_left_out() -> Iterator[None]:
    def leave_out(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        return buffer.zero_() if dist.get_rank(model.process_group) == 4 else buffer

    with communicated(leave_out):
        yield


@fault("the last element of a bucket is not reduced", "test_buckets", condition="buckets beyond the first")
def later_buckets_cut() -> Iterator[None]:
    def cut(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        if bucket.index():
            buffer[-1:] = 0
        return buffer

    with communicated(cut):
        yield


@fault("elements beyond the first 64 Ki of a gradient stay local", "test_buckets", condition="above 64 Ki elements")
def long_gradients_cut() -> Iterator[None]:
    def cut(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        for parameter, part in slices(buffer, bucket):
            if _is_long(parameter) and dist.get_rank(model.process_group):
                part[_MANY:] = 0
        return buffer

    with communicated(cut, where=lambda model: any(map(_is_long, model.parameters()))):
        yield


@fault(
    "one of the rebuilt buckets is reduced in the old order",
    "test_buckets",
    condition="third step, buckets beyond the first",
)
def rebuilt_buckets_rotated() -> Iterator[None]:
    calls = _Calls()

    def rotate(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        again = calls.next(bucket, model) > 1
        return buffer.roll(1) if again and bucket.index() and is_last() else buffer

    with communicated(rotate):
        yield


@fault(
    "one element of a gradient that is a bucket view is lost",
    "test_buckets",
    condition="gradient_as_bucket_view, small buckets",
)
def views_of_buckets_cut() -> Iterator[None]:
    def cut(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        if not bucket.is_last():
            buffer[:1] = 0
        return buffer

    with communicated(cut, where=lambda model: model.gradient_as_bucket_view):
        yield


@fault(
    "the mean leaves out the last rank from the fourth step on",
    "test_gradient_hooks",
    condition="from the fourth step on, one rank",
)
def left_out_from_the_fourth_step() -> Iterator[None]:
    calls = _Calls()

    def leave_out(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        return buffer * 0 if calls.next(bucket, model) > 3 and is_last() else buffer

    with communicated(leave_out):
        yield


# Which parameters


@fault(
    "the mean of a gradient counts only the ranks that used the parameter",
    "test_unused_parameters",
    condition="parameters that some ranks do not use",
)
def mean_over_users() -> Iterator[None]:
    def over_users(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        used = torch.stack([part.any() for _, part in slices(buffer, bucket)]).float()
        group = model.process_group
        dist.all_reduce(used, group=group)
        for (_, part), count in zip(slices(buffer, bucket), used.tolist(), strict=True):
            part *= group.size() / max(count, 1.0)
        return buffer

    with communicated(over_users, where=lambda model: model.find_unused_parameters):
        yield


@fault(
    "a parameter that no rank uses gets a gradient of zeros",
    "test_unused_parameters",
    condition="parameters that no rank uses",
)
def zeros_for_the_unused() -> Iterator[None]:
    def zeros(real: Callable[..., Any], self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if self.find_unused_parameters:
            for parameter in self.module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return real(self, *args, **kwargs)

    with replaced_method(DDP, "forward", zeros):
        yield


@fault(
    "static_graph reduces a layer that is used twice after its first gradient",
    "test_static_graph",
    condition="static_graph, from the second step on",
)
def static_graph_too_early() -> Iterator[None]:
    calls = _Calls()

    def early(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        if calls.next(bucket, model) > 1:
            for parameter, part in slices(buffer, bucket):
                if parameter.shape == (5, 5):
                    part *= 0.5
        return buffer

    with communicated(early, where=lambda model: model.static_graph):
        yield


@fault(
    "frozen parameters are not broadcast at the start",
    "test_frozen_parameters",
    condition="parameters that need no gradient",
)
def frozen_parameters_not_sent() -> Iterator[None]:
    def without(real: Callable[..., Any], **kwargs: Any) -> None:
        module = kwargs["module"]
        frozen = {name for name, value in module.named_parameters() if not value.requires_grad}
        real(**(kwargs | {"params_and_buffers_to_ignore": {*kwargs["params_and_buffers_to_ignore"], *frozen}}))

    with replaced_method(distributed_module, "_sync_module_states", without):
        yield


@fault("ignored parameters are averaged, too", "test_frozen_parameters")
def ignored_parameters_averaged() -> Iterator[None]:
    with replaced(DDP, "_set_params_and_buffers_to_ignore_for_model", staticmethod(lambda module, names: None)):
        yield


# Groups


@fault("DDP ignores process_group and uses all ranks", "test_process_groups", condition="subgroups")
def group_ignored() -> Iterator[None]:
    with wrapped(process_group=None):
        yield


@fault("gradients in a group are divided by the number of all ranks", "test_process_groups", condition="subgroups")
def divided_by_the_world() -> Iterator[None]:
    def divide(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        return buffer * (model.process_group.size() / dist.get_world_size())

    with communicated(divide, where=lambda model: model.process_group.size() < dist.get_world_size()):
        yield
