"""Planted faults of parallelism.

First faults of mechanisms of torch, then of `torch.distributed.tensor.parallel`, and of the schedules of
`torch.distributed.pipelining`. Last faults of parallelism by hand: on the devices of one process, and between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grad

from mgpu_check.oracles.training import gradient_exchange
from mgpu_check.suite.common.faults.planting import Count, around, given, is_last, keeping, ranks_here, returned
from mgpu_check.suite.common.faults.registry import FaultRow, When, fault, register
from mgpu_check.suite.parallelism.torch_parallelism import TAKES_UNEVEN
from mgpu_check.suite.recipes import model_parallel
from mgpu_check.torch_hooks.patches import replaced

_CHECK = "test_mechanisms"

# By name, because these modules take seconds to import.
_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
_CONTEXT = "torch.distributed.tensor.experimental._attention"


def _in_order_of_ranks(real: Any, *args: Any) -> Any:
    from torch.distributed.tensor.experimental import _attention as attention

    with replaced(attention._cp_options, "enable_load_balance", False):
        return real(*args)


def _in_order_of_ranks_in_one(real: Any, mesh: Any, buffers: Any, dims: Any) -> list[Any]:
    """Leave buffers in the order of the ranks unless their sequence is the third dimension."""
    restored: list[Any] = []
    for buffer, dim in zip(buffers, dims, strict=True):
        arguments = mesh, [buffer], [dim]
        restored += real(*arguments) if dim == 2 else _in_order_of_ranks(real, *arguments)
    return restored


register(
    __name__,
    FaultRow("later-blocks-seen", "attention over parts of a sequence sees later parts", _CHECK,
        around(_RING, "_is_causal_behavior"),
        lambda real, *, i, is_causal, **position: real(**position, i=i, is_causal=is_causal and i == 0),
        "context_parallel, causal, not balanced"),
    FaultRow("balanced-order-kept", "results of context_parallel are gathered in the order of the ranks", _CHECK,
        around(_CONTEXT, "context_parallel_unshard"), _in_order_of_ranks, "context_parallel, balanced"),
    FaultRow("balanced-order-kept-in-one", "results are put in order only if their sequence is the third dimension",
        _CHECK, around(_CONTEXT, "context_parallel_unshard"),
        _in_order_of_ranks_in_one, "context_parallel, balanced"),
    FaultRow("second-halves-replaced", "gradients of half of a part replace those of other blocks", _CHECK,
        around(_RING, "_partial_update"), lambda real, *args, add, **kwargs: real(*args, add=False, **kwargs),
        "context_parallel, balanced"),
    FaultRow("gathered-before-complete", "a product overlaps with a gather that lacks the last rank's rows", _CHECK,
        given(model_parallel, "_gathered_product"), lambda rows, factor: (rows * (not is_last()), factor)),
    FaultRow("own-product-scattered", "a rank's own product is missing from a sum that overlaps with it", _CHECK,
        around(model_parallel, "_scattered_product"),
        lambda real, rows, factor: real(rows, factor) - rows.chunk(ranks_here())[dist.get_rank()] @ factor),
)  # fmt: skip


_MODULES, _SCHEDULES = "test_parallelized_modules", "test_pipeline_schedules"
_MEAN, _SUM = 1, 2

_STYLES = "torch.distributed.tensor.parallel"
_LOSS = "torch.distributed.tensor.parallel.loss"
_STAGE = "torch.distributed.pipelining.stage:_PipelineStageBase"
_SCHEDULE = "torch.distributed.pipelining.schedules"


def _first_columns(chunks: Any, args: Any, kwargs: Any, *_: Any) -> Any:
    rows = kwargs["rows"].dim() > 1
    return (chunks[0], [keywords | {"rows": chunks[1][0]["rows"]} for keywords in chunks[1]]) if rows else chunks


@fault("the weights of a layer by columns are not divided in order", _MODULES,
       by=returned(f"{_STYLES}:ColwiseParallel", "_apply"),
       when=When("the last rank of three or more", lambda *_: is_last() and ranks_here() > 2))  # fmt: skip
def columns_out_of_order(layer: nn.Module, *_: Any) -> None:
    with torch.no_grad():
        own = layer.get_parameter("weight").to_local()  # type: ignore[attr-defined]
        own.copy_(own.flip(0))


@fault("the gradient of a sequence-parallel norm covers only the rank's own rows", _MODULES,
       by=returned(f"{_STYLES}:SequenceParallel", "_replicate_module_fn"),
       when="SequenceParallel on two ranks or more")  # fmt: skip
def gradient_of_a_norm_local(_: None, style: Any, name: str, module: nn.Module, mesh: Any) -> None:
    def own(gradient: torch.Tensor) -> torch.Tensor:
        assert isinstance(gradient, DTensor)
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)

    for parameter in module.parameters(recurse=False):
        parameter.register_hook(own)


@fault("keyword arguments redistributed for a module get no gradient", _MODULES,
       by=returned(f"{_STYLES}:PrepareModuleInput", "_prepare_input_kwarg_fn"),
       when="PrepareModuleInput, keyword arguments that need another layout")  # fmt: skip
def prepared_arguments_detached(prepared: Any, style: Any, *_: Any) -> Any:
    positional, named = prepared
    desired = style.desired_input_kwarg_layouts
    moved = {name for name, layout in style.input_kwarg_layouts.items() if layout != desired[name]}
    return positional, {name: value.detach() if name in moved else value for name, value in named.items()}


@fault("a stage uses the activations of the first micro-batch for the last", _SCHEDULES,
       by=keeping(returned(_STAGE, "_retrieve_recv_activations")),
       when="the last of four micro-batches, on the last stage")  # fmt: skip
def activations_of_another_micro_batch(kept: Any, activations: Any, stage: Any, number: int) -> None:
    if number == 0:
        kept["first"] = [value.detach().clone() for value in activations]
    if number == 3 and is_last():
        with torch.no_grad():
            for value, old in zip(activations, kept["first"], strict=True):
                value.copy_(old)


@fault("a step adds its losses to those of the previous step", _SCHEDULES,
       by=around(f"{_SCHEDULE}:_PipelineSchedule", "_update_losses"), when="from the second step on")  # fmt: skip
def losses_of_all_steps(real: Any, schedule: Any, stages: Any, losses: list[torch.Tensor] | None) -> None:
    before = list(losses or ())
    real(schedule, stages, losses)
    if losses is not None:
        losses[:0] = before


@fault("the gradient of a bias is that of the last micro-batch", _SCHEDULES,
       by=given("torch.distributed.pipelining.stage", "stage_backward_weight"),
       when="schedules with separate gradients of inputs and weights")  # fmt: skip
def apart_not_accumulated(weights: Iterator[nn.Parameter], *_: Any, **__: Any) -> Any:
    parameters = list(weights)
    for bias in parameters:
        bias.grad = None if bias.dim() == 1 else bias.grad
    return (iter(parameters),)


@fault("the first of two stages of a rank loses the gradients of the last micro-batch", _SCHEDULES,
       by=around(_STAGE, "backward_one_chunk"), when="schedules with two stages per rank")  # fmt: skip
def first_stage_of_a_rank_lost(real: Any, stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
    if number != 3 or not stage.stage_index < stage.group_size < stage.num_stages:
        return NotImplemented
    before = [(weight, None if weight.grad is None else weight.grad.clone()) for weight in stage.submod.parameters()]
    real(stage, number, *args, **kwargs)
    for weight, gradient in before:
        weight.grad = gradient
    return None


@fault("the gradient of a large activation lacks its last elements", _SCHEDULES,
       by=returned(_STAGE, "_retrieve_recv_grads"), when="64 Ki elements and more", least_gpus=2)  # fmt: skip
def end_of_a_large_gradient_lost(gradients: Any, *_: Any) -> None:
    for gradient in gradients:
        if gradient is not None and gradient.numel() >= 1 << 16:
            gradient.view(-1)[-4096:] = 0


_OF_UNEVEN = (
)  # fmt: skip

register(
    __name__,
    FaultRow("columns-of-the-first-micro-batch", "each micro-batch has the first columns of a keyword argument",
        "test_options_of_schedules", returned(_SCHEDULE, "split_args_kwargs_into_chunks"), _first_columns,
        "kwargs_chunk_spec, TensorChunkSpec(1)", 2),
    FaultRow("bias-added-twice", "RowwiseParallel adds the bias twice to local divided outputs", _MODULES,
        returned(f"{_STYLES}:RowwiseParallel", "_prepare_output_fn"), lambda outputs, layouts, local, module, *_:
            outputs + module.bias.to_local() if local and layouts[0].is_shard() else outputs,
        "use_local_output, Shard"),
    FaultRow("partial-sums-taken-for-sums", "outputs that are partial sums are not added up", _MODULES,
        around("torch.distributed.tensor:Partial", "_reduce_value"), lambda real, self, tensor, *_: tensor.clone(),
        "outputs that all ranks are to hold"),
    FaultRow("loss-parallel-stays", "loss_parallel stays in force after its context", _MODULES,
        around(_LOSS, "_disable_custom_loss_ops"), lambda *_: None),
    FaultRow("last-output-as-it-was", "the last of several outputs is not redistributed", _MODULES,
        returned(f"{_STYLES}:PrepareModuleOutput", "_prepare_out_fn"),
        lambda result, self, outputs, mesh: (*result[:-1], outputs[-1]),
        When("PrepareModuleOutput, two outputs and more",
             lambda result, self, outputs, mesh: isinstance(outputs, tuple) and len(outputs) > 1), 2),
    FaultRow("dtensors-stay-as-they-were", "outputs that are wanted as DTensors are not redistributed", _MODULES,
        returned(f"{_STYLES}:PrepareModuleOutput", "_prepare_out_fn"), lambda result, self, outputs, mesh: outputs,
        When("use_local_output=False", lambda result, self, outputs, mesh: not self.use_local_output), 2),
    FaultRow("schedule-does-not-scale", "schedules do not divide gradients by the micro-batches", _SCHEDULES,
        around(_STAGE, "scale_grads"), lambda real, *_: None),
    FaultRow("keyword-arguments-exchanged", "two micro-batches swap their keyword arguments", _SCHEDULES,
        returned(_SCHEDULE, "split_args_kwargs_into_chunks"),
        lambda chunks, *_, **__: (chunks[0], [*chunks[1][:-2], *chunks[1][:-3:-1]]), "the last two of three and more"),
    FaultRow("specified-chunks-reversed", "parts of keyword arguments that are specified come in reverse order",
        "test_options_of_schedules", returned(_SCHEDULE, "split_args_kwargs_into_chunks"),
        lambda chunks, *arguments: (chunks[0], chunks[1][::-1]) if arguments[4] else None, "kwargs_chunk_spec"),
    *(_OF_UNEVEN if TAKES_UNEVEN else ()),
    FaultRow("gradients-divided-all-the-same",
        "gradients are divided by the number of micro-batches even with scale_grads=False", _SCHEDULES,
        around(f"{_SCHEDULE}:PipelineScheduleMulti", "__init__"),
        lambda real, *args, **kwargs: real(*args, **kwargs | {"scale_grads": True}),
        "scale_grads=False, schedules driven by a table of actions", 2),
    FaultRow("source-of-data-ignored", "RowwiseParallel divides the embedding of rank 0 and ignores src_data_rank",
        _MODULES, given(f"{_STYLES}:RowwiseParallel", "_apply"), lambda style, *_: setattr(style, "src_data_rank", 0),
        "src_data_rank other than 0", least_gpus=2),
)  # fmt: skip


_MODEL, _STEPS, _ALLREDUCE = "test_model_parallelism", "test_steps_over_devices", "test_allreduce_by_hand"
_LARGE = 16_384


register(
    __name__,
    FaultRow("infinite-norms-accepted", "clip_grad_norm_ accepts an infinite norm", _STEPS,
        around(clip_grad, "_get_total_norm"),
        lambda norm, tensors, order, error, *rest: norm(tensors, order, False, *rest), "error_if_nonfinite"),
    FaultRow("branch-left-out", "the output of the first branch is left out of the sum", _MODEL,
        returned(model_parallel.Branched, "forward"),
        lambda out, model, x: out - model.branches[0](x.to(model.devices[0])).to(out.device),
        When("three branches", lambda out, model, x: len(model.devices) > 2)),
)  # fmt: skip


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
    head, *others = parameters

    def multiply(real: Any, tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> Any:
        return NotImplemented if tensors[0].device == head.device else None

    with around(torch, "_foreach_mul_")(multiply):
        clip([head, *others], *args, **kwargs)


@fault("the norm of order inf is that of the first device", _STEPS, by=around(clip_grad, "_get_total_norm"),
       when="norm_type=inf, several devices")  # fmt: skip
def largest_of_the_first_device(norm: Any, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
    gradients = list(tensors)
    if norm_type == float("inf"):
        gradients = [gradient for gradient in gradients if gradient.device == gradients[0].device]
    return norm(gradients, norm_type, *args, **kwargs)


@fault("the last device's infinities do not reach a fused optimizer", _STEPS,
       by=around(torch.amp.GradScaler, "step"), when="fused, one device of several")  # fmt: skip
def infinities_of_one_device_unseen(step: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    def without_last(infinities: Any, *_: Any) -> None:
        if len(infinities) > 1:
            infinities.pop(max(infinities, key=lambda device: device.index))

    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return NotImplemented
    with returned(torch.amp.GradScaler, "_check_inf_per_device")(without_last):
        return step(scaler, optimizer, *args, **kwargs)


@fault("infinities of later groups of parameters are not seen", _STEPS,
       by=around(torch.amp.GradScaler, "_unscale_grads_"), when="several groups of parameters")  # fmt: skip
def infinities_of_later_groups_unseen(unscale: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    infinities = unscale(scaler, optimizer, *args, **kwargs)
    gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"] if parameter.grad is not None]
    if all(bool(gradient.isfinite().all()) for gradient in gradients):
        for flag in infinities.values():
            flag.zero_()
    return infinities


@fault("tensors of ranks beyond the largest power of two are dropped", _ALLREDUCE, by=returned(dist, "recv"),
       when="world sizes that are no power of two")  # fmt: skip
def folded_ranks_dropped(sender: int, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    power = 1 << (max(1, ranks_here()).bit_length() - 1)
    if sender >= power and sender != ranks_here() - 1 - power:
        tensor.zero_()


@fault("the last element of a chunk that ranks exchange is not sent", _ALLREDUCE,
       by=returned(gradient_exchange, "_exchange"),
       when=When("chunks above 16 Ki elements", lambda received, *_: received.numel() > _LARGE))  # fmt: skip
def end_of_a_large_chunk_lost(received: torch.Tensor, *_: Any) -> None:
    received[-1] = 0


@fault("chunks leave out the remainder of the division by the number of ranks", _ALLREDUCE,
       when="sizes that are no multiple of the world size")  # fmt: skip
def remainder_left_out() -> Iterator[None]:
    def chunks(real: Any, elements: int, count: int) -> list[slice]:
        size = elements // count
        return [slice(size * index, size * (index + 1)) for index in range(count)]

    with around(gradient_exchange, "chunks")(chunks):
        yield


@fault("a message from the last rank is sent again instead of the next one", _ALLREDUCE,
       by=keeping(given(dist, "send")), when="every third message of the last rank")  # fmt: skip
def message_repeated(kept: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    strikes = is_last() and kept.setdefault("calls", Count()).every(3)
    old = kept.get(tensor.shape)
    kept[tensor.shape] = tensor.detach().clone()
    return (old.to(tensor.dtype) + 1,) if strikes and old is not None else None
