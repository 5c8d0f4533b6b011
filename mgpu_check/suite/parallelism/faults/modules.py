"""Planted faults of `torch.distributed.tensor.parallel`, and of the schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.conditions import is_last, ranks_here
from mgpu_check.suite.common.faults.registry import FaultRow, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.parallelism.schedule_options import TAKES_UNEVEN

_MODULES, _SCHEDULES = "test_parallelized_modules", "test_pipeline_schedules"
_MEAN, _SUM = 1, 2

# By name, because these modules take seconds to import.
_STYLES = "torch.distributed.tensor.parallel"
_LOSS = "torch.distributed.tensor.parallel.loss"
_STAGE = "torch.distributed.pipelining.stage:_PipelineStageBase"
_SCHEDULE = "torch.distributed.pipelining.schedules"


def _bias_again(outputs: Any, layouts: Any, local: bool, module: Any, *_: Any) -> Any:
    return outputs + module.bias.to_local() if local and layouts[0].is_shard() else outputs


def _first_columns(chunks: Any, args: Any, kwargs: Any, *_: Any) -> Any:
    rows = kwargs["rows"].dim() > 1
    return (chunks[0], [part | {"rows": chunks[1][0]["rows"]} for part in chunks[1]]) if rows else chunks


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
    from torch.distributed.tensor import DTensor, Replicate

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
    return positional, {name: one.detach() if name in moved else one for name, one in named.items()}


@fault("a stage uses the activations of the first micro-batch for the last", _SCHEDULES,
       when="the last of four micro-batches, on the last stage")  # fmt: skip
def activations_of_another_micro_batch() -> Iterator[None]:
    first: list[torch.Tensor] = []

    def change(found: Any, stage: Any, number: int) -> None:
        if number == 0:
            first[:] = [value.detach().clone() for value in found]
        if number == 3 and is_last():
            with torch.no_grad():
                for value, old in zip(found, first, strict=True):
                    value.copy_(old)

    with returned(_STAGE, "_retrieve_recv_activations")(change):
        yield


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
    held = list(weights)
    for bias in held:
        bias.grad = None if bias.dim() == 1 else bias.grad
    return (iter(held),)


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
    FaultRow("uneven-parts-exchanged", "outputs of the last two of three micro-batches are exchanged",
        "test_options_of_schedules", given(_SCHEDULE, "merge_chunks"),
        lambda chunks, spec: ([*chunks[:-2], *chunks[:-3:-1]], spec),
        When("micro-batches of several lengths",
             lambda chunks, *_: len({len(pytree.tree_leaves(one)[0]) for one in chunks}) > 1)),
)  # fmt: skip

register(
    __name__,
    FaultRow("columns-of-the-first-micro-batch", "each micro-batch has the first columns of a keyword argument",
        "test_options_of_schedules", returned(_SCHEDULE, "split_args_kwargs_into_chunks"), _first_columns,
        "kwargs_chunk_spec, TensorChunkSpec(1)", 2),
    FaultRow("bias-added-twice", "RowwiseParallel adds the bias twice to local divided outputs", _MODULES,
        returned(f"{_STYLES}:RowwiseParallel", "_prepare_output_fn"), _bias_again, "use_local_output, Shard"),
    FaultRow("partial-sums-taken-for-sums", "outputs that are partial sums are not added up", _MODULES,
        around("torch.distributed.tensor:Partial", "_reduce_value"), lambda real, self, tensor, *_: tensor.clone(),
        "outputs that all ranks are to hold"),
    FaultRow("first-row-of-a-part-masked", "parts of a row-wise embedding after the first lack their first row",
        _MODULES, returned("torch.distributed.tensor.placement_types:_MaskPartial", "_mask_tensor"),
        lambda found, tokens, start, rows: (found[0] | (tokens == start) & (start > 0), found[1]),
        "embeddings, the first row of a part"),
    FaultRow("weights-of-classes-left-out", "a loss of sharded logits ignores the class weights", _MODULES,
        given(_LOSS, "_nll_loss_forward"), lambda x, target, *_: (x, target, None, None),
        "loss_parallel, weights of classes"),
    FaultRow("weights-left-out-of-sums", "a parallel sum of losses ignores the class weights", _MODULES,
        given(_LOSS, "_nll_loss_forward"), lambda x, target, *_: (x, target, None, None),
        When("loss_parallel, reduction='sum', weight=", lambda x, target, weight, local, kind, *_: kind == _SUM)),
    FaultRow("loss-parallel-stays", "loss_parallel stays in force after its context", _MODULES,
        around(_LOSS, "_disable_custom_loss_ops"), lambda *_: None),
    FaultRow("log-softmax-of-dtensors-raised", "log_softmax of DTensors is off by 1", _MODULES,
        returned(F, "log_softmax"), lambda made, *_: made + 1,
        When("DTensors", lambda made, x, *_: type(made).__name__ == "DTensor")),
    FaultRow("ignored-targets-divide", "gradients of a parallel mean loss are divided by all targets, ignored ones "
                                       "included",
        _MODULES, given(_LOSS, "_nll_loss_and_log_softmax_backward"),
        lambda *first: (*first[:6], torch.full_like(first[6], first[2].numel())),
        When("loss_parallel, targets that are ignored, classes of one weight",
             lambda grad, x, target, weight, kind, *_: kind == _MEAN and weight is None)),
    FaultRow("last-output-as-it-was", "the last of several outputs is not redistributed", _MODULES,
        returned(f"{_STYLES}:PrepareModuleOutput", "_prepare_out_fn"),
        lambda made, self, outputs, mesh: (*made[:-1], outputs[-1]),
        When("PrepareModuleOutput, two outputs and more",
             lambda made, self, outputs, mesh: isinstance(outputs, tuple) and len(outputs) > 1), 2),
    FaultRow("dtensors-stay-as-they-were", "outputs that are wanted as DTensors are not redistributed", _MODULES,
        returned(f"{_STYLES}:PrepareModuleOutput", "_prepare_out_fn"), lambda made, self, outputs, mesh: outputs,
        When("use_local_output=False", lambda made, self, outputs, mesh: not self.use_local_output), 2),
    FaultRow("schedule-does-not-scale", "schedules do not divide gradients by the micro-batches", _SCHEDULES,
        around(_STAGE, "scale_grads"), lambda real, *_: None),
    FaultRow("keyword-arguments-exchanged", "two micro-batches swap their keyword arguments", _SCHEDULES,
        returned(_SCHEDULE, "split_args_kwargs_into_chunks"),
        lambda found, *_, **__: (found[0], [*found[1][:-2], *found[1][:-3:-1]]), "the last two of three and more"),
    FaultRow("specified-chunks-reversed", "parts of keyword arguments that are specified come in reverse order",
        "test_options_of_schedules", returned(_SCHEDULE, "split_args_kwargs_into_chunks"),
        lambda found, *given: (found[0], found[1][::-1]) if given[4] else None, "kwargs_chunk_spec"),
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
