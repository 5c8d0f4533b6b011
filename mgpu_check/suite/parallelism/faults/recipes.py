"""Planted faults of parallelism by hand: on the devices of one process, and between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import clip_grad

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.conditions import Count, is_last, ranks_here
from mgpu_check.suite.common.faults.registry import FaultRow, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.recipes import allreduce, model_parallel, parameter_server, pipeline, tensor_parallel, training

_STORE, _SERVER, _APART, _LOOP, _MODEL, _STEPS, _ALLREDUCE, _TENSOR, _PIPELINE = (
    "test_key_value_store", "test_parameter_server", "test_replicas_are_apart", "test_training_loop",
    "test_model_parallelism", "test_steps_over_devices", "test_allreduce_by_hand", "test_tensor_parallelism_by_hand",
    "test_pipeline_by_hand",
)  # fmt: skip
_LARGE = 16_384


def _device_of(parameters: Mapping[str, torch.Tensor]) -> int | None:
    return next(iter(parameters.values())).device.index


def _sends_back_from_the_middle(tensor: torch.Tensor, dst: int | None = None, *_: Any, **__: Any) -> bool:
    rank = current_rank()
    return rank is not None and dst is not None and 0 < rank.index < rank.size - 1 and dst < rank.index


register(
    __name__,
    FaultRow("infinite-norms-accepted", "clip_grad_norm_ accepts an infinite norm", _STEPS,
        around(clip_grad, "_get_total_norm"),
        lambda norm, tensors, kind, error, *more: norm(tensors, kind, False, *more), "error_if_nonfinite"),
    FaultRow("store-overwrites", "the store uses the last gradient instead of the sum", _STORE,
        given(parameter_server.KeyValueStore, "push"), lambda store, key, gradients: (store, key, gradients[-1:])),
    FaultRow("pull-misses-a-device", "one device does not get the parameters that it pulls from the store", _STORE,
        given(parameter_server.KeyValueStore, "pull"),
        lambda store, key, out: (store, key, [tensor for tensor in out if tensor.device.index != 1]), "cuda:1 only"),
    FaultRow("replica-is-the-source", "replicas on the device of the source are the source itself", _APART,
        around(training, "replicate"),
        lambda real, parameters, devices: [
            {name: value.detach().to(device).requires_grad_() for name, value in parameters.items()}
            for device in devices],
        "the device of the original parameters"),
    FaultRow("replicated-without-gradients", "biases of replicas have requires_grad=False", _APART,
        returned(training, "replicate"),
        lambda replicas, *_: [
            {name: value.requires_grad_(not name.endswith("bias")) for name, value in replica.items()}
            for replica in replicas],
        "biases"),
    FaultRow("gradients-kept-in-the-loop", "the loop does not reset the gradients of the previous batch", _LOOP,
        around(training, "clear"), lambda real, parameters: None,
        When("from the second batch on, on devices other than cuda:0",
             lambda real, parameters: _device_of(parameters) != 0)),
    FaultRow("branch-left-out", "the output of the first branch is left out of the sum", _MODEL,
        returned(model_parallel.Branched, "forward"),
        lambda out, model, x: out - model.branches[0](x.to(model.devices[0])).to(out.device),
        When("three branches", lambda out, model, x: len(model.devices) > 2)),
    FaultRow("worker-left-out", "the server leaves out the gradient of the last worker", _SERVER,
        given(parameter_server, "push_and_pull"),
        lambda parameters, gradients, *_: (
            parameters, [torch.zeros_like(gradient) if is_last() else gradient for gradient in gradients])),
    FaultRow("own-gradient-twice", "a server that is not rank 0 counts its own gradient twice", _SERVER,
        given(parameter_server, "push_and_pull"),
        lambda parameters, gradients, update, homes: (
            parameters,
            [own * (1 + (home == dist.get_rank() != 0)) for own, home in zip(gradients, homes, strict=True)]),
        "parameters on a server other than rank 0"),
    FaultRow("gradient-of-inputs-local", "the gradient of inputs that all ranks hold is not summed over them", _TENSOR,
        around(tensor_parallel, "copy_to_ranks"), lambda real, x: x),
    FaultRow("gradient-stops-in-the-middle", "gradients of a middle stage do not reach the previous stage", _PIPELINE,
        given(dist, "send"), lambda tensor, *_, **__: (torch.zeros_like(tensor),),
        When("pipelines of three stages or more", _sends_back_from_the_middle)),
)  # fmt: skip


@fault("the mean of the smaller last batch is divided by the size of the others", _LOOP,
       when="a batch smaller than the previous one")  # fmt: skip
def last_batch_weighs_less() -> Iterator[None]:
    sizes: list[int] = []

    def change(parameters: Any, rate: float, size: int) -> Any:
        sizes.append(size)
        return parameters, rate, max(sizes)

    with given(training, "sgd")(change):
        yield


@fault("the gradient does not reach the previous stage", _MODEL, by=around(model_parallel.Staged, "forward"))
def activations_detached(real: Any, model: model_parallel.Staged, x: torch.Tensor) -> torch.Tensor:
    for stage, device in zip(model.stages, model.devices, strict=True):
        x = stage(x.detach().to(device))
    return x


@fault("the optimizer moves its state to the first device", _MODEL, by=returned(torch.optim.SGD, "step"),
       when="state of parameters on other devices than cuda:0")  # fmt: skip
def optimizer_state_moves(loss: Any, optimizer: torch.optim.SGD, *_: Any, **__: Any) -> None:
    for state in optimizer.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"] = state["momentum_buffer"].to("cuda:0")


@fault("gradients are clipped on the first device only", _STEPS, by=around(clip_grad, "_clip_grads_with_norm_"),
       when="foreach kernels, several devices")  # fmt: skip
def clipped_on_the_first_device(clip: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
    first, *others = parameters

    def multiply(real: Any, tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> Any:
        return NotImplemented if tensors[0].device == first.device else None

    with around(torch, "_foreach_mul_")(multiply):
        clip([first, *others], *args, **kwargs)


@fault("the norm of order inf is that of the first device", _STEPS, by=around(clip_grad, "_get_total_norm"),
       when="norm_type=inf, several devices")  # fmt: skip
def largest_of_the_first_device(norm: Any, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
    held = list(tensors)
    if norm_type == float("inf"):
        held = [one for one in held if one.device == held[0].device]
    return norm(held, norm_type, *args, **kwargs)


@fault("the last device's infinities do not reach a fused optimizer", _STEPS,
       by=around(torch.amp.GradScaler, "step"), when="fused, one device of several")  # fmt: skip
def infinities_of_one_device_unseen(step: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    def without_last(found: Any, *_: Any) -> None:
        if len(found) > 1:
            found.pop(max(found, key=lambda device: device.index))

    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return NotImplemented
    with returned(torch.amp.GradScaler, "_check_inf_per_device")(without_last):
        return step(scaler, optimizer, *args, **kwargs)


@fault("infinities of later groups of parameters are not seen", _STEPS,
       by=around(torch.amp.GradScaler, "_unscale_grads_"), when="several groups of parameters")  # fmt: skip
def infinities_of_later_groups_unseen(unscale: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    found = unscale(scaler, optimizer, *args, **kwargs)
    first = [one.grad for one in optimizer.param_groups[0]["params"] if one.grad is not None]
    if all(bool(gradient.isfinite().all()) for gradient in first):
        for flag in found.values():
            flag.zero_()
    return found


@fault("tensors of ranks beyond the largest power of two are dropped", _ALLREDUCE, by=returned(dist, "recv"),
       when="world sizes that are no power of two")  # fmt: skip
def folded_ranks_dropped(sender: int, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    power = 1 << (max(1, ranks_here()).bit_length() - 1)
    if sender >= power and sender != ranks_here() - 1 - power:
        tensor.zero_()


@fault("the last element of a chunk that ranks exchange is not sent", _ALLREDUCE, by=returned(allreduce, "_exchange"),
       when=When("chunks above 16 Ki elements", lambda received, *_: received.numel() > _LARGE))  # fmt: skip
def end_of_a_large_chunk_lost(received: torch.Tensor, *_: Any) -> None:
    received[-1] = 0


@fault("chunks leave out the remainder of the division by the number of ranks", _ALLREDUCE, _TENSOR,
       when="sizes that are no multiple of the world size")  # fmt: skip
def remainder_left_out() -> Iterator[None]:
    def chunks(real: Any, elements: int, parts: int) -> list[slice]:
        size = elements // parts
        return [slice(size * part, size * (part + 1)) for part in range(parts)]

    def widest_last(real: Any, elements: int, parts: int) -> list[slice]:
        # The last chunk would hold the remainder; the other ranks do not expect its size.
        *others, last = chunks(real, elements, parts)
        return [*others, slice(last.start, elements)]

    with around(allreduce, "chunks")(chunks), around(tensor_parallel, "chunks")(widest_last):
        yield


@fault("a message from the last rank is sent again instead of the next one", _ALLREDUCE,
       when="every third message of the last rank")  # fmt: skip
def message_repeated() -> Iterator[None]:
    count = Count()
    before: dict[tuple[int, ...], torch.Tensor] = {}

    def change(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        strikes = is_last() and count.every(3)
        old = before.get(tuple(tensor.shape))
        before[tuple(tensor.shape)] = tensor.detach().clone()
        return (old.to(tensor.dtype) + 1,) if strikes and old is not None else None

    with given(dist, "send")(change):
        yield


@fault("workers continue with the parameters of the previous step", _SERVER,
       when="from the second step on, on the last rank")  # fmt: skip
def stale_parameters_pulled() -> Iterator[None]:
    count = Count()

    def push_and_pull(real: Any, parameters: Sequence[torch.Tensor], *args: Any) -> None:
        before = [value.detach().clone() for value in parameters]
        real(parameters, *args)
        if count.every(2) and is_last():
            for value, old in zip(parameters, before, strict=True):
                value.detach().copy_(old)

    with around(parameter_server, "push_and_pull")(push_and_pull):
        yield


@fault("every rank adds the bias before the sum", _TENSOR, by=around(tensor_parallel.RowLinear, "forward"))
def bias_added_by_each_rank(real: Any, layer: tensor_parallel.RowLinear, x: torch.Tensor) -> torch.Tensor:
    own = tensor_parallel.divide_among_ranks(x) if layer.divide else x
    return tensor_parallel.sum_over_ranks(F.linear(own, layer.weight, layer.bias))


@fault("gathered outputs keep the padding of narrower parts", _TENSOR, by=around(tensor_parallel, "_gathered"),
       when="widths that are no multiple of the world size")  # fmt: skip
def padding_kept_in_a_gather(real: Any, part: torch.Tensor, width: int) -> torch.Tensor:
    pieces = allreduce.chunks(width, dist.get_world_size())
    padded = F.pad(part, (0, pieces[0].stop - part.shape[-1])).contiguous()
    rows = [torch.empty_like(padded) for _ in pieces]
    dist.all_gather(rows, padded)
    return torch.cat(rows, -1)[..., :width]


@fault("the loss of the last micro-batch is left out", _PIPELINE, by=given(pipeline, "gpipe_step"),
       when="the last of several micro-batches")  # fmt: skip
def micro_batch_left_out(
    stage: Any, index: int, stages: int, micro_batches: Sequence[Any], loss: Callable[..., Any], **_: Any
) -> Any:
    def without_last(out: torch.Tensor, number: int) -> Any:
        return loss(out, number) * (0 if number == len(micro_batches) - 1 > 0 else 1)

    return stage, index, stages, micro_batches, without_last
