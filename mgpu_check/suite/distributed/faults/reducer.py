"""Planted faults of the reducer of DistributedDataParallel: its buckets, parameters and process groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as distributed_module

from mgpu_check.suite.common.faults.breaking import (
    DDP,
    around,
    communicated,
    communicating,
    given,
    optimized,
    returned,
    slices,
    upper_bits,
    wrapped,
)
from mgpu_check.suite.common.faults.conditions import LAST_RANK, is_last
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, entered, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.distributed.faults.planting import MANY, later, model_with, of_model, slicewise

models = caught_by("test_models")
buckets = caught_by("test_buckets")
unused_parameters = caught_by("test_unused_parameters")
pairs = caught_by("test_pairs_of_options", least_gpus=2)
static_graph = caught_by("test_static_graph")


def _is_of_words(parameter: torch.Tensor) -> bool:
    """Return whether this is the weight of an embedding."""
    return parameter.dim() == 2 and parameter.shape[0] == 12


def _is_long(parameter: torch.Tensor) -> bool:
    return parameter.numel() > MANY


def _is_used_twice(parameter: torch.Tensor) -> bool:
    return parameter.shape == (5, 5)


_FIFTH = When("worlds of 5 and more", lambda buffer, bucket, model: dist.get_rank(model.process_group) == 4)
_LATER_BUCKET = When("buckets beyond the first", lambda buffer, bucket, model: bucket.index() > 0)
_SMALL_BUCKET = When("small buckets", lambda buffer, bucket, model: not bucket.is_last())
_VIEWS = of_model("gradient_as_bucket_view", lambda model: model.gradient_as_bucket_view)
_WITHOUT_IDS = of_model("no device_ids", lambda model: model.device_ids is None)
_STATIC = of_model("static_graph", lambda model: model.static_graph)
_UNUSED = of_model("parameters that some ranks do not use", lambda model: model.find_unused_parameters)
_SUBGROUP = of_model("subgroups", lambda model: model.process_group.size() < dist.get_world_size())
_WORDS = model_with("embeddings only", _is_of_words)
_LONG = model_with("above 64 Ki elements", _is_long)
_NOT_FIRST = of_model("ranks other than the first", lambda model: dist.get_rank(model.process_group) > 0)
_UNUSED_BY_ALL = When("parameters that no rank uses", lambda self, *args, **kwargs: self.find_unused_parameters)


@models("the last rank adds the bucket of the previous step to its own", when="one rank, from the second step on")
def stale_bucket() -> Iterator[None]:
    kept: WeakKeyDictionary[DistributedDataParallel, dict[int, torch.Tensor]] = WeakKeyDictionary()

    def stale(buffer: torch.Tensor, bucket: Any, model: DDP) -> torch.Tensor:
        own = kept.setdefault(model, {})
        before, own[bucket.index()] = own.get(bucket.index()), buffer.clone()
        return buffer + before if before is not None and before.shape == buffer.shape and is_last() else buffer

    with communicated(stale):
        yield


def _is_tied(real: object, self: DDP, *args: Any, **kwargs: Any) -> bool:
    words, output = (getattr(self.module, name, None) for name in ("words", "output"))
    return words is not None and getattr(output, "weight", None) is words.weight


@models("the gradient of a tied weight lacks one of its two uses", around(DDP, "forward"),
    When("parameters with two names", _is_tied))  # fmt: skip
def tied_weight_counted_once(real: Any, self: DDP, *args: Any, **kwargs: Any) -> Any:
    with around(nn.Embedding, "forward")(lambda embed, *given: embed(*given).detach().requires_grad_()):
        return real(self, *args, **kwargs)


@models("Adam computes in bfloat16 on the last rank", when="one rank, Adam only")
def adam_in_bfloat16() -> Iterator[None]:
    def narrow(result: Any, self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in optimized(self) if is_last() else ():
                parameter.copy_((parameter + 0.01).to(torch.bfloat16))

    with returned(torch.optim.Adam, "step")(narrow):
        # torch marks wrapped methods so. Without the mark, AdamW would keep a wrapper of this step after the fault.
        torch.optim.Adam.step.hooked = True  # type: ignore[attr-defined]
        yield


@buckets("the last element of a bucket is not reduced", communicating(), _LATER_BUCKET)
def later_buckets_cut(buffer: torch.Tensor, *_: Any) -> None:
    buffer[-1:] = 0


@buckets("elements beyond the first 64 Ki of a gradient stay local", slicewise(_LONG, _is_long), _LONG & _NOT_FIRST)
def long_gradients_cut(part: torch.Tensor, *_: Any) -> None:
    part[MANY:] = 0


@pairs("a bucket of views loses its first element", communicating(), _VIEWS & _STATIC)
def views_of_static_graphs_cut(buffer: torch.Tensor, *_: Any) -> None:
    buffer[:1] = 0


@buckets("buckets above 1 MiB lose their end", communicating(),
    When("above 1 MiB", lambda buffer, bucket, model: buffer.numel() * buffer.element_size() > 1 << 20))  # fmt: skip
def large_buckets_cut(buffer: torch.Tensor, *_: Any) -> None:
    buffer[-64:] = 0


@buckets("one element of a gradient that is a bucket view is lost", communicating(_VIEWS), _VIEWS & _SMALL_BUCKET)
def views_of_buckets_cut(buffer: torch.Tensor, *_: Any) -> None:
    buffer[:1] = 0


@unused_parameters("the mean of a gradient counts only the ranks that used the parameter", communicating(_UNUSED),
    _UNUSED)  # fmt: skip
def mean_over_users(buffer: torch.Tensor, bucket: Any, model: DDP) -> None:
    used = torch.stack([part.any() for _, part in slices(buffer, bucket)]).float()
    dist.all_reduce(used, group=model.process_group)
    for (_, part), count in zip(slices(buffer, bucket), used.tolist(), strict=True):
        part *= model.process_group.size() / max(count, 1.0)


@unused_parameters("a parameter that no rank uses gets a gradient of zeros", given(DDP, "forward"), _UNUSED_BY_ALL)
def zeros_for_the_unused(self: DDP, *args: Any, **kwargs: Any) -> None:
    for parameter in self.module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@static_graph("static_graph reduces a layer that is used twice after its first gradient", communicating(_STATIC),
    _STATIC & later("from the second step on", than=1))  # fmt: skip
def static_graph_too_early(buffer: torch.Tensor, bucket: Any, model: DDP) -> None:
    for parameter, part in slices(buffer, bucket):
        if _is_used_twice(parameter):
            part *= 0.5


@static_graph("static_graph reduces the first parameter twice once its buckets are final", communicating(_STATIC),
    _STATIC & later("from the third step on", than=2))  # fmt: skip
def static_graph_settles_wrongly(buffer: torch.Tensor, bucket: Any, model: DDP) -> None:
    _, part = next(slices(buffer, bucket))
    part *= 2


@pairs("views of rebuilt buckets lose their first element", communicating(_VIEWS),
    _VIEWS & later("from the third step on", than=2))  # fmt: skip
def rebuilt_views_cut(buffer: torch.Tensor, *_: Any) -> None:
    buffer[:1] = 0


@fault("frozen parameters are not broadcast at the start", "test_frozen_parameters",
       by=around(distributed_module, "_sync_module_states"), when="parameters that need no gradient")  # fmt: skip
def frozen_parameters_not_sent(real: Any, *, module: nn.Module, params_and_buffers_to_ignore: Any, **more: Any) -> None:
    frozen = [name for name, value in module.named_parameters() if not value.requires_grad]
    real(module=module, params_and_buffers_to_ignore={*params_and_buffers_to_ignore, *frozen}, **more)


register(
    __name__,
    FaultRow("group-ignored", "DDP ignores process_group and uses all ranks", "test_process_groups", entered,
        lambda: wrapped(process_group=None), "subgroups"),
    FaultRow("gradients-in-tf32", "DDP reduces gradients in TF32, with 11 bits of significand", "test_models",
        communicating(), lambda buffer, *_: upper_bits(buffer)),
    FaultRow("odd-rows-repeated", "the last row of an odd number is a copy of the first", "test_models",
        around(DDP, "forward"),
        lambda real, self, x, *args, **kwargs: real(self, torch.cat([x[:-1], x[:1]]), *args, **kwargs),
        When("odd batch sizes", lambda real, self, x, *args, **kw: isinstance(x, torch.Tensor) and len(x) % 2 > 0)),
    FaultRow("embedding-left-local", "gradients of embeddings include the first rank only", "test_models",
        slicewise(_WORDS, _is_of_words), lambda part, *_: part.zero_(), _WORDS & _NOT_FIRST),
    FaultRow("fifth-rank-left-out", "DDP leaves out the fifth rank", "test_buckets", communicating(),
        lambda buffer, *_: buffer.zero_(), _FIFTH, least_gpus=5),
    FaultRow("rebuilt-buckets-rotated", "one of the rebuilt buckets is reduced in the old order", "test_buckets",
        communicating(), lambda buffer, *_: buffer.roll(1), later("third step", than=1) & _LATER_BUCKET & LAST_RANK),
    FaultRow("left-out-from-the-fourth-step", "the mean leaves out the last rank from the fourth step on",
        "test_gradient_hooks", communicating(), lambda buffer, *_: buffer * 0,
        later("from the fourth step on", than=3) & LAST_RANK),
    FaultRow("ignored-parameters-averaged", "ignored parameters are averaged, too", "test_frozen_parameters",
        around(DDP, "_set_params_and_buffers_to_ignore_for_model"), lambda *_: None),
    FaultRow("divided-by-the-world", "gradients in a group are divided by the number of all ranks",
        "test_process_groups", communicating(_SUBGROUP),
        lambda buffer, bucket, model: buffer * (model.process_group.size() / dist.get_world_size()), _SUBGROUP),
    FaultRow("summed-without-device-ids", "gradients are not averaged without device_ids", "test_pairs_of_options",
        communicating(), lambda buffer, bucket, model: buffer * model.process_group.size(), _UNUSED & _WITHOUT_IDS,
        least_gpus=2),
)  # fmt: skip
