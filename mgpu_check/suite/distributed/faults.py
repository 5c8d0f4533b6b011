"""Planted faults of DistributedDataParallel: its reducer, its options, its state, and training loops that use it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel, scatter_gather
from torch.nn.parallel import distributed as distributed_module
from torch.utils import _pytree as pytree

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.planting import (
    DDP,
    LAST_RANK,
    above,
    around,
    communicated,
    communicating,
    dtype,
    given,
    is_last,
    optimized,
    returned,
    slices,
    upper_bits,
    wrapped,
)
from mgpu_check.suite.common.faults.registry import FaultRow, Planter, When, caught_by, entered, fault, register
from mgpu_check.torch_hooks.patches import replaced

MANY = 1 << 16

_kept: WeakKeyDictionary[DistributedDataParallel, dict[int, Any]] = WeakKeyDictionary()


def is_first() -> bool:
    """Return whether this process is rank 0, or no rank."""
    rank = current_rank()
    return rank is None or rank.index == 0


def of_model(text: str, test: Callable[[DistributedDataParallel], bool]) -> When:
    """Return a condition on the model, which is the last argument of a change of a bucket."""
    return When(text, lambda *args: test(args[-1]))


def model_with(text: str, test: Callable[[torch.Tensor], bool]) -> When:
    """Return the condition that some parameter of the model passes `test`; see `of_model`."""
    return of_model(text, lambda model: any(map(test, model.parameters())))


def later(text: str, than: int) -> When:
    """Return the condition that the model has reduced the bucket more than `than` times before this call ends."""

    def holds(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> bool:
        counts = kept_by(model)
        counts[bucket.index()] = counts.get(bucket.index(), 0) + 1
        return bool(counts[bucket.index()] > than)

    return When(text, holds)


def slicewise(condition: When, test: Callable[[torch.Tensor], bool]) -> Planter:
    """Plant a change of the part of a bucket of each parameter that passes `test`: it gets part, parameter, model."""

    def plant(change: Callable[..., None]) -> contextlib.AbstractContextManager[None]:
        def changed(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> None:
            for parameter, piece in slices(buffer, bucket):
                if test(parameter):
                    change(piece, parameter, model)

        return communicated(changed, condition.holds)

    return plant


def hooked(call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Plant a function in place of each communication hook; it gets the hook, its state and bucket, and the model."""

    def register(real: Callable[..., Any], self: DistributedDataParallel, state: object, hook: Any) -> None:
        def planted(state: object, bucket: Any) -> Any:
            result = call(hook, state, bucket, self)
            return hook(state, bucket) if result is NotImplemented else result

        # DDP compares annotations with its own types, and does not resolve string annotations.
        planted.__annotations__.clear()
        real(self, state, planted)

    return around(DDP, "register_comm_hook")(register)


def received(change: Callable[[torch.Tensor], object]) -> contextlib.AbstractContextManager[None]:
    """Plant a change, in place, of each tensor of the state that ranks other than the first receive at the start."""

    def sync(result: None, *, module: nn.Module, **kwargs: Any) -> None:
        if not is_first():
            with torch.no_grad():
                for value in (*module.parameters(), *module.buffers()):
                    change(value)

    return returned(distributed_module, "_sync_module_states")(sync)


def changed(future: Any, change: Callable[[torch.Tensor], object]) -> Any:
    """Return a future of the result of a communication hook, after `change` has changed it in place."""

    def done(result: Any) -> torch.Tensor:
        value = result.value()
        tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
        change(tensor)
        return tensor

    return future.then(done)


def cut(values: torch.Tensor, start: int | None = None, stop: int | None = None) -> None:
    values[start:stop] = 0


def kept_by(model: DistributedDataParallel) -> dict[int, Any]:
    """Return a dictionary that lives as long as the model."""
    return _kept.setdefault(model, {})


accumulation = caught_by("test_accumulation")

_TO_ZERO = When(
    "zero_grad(set_to_none=False), gradient_as_bucket_view", lambda real, self, set_to_none=True: not set_to_none
)


@accumulation("zero_grad(set_to_none=False) keeps the gradients of the last rank",
    around(torch.optim.Optimizer, "zero_grad"), _TO_ZERO & LAST_RANK)  # fmt: skip
def views_not_set_to_zero(real: Any, self: torch.optim.Optimizer, set_to_none: bool) -> None:
    gradients = [parameter.grad for parameter in optimized(self)]
    views = [(view, view.clone()) for view in gradients if view is not None and view._is_view()]
    real(self, set_to_none)
    for view, value in views:
        view.copy_(value)


@contextlib.contextmanager
def _turned_off_within(self: DDP, restored: bool | None = None) -> Iterator[None]:
    """Hold gradients back; restore the mode of before, or `restored`, unless an exception leaves the context."""
    before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
    yield
    self.require_backward_grad_sync = before if restored is None else restored


@fault("a full backward hook is called twice for the second step", "test_gradient_hooks",
       by=around(nn.Module, "register_full_backward_hook"), when="second step")  # fmt: skip
def backward_hook_called_twice(real: Any, self: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
    calls = iter(range(1 << 30))
    return real(self, lambda *arguments: [hook(*arguments) for _ in range(1 + (next(calls) == 1))][-1], *args, **kwargs)


register(
    __name__,
    FaultRow("buffers-of-rank-0", "join takes the buffers of rank 0, though it has ended", "test_uneven_batches",
        returned(DDP, "_find_common_rank"), lambda *_: 0),
    FaultRow("divided-by-all", "join divides by the ranks that have ended, too", "test_uneven_batches",
        around(DDP, "join"), lambda real, self, **_: real(self)),
    FaultRow("no-sync-ignored", "no_sync does not hold gradients back", "test_accumulation", around(DDP, "no_sync"),
        lambda *_: contextlib.nullcontext()),
    FaultRow("inner-no-sync-ends-both", "the end of an inner no_sync ends the outer one", "test_accumulation",
        around(DDP, "no_sync"), lambda real, self: _turned_off_within(self, restored=True), "no_sync within no_sync"),
    FaultRow("no-sync-goes-on", "no_sync does not end when an exception leaves it", "test_accumulation",
        around(DDP, "no_sync"), lambda real, self: _turned_off_within(self), "an exception within no_sync"),
    FaultRow("parameter-hooks-dropped", "hooks registered on a parameter under DDP are not called",
        "test_gradient_hooks", around(torch.Tensor, "register_hook"),
        lambda real, self, hook: real(self, (lambda gradient: None) if isinstance(self, nn.Parameter) else hook)),
    FaultRow("accumulated-forgotten", "the last rank loses gradients accumulated within no_sync", "test_accumulation",
        given(DDP, "forward"), lambda self, *_, **__: [parameter.grad.zero_() for parameter in self.module.parameters()
            if self.require_backward_grad_sync and parameter.grad is not None], LAST_RANK),
)  # fmt: skip


_COMPRESSING = around(default_hooks, "_compress_hook")


@fault("the last rank keeps the result of a communication hook in the third step for all later steps",
       "test_averaging_hooks", by=hooked, when="from the fourth step on, one rank")  # fmt: skip
def third_result_kept(hook: Any, state: object, bucket: Any, model: DistributedDataParallel) -> Any:
    results = kept_by(model).setdefault(bucket.index(), [])

    def third_at_most(result: torch.Tensor) -> None:
        if is_last() and len(results) == 3:
            result.copy_(results[-1])
        else:
            results.append(result.clone())

    return changed(hook(state, bucket), third_at_most)


@fault("compressed gradients are divided after the sum instead of before", "test_compressing_hooks", by=_COMPRESSING,
       when="sums that the dtype does not hold", least_gpus=2)  # fmt: skip
def divided_after_the_sum(real: Any, dtype: torch.dtype, group: Any, bucket: Any) -> Any:
    buffer, size = bucket.buffer(), dist.get_world_size(group)
    done = dist.all_reduce(buffer.to(dtype), group=group, async_op=True).get_future()
    return done.then(lambda added: buffer.copy_(added.value()[0] / size))


register(
    __name__,
    FaultRow("hook-for-the-first-bucket", "a communication hook is not called for buckets after the first",
        "test_averaging_hooks", hooked,
        lambda hook, state, bucket, model: default_hooks.allreduce_hook(model.process_group, bucket),
        When("buckets beyond the first", lambda hook, state, bucket, model: bucket.index() > 0)),
    FaultRow("hook-with-an-offset", "the last rank adds 1 to an element of a communication hook's result",
        "test_averaging_hooks", hooked,
        lambda hook, state, bucket, *_: changed(hook(state, bucket), lambda result: result.view(-1)[:1].add_(1)),
        LAST_RANK & When("one of three buckets", lambda hook, state, bucket, model: bucket.index() % 3 == 1)),
    FaultRow("gradients-told-in-reverse", "GradBucket.gradients returns the gradients in reverse order",
        "test_averaging_hooks", returned(c10d.GradBucket, "gradients"),
        lambda gradients, *_: gradients[::-1], "buckets of several parameters"),
    FaultRow("float16-hook-in-bfloat16", "fp16_compress_hook compresses to bfloat16", "test_compressing_hooks",
        _COMPRESSING, lambda real, dtype, *args: real(torch.bfloat16, *args),
        When("float16 only", lambda real, dtype, *args: dtype == torch.float16)),
    FaultRow("bfloat16-hook-in-float32", "bf16_compress_hook does not compress", "test_compressing_hooks", _COMPRESSING,
        lambda real, dtype, *args: real(torch.float32, *args),
        When("bfloat16 only", lambda real, dtype, *args: dtype == torch.bfloat16)),
    FaultRow("compressed-mean-over-all", "a compressing hook in a group divides by the number of all ranks",
        "test_hooks_in_groups", _COMPRESSING, lambda real, dtype, group, bucket: changed(real(dtype, group, bucket),
            lambda mean: mean.mul_(dist.get_world_size(group) / dist.get_world_size())),
        "hooks with a group of some ranks", 2),
)  # fmt: skip


buffers = caught_by("test_buffers")

_UNUSED_VIEWS = of_model(
    "find_unused_parameters and gradient_as_bucket_view",
    lambda model: model.find_unused_parameters and model.gradient_as_bucket_view,
)
_WHOLE_AVERAGE = When("momentum=None", lambda real, self, x: self.momentum is None)


@buffers("non-persistent buffers are not broadcast", returned(DDP, "_assign_modules_buffers"), "persistent=False")
def unsaved_buffers_not_sent(result: None, self: DDP) -> None:
    saved = self.module.state_dict(keep_vars=True)
    self.named_module_buffers = {name: value for name, value in self.named_module_buffers.items() if name in saved}
    self.modules_buffers = list(self.named_module_buffers.values())


@buffers("BatchNorm with momentum=None uses momentum 0.1 on the last rank", around(_BatchNorm, "forward"),
    _WHOLE_AVERAGE & LAST_RANK)  # fmt: skip
def average_by_tenths(real: Any, self: Any, x: torch.Tensor) -> Any:
    with replaced(self, "momentum", 0.1):
        return real(self, x)


@fault("a rank adds the previous step's gradient for parameters that it did not use", "test_unused_parameters",
       by=communicating(_UNUSED_VIEWS), when=f"{_UNUSED_VIEWS}, from the second step on")  # fmt: skip
def unused_views_not_cleared(buffer: torch.Tensor, bucket: Any, model: DDP) -> None:
    before = kept_by(model)
    for parameter, own in slices(buffer, bucket):
        if own.any():
            before[id(parameter)] = own.clone()
        elif id(parameter) in before:
            own.copy_(before[id(parameter)])


def _is_counted_in_half(result: Any, param: torch.Tensor, value: object, *rest: Any, key: object = None) -> bool:
    return (rest[2:] or [key])[0] == "step" and isinstance(result, torch.Tensor) and param.dtype.itemsize == 2


register(
    __name__,
    FaultRow("arguments-detached", "arguments moved to the device get no gradient", "test_arguments",
        returned(distributed_module, "_to_kwargs"),
        lambda moved, *_, **__: pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, moved),
        "arguments that need gradients"),
    FaultRow("names-of-tuples-lost", "named tuples moved to the device become plain tuples", "test_arguments",
        around(scatter_gather, "_is_namedtuple"), lambda *_: False, "named tuples among the arguments"),
    FaultRow("buffers-of-the-start-sent", "buffers assigned after the wrap are not broadcast", "test_buffers",
        around(DDP, "_assign_modules_buffers"), lambda *_: None,
        When("buffers that are replaced", lambda real, self: hasattr(self, "modules_buffers"))),
    FaultRow("steps-in-a-narrow-dtype", "the number of steps of an optimizer is loaded in the dtype of its parameters",
        "test_checkpoint", returned(torch.optim.Optimizer, "_process_value_according_to_param_policy"),
        lambda result, param, *_, **__: result.to(param.dtype).to(result.dtype),
        When("narrow parameters, more steps than their dtype can count", _is_counted_in_half)),
)  # fmt: skip


models = caught_by("test_models")
buckets = caught_by("test_buckets")
unused_parameters = caught_by("test_unused_parameters")
static_graph = caught_by("test_static_graph")


def _is_long(parameter: torch.Tensor) -> bool:
    return parameter.numel() > MANY


_LATER_BUCKET = When("buckets beyond the first", lambda buffer, bucket, model: bucket.index() > 0)
_VIEWS = of_model("gradient_as_bucket_view", lambda model: model.gradient_as_bucket_view)
_STATIC = of_model("static_graph", lambda model: model.static_graph)
_UNUSED = of_model("parameters that some ranks do not use", lambda model: model.find_unused_parameters)
_SUBGROUP = of_model("subgroups", lambda model: model.process_group.size() < dist.get_world_size())
_LONG = model_with("above 64 Ki elements", _is_long)
_NOT_FIRST = of_model("ranks other than the first", lambda model: dist.get_rank(model.process_group) > 0)
_UNUSED_BY_ALL = When("parameters that no rank uses", lambda self, *args, **kwargs: self.find_unused_parameters)


@models("the last rank adds the bucket of the previous step to its own", communicating(),
    "one rank, from the second step on")  # fmt: skip
def stale_bucket(buffer: torch.Tensor, bucket: Any, model: DDP) -> torch.Tensor:
    own = kept_by(model)
    before, own[bucket.index()] = own.get(bucket.index()), buffer.clone()
    return buffer + before if before is not None and before.shape == buffer.shape and is_last() else buffer


@models("the gradient of a tied weight lacks one of its two uses", around(DDP, "forward"),
    When("parameters with two names", lambda real, self, *_, **__: hasattr(self.module, "words") and
        self.module.words.weight is getattr(getattr(self.module, "output", None), "weight", None)))  # fmt: skip
def tied_weight_counted_once(real: Any, self: DDP, *args: Any, **kwargs: Any) -> Any:
    with around(nn.Embedding, "forward")(lambda embed, *arguments: embed(*arguments).detach().requires_grad_()):
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


@unused_parameters("the mean of a gradient counts only the ranks that used the parameter", communicating(_UNUSED),
    _UNUSED)  # fmt: skip
def mean_over_users(buffer: torch.Tensor, bucket: Any, model: DDP) -> None:
    users = torch.stack([piece.any() for _, piece in slices(buffer, bucket)]).float()
    dist.all_reduce(users, group=model.process_group)
    for (_, piece), count in zip(slices(buffer, bucket), users.tolist(), strict=True):
        piece *= model.process_group.size() / max(count, 1.0)


@unused_parameters("a parameter that no rank uses gets a gradient of zeros", given(DDP, "forward"), _UNUSED_BY_ALL)
def zeros_for_the_unused(self: DDP, *args: Any, **kwargs: Any) -> None:
    for parameter in self.module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@static_graph("static_graph reduces a layer that is used twice after its first gradient", communicating(_STATIC),
    _STATIC & later("from the second step on", than=1))  # fmt: skip
def static_graph_too_early(buffer: torch.Tensor, bucket: Any, model: DDP) -> None:
    for parameter, piece in slices(buffer, bucket):
        if parameter.shape == (5, 5):  # that of the layer that is used twice
            piece *= 0.5


@static_graph("static_graph reduces the first parameter twice once its buckets are final", communicating(_STATIC),
    _STATIC & later("from the third step on", than=2))  # fmt: skip
def static_graph_settles_wrongly(buffer: torch.Tensor, bucket: Any, model: DDP) -> None:
    _, piece = next(slices(buffer, bucket))
    piece *= 2


register(
    __name__,
    FaultRow("group-ignored", "DDP ignores process_group and uses all ranks", "test_process_groups", entered,
        lambda: wrapped(process_group=None), "subgroups"),
    FaultRow("gradients-in-tf32", "DDP reduces gradients in TF32, with 11 bits of significand", "test_models",
        communicating(), lambda buffer, *_: upper_bits(buffer)),
    FaultRow("fifth-rank-left-out", "DDP leaves out the fifth rank", "test_buckets", communicating(),
        lambda buffer, *_: buffer.zero_(), When("worlds of 5 and more",
            lambda buffer, bucket, model: dist.get_rank(model.process_group) == 4), least_gpus=5),
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
        communicating(), lambda buffer, bucket, model: buffer * model.process_group.size(),
        _UNUSED & of_model("no device_ids", lambda model: model.device_ids is None), least_gpus=2),
    FaultRow("later-buckets-cut", "the last element of a bucket is not reduced", "test_buckets", communicating(),
        lambda buffer, *_: cut(buffer, -1), _LATER_BUCKET),
    FaultRow("long-gradients-cut", "elements beyond the first 64 Ki of a gradient stay local", "test_buckets",
        slicewise(_LONG, _is_long), lambda piece, *_: cut(piece, MANY), _LONG & _NOT_FIRST),
    FaultRow("views-of-static-graphs-cut", "a bucket of views loses its first element", "test_pairs_of_options",
        communicating(), lambda buffer, *_: cut(buffer, 0, 1), _VIEWS & _STATIC, 2),
    FaultRow("large-buckets-cut", "buckets above 1 MiB lose their end", "test_buckets", communicating(),
        lambda buffer, *_: cut(buffer, -64),
        When("above 1 MiB", lambda buffer, bucket, model: buffer.numel() * buffer.element_size() > 1 << 20)),
    FaultRow("views-of-buckets-cut", "one element of a gradient that is a bucket view is lost", "test_buckets",
        communicating(_VIEWS), lambda buffer, *_: cut(buffer, 0, 1),
        _VIEWS & When("small buckets", lambda buffer, bucket, model: not bucket.is_last())),
    FaultRow("rebuilt-views-cut", "views of rebuilt buckets lose their first element", "test_pairs_of_options",
        communicating(_VIEWS), lambda buffer, *_: cut(buffer, 0, 1), _VIEWS & later("from the third step on", than=2),
        2),
    FaultRow("frozen-parameters-not-sent", "frozen parameters are not broadcast at the start", "test_frozen_parameters",
        around(distributed_module, "_sync_module_states"),
        lambda real, *, module, params_and_buffers_to_ignore, **options: real(
            module=module, **options, params_and_buffers_to_ignore={*params_and_buffers_to_ignore, *(
            name for name, value in module.named_parameters() if not value.requires_grad)}),
        "parameters that need no gradient"),
)  # fmt: skip


evaluation = caught_by("test_evaluation")
autocast = caught_by("test_autocast")
clipping = caught_by("test_clipping")

_FORWARD = around(DDP, "forward")
_AFTER_FORWARD = returned(DDP, "forward")
_LOADED = around(nn.Module, "load_state_dict")
_SENT = around(DDP, "_sync_module_buffers")
_CLIPPING = around(nn.utils, "clip_grad_norm_")


def _is_channels_last(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 4 and not parameter.is_contiguous()


_HALF = model_with("float16 and bfloat16 only", lambda value: value.dtype in (torch.float16, torch.bfloat16))
_CHANNELS_LAST = model_with("channels_last only", _is_channels_last)
_UNTOLD = When("no device_ids, ranks other than the first", lambda *args, **kwargs: kwargs.get("device_ids") is None)


@buckets("DDP without device_ids keeps each rank's own parameters", around(DDP, "__init__"), _UNTOLD, least_gpus=2)
def untold_device_not_synchronized(real: Any, *args: Any, **kwargs: Any) -> None:
    with replaced(distributed_module, "_sync_module_states", lambda **_: None):
        real(*args, **kwargs)


def _buffers(model: DDP, dtype: torch.dtype) -> list[torch.Tensor]:
    return [value for value in model.module.buffers() if value.dtype == dtype]


@buffers("buffers of int64 are not sent before a step", _SENT, "int64 only")
def counts_not_sent(send: Any, self: DDP, *args: Any) -> None:
    kept = [value.clone() for value in _buffers(self, torch.int64)]
    send(self, *args)
    for value, before in zip(_buffers(self, torch.int64), kept, strict=True):
        value.copy_(before)


@fault("the last rank's gradients in half precision are rounded to 4 bits", "test_mixed_dtypes",
       by=communicating(_HALF), when=dtype(torch.float16, torch.bfloat16) & LAST_RANK)  # fmt: skip
def half_precision_rounded(buffer: torch.Tensor, *_: Any) -> torch.Tensor:
    mantissa, exponent = torch.frexp(buffer.float())
    return torch.ldexp((mantissa * 8).round() / 8, exponent).to(buffer.dtype)


def _turned(value: Any, inside: bool = False) -> Any:
    """Reverse whole numbers within lists."""
    if isinstance(value, torch.Tensor):
        return value.flip(-1) if inside and value.dtype == torch.int64 else value
    if isinstance(value, list):
        return [_turned(element, True) for element in value]
    return {key: _turned(element, inside) for key, element in value.items()} if isinstance(value, dict) else value


@evaluation("eval() of DDP does not reach the modules within", around(DDP, "train"))
def evaluation_stays_outside(real: Any, self: DDP, mode: bool = True) -> DDP:
    self.training = mode
    return self


@autocast("autocast is off within DDP on the last rank", _FORWARD, LAST_RANK)
def autocast_off_within(real: Any, self: DDP, *args: Any, **kwargs: Any) -> Any:
    device = next(self.module.parameters()).device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext():
        return real(self, *args, **kwargs)


@fault("the last rank does not halve its loss scale", "test_scaler", by=around(torch.amp.GradScaler, "update"),
       when="one rank, after a skipped step")  # fmt: skip
def scale_not_halved(real: Any, self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
    before = self.get_scale()
    real(self, *args, **kwargs)
    if is_last() and self.get_scale() < before:
        real(self, before)


@clipping("clipping scales by a norm in float16 on the last rank", _CLIPPING, LAST_RANK)
def norm_in_float16(real: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    every = list(parameters)
    norm = real(every, *args, **kwargs)
    for parameter in every:
        parameter.grad *= 1 + 2**-11
    return norm


register(
    __name__,
    FaultRow("scalar-parameters-not-sent", "parameters without dimensions are not sent at the start",
        "test_state_of_the_start", received, lambda value: value.zero_(),
        When("parameters without dimensions", lambda value: isinstance(value, nn.Parameter) and not value.dim())),
    FaultRow("bfloat16-sent-as-float16", "parameters in bfloat16 are sent as float16", "test_state_of_the_start",
        received, lambda value: value.copy_(value.to(torch.float16)), dtype(torch.bfloat16)),
    FaultRow("nan-sent-as-zero", "NaN arrive at the start as zeros", "test_state_of_the_start", received,
        lambda value: value.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf),
        When("NaN only", lambda value: value.dtype == torch.float32)),
    FaultRow("buffers-of-static-graphs-not-sent", "buffers are not sent before a step with static_graph",
        "test_buffers", _SENT, lambda *_: None, When("static_graph", lambda send, self, *_: self.static_graph), 2),
    FaultRow("float64-reduced-in-float32", "gradients in float64 are reduced in float32", "test_mixed_dtypes",
        communicating(model_with("float64 only", lambda parameter: parameter.dtype == torch.float64)),
        lambda buffer, *_: buffer.float().double(), dtype(torch.float64)),
    FaultRow("layout-taken-as-contiguous", "gradients in channels_last are read as if they were contiguous",
        "test_channels_last", slicewise(_CHANNELS_LAST, _is_channels_last),
        lambda piece, parameter, *_: piece.copy_(piece.clone().view(parameter.shape).permute(0, 2, 3, 1).reshape(-1)),
        str(_CHANNELS_LAST)),
    FaultRow("listed-numbers-reversed", "whole numbers in a container arrive in reverse order", "test_arguments",
        _FORWARD, lambda real, self, *args, **kwargs: real(self, *args, **_turned(kwargs)), "int64 within a list"),
    FaultRow("infinities-lost", "infinite gradients become large finite ones", "test_scaler", communicating(),
        lambda buffer, *_: buffer.nan_to_num(nan=0.0), "infinities only"),
    FaultRow("optimizer-state-not-loaded", "an optimizer's state is not loaded", "test_checkpoint",
        around(torch.optim.Optimizer, "load_state_dict"), lambda real, self, state: real(self, state | {"state": {}}),
        "optimizers with state"),
    FaultRow("map-location-ignored", "a checkpoint is loaded to the device that it was saved from", "test_checkpoint",
        around(torch, "load"), lambda real, *args, map_location=None, **kwargs: real(*args, **kwargs),
        "ranks other than the first"),
    FaultRow("norm-without-biases", "clipping uses the norm of weights only, without biases", "test_clipping",
        _CLIPPING, lambda real, parameters, *args, **kwargs:
            real([parameter for parameter in parameters if parameter.dim() > 1], *args, **kwargs), When("order 2",
            lambda real, parameters, most, norm_type=2.0, **kwargs: norm_type == 2.0)),
    FaultRow("long-parameters-cut", "elements beyond the first 64 Ki are not sent at the start",
        "test_state_of_the_start", received, lambda value: cut(value.view(-1), MANY), above(MANY)),
    FaultRow("imaginary-parts-of-gradients-lost", "the imaginary parts of complex parameters are not sent",
        "test_state_of_the_start", received, lambda value: torch.view_as_real(value.detach())[..., 1].zero_(),
        When("complex only", torch.is_complex)),
    FaultRow("evaluation-cut", "the last row of an odd batch in evaluation is left as zeros", "test_evaluation",
        _AFTER_FORWARD, lambda out, *_, **__: cut(out, -1), When("evaluation, odd batch sizes",
            lambda out, self, *args, **kw: not self.training and isinstance(out, torch.Tensor) and len(out) % 2 > 0)),
    FaultRow("biases-not-loaded", "parameters with one dimension are not loaded on the last rank", "test_checkpoint",
        _LOADED, lambda real, self, state, *args, **kwargs: real(self, {**state, **{
            name: value.clone() for name, value in self.state_dict().items() if value.dim() == 1}}, *args, **kwargs),
        LAST_RANK & When("one dimension",
            lambda real, self, state, *args, **kw: any(value.dim() == 1 for value in state.values()))),
    FaultRow("counts-sent-as-float64", "buffers of int64 are sent as float64", "test_buffers",
        returned(DDP, "_sync_module_buffers"), lambda result, self, *_: [value.copy_(value.double())
            for value in _buffers(self, torch.int64) if not is_first()], "int64 only, above 2^53"),
)  # fmt: skip
