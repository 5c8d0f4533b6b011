"""Planted faults of the schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mgpu_check.suite.common.faults.conditions import is_last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced


@fault("schedules do not divide gradients by the micro-batches", "test_pipeline_schedules")
def schedule_does_not_scale() -> Iterator[None]:
    from torch.distributed.pipelining import stage

    with replaced(stage._PipelineStageBase, "scale_grads", lambda self, factor: None):
        yield


@fault(
    "a stage uses the activations of the first micro-batch for the last",
    "test_pipeline_schedules",
    condition="the last of four micro-batches, on the last stage",
)
def activations_of_another_micro_batch() -> Iterator[None]:
    from torch.distributed.pipelining import stage

    real = stage._PipelineStageBase._retrieve_recv_activations
    first: list[Any] = []

    def retrieve(self: Any, fwd_chunk_id: int) -> Any:
        found = real(self, fwd_chunk_id)
        if fwd_chunk_id == 0:
            first[:] = [value.detach().clone() for value in found]
        if fwd_chunk_id == 3 and is_last():
            with torch.no_grad():
                for value, old in zip(found, first, strict=True):
                    value.copy_(old)
        return found

    with replaced(stage._PipelineStageBase, "_retrieve_recv_activations", retrieve):
        yield


@fault(
    "two micro-batches swap their keyword arguments",
    "test_pipeline_schedules",
    condition="the last two of three and more",
)
def keyword_arguments_exchanged() -> Iterator[None]:
    from torch.distributed.pipelining import microbatch, schedules

    real = microbatch.split_args_kwargs_into_chunks

    def split(*args: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
        positional, named = real(*args, **kwargs)
        return positional, [*named[:-2], *named[:-3:-1]]

    with replaced(schedules, "split_args_kwargs_into_chunks", split):
        yield


@fault(
    "a step adds its losses to those of the previous step",
    "test_pipeline_schedules",
    condition="from the second step on",
)
def losses_of_all_steps() -> Iterator[None]:
    from torch.distributed.pipelining import schedules

    real = schedules._PipelineSchedule._update_losses

    def update(self: Any, stages: Any, losses: list[torch.Tensor] | None) -> None:
        before = list(losses or ())
        real(self, stages, losses)
        if losses is not None:
            losses[:0] = before

    with replaced(schedules._PipelineSchedule, "_update_losses", update):
        yield


@fault(
    "the gradient of a bias is that of the last micro-batch",
    "test_pipeline_schedules",
    condition="schedules with separate gradients of inputs and weights",
)
def apart_not_accumulated() -> Iterator[None]:
    from torch.distributed.pipelining import _backward, stage

    real = _backward.stage_backward_weight

    def backward(weights: Iterator[nn.Parameter], *args: Any, **kwargs: Any) -> Any:
        held = list(weights)
        for weight in held:
            if weight.dim() == 1:
                weight.grad = None
        return real(iter(held), *args, **kwargs)

    with replaced(stage, "stage_backward_weight", backward):
        yield


@fault(
    "the first of two stages of a rank loses the gradients of the last micro-batch",
    "test_pipeline_schedules",
    condition="schedules with two stages per rank",
)
def first_stage_of_a_rank_lost() -> Iterator[None]:
    from torch.distributed.pipelining import stage

    real = stage._PipelineStageBase.backward_one_chunk

    def backward(self: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        strikes = bwd_chunk_id == 3 and self.stage_index < self.group_size < self.num_stages
        weights = list(self.submod.parameters()) if strikes else []
        before = [None if weight.grad is None else weight.grad.clone() for weight in weights]
        real(self, bwd_chunk_id, *args, **kwargs)
        for weight, gradient in zip(weights, before, strict=True):
            weight.grad = gradient

    with replaced(stage._PipelineStageBase, "backward_one_chunk", backward):
        yield


@fault(
    "gradients are divided by the number of micro-batches even with scale_grads=False",
    "test_pipeline_schedules",
    condition="scale_grads=False, schedules driven by a table of actions",
    least_gpus=2,
)
def gradients_divided_all_the_same() -> Iterator[None]:
    from torch.distributed.pipelining import schedules

    kind = schedules.PipelineScheduleMulti
    real = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs | {"scale_grads": True})

    with replaced(kind, "__init__", init):
        yield


@fault(
    "the gradient of a large activation lacks its last elements",
    "test_pipeline_schedules",
    condition="64 Ki elements and more",
    least_gpus=2,
)
def end_of_a_large_gradient_lost() -> Iterator[None]:
    from torch.distributed.pipelining import stage

    real = stage._PipelineStageBase._retrieve_recv_grads

    def retrieve(self: Any, bwd_chunk_id: int) -> Any:
        found = real(self, bwd_chunk_id)
        for gradient in found:
            if gradient is not None and gradient.numel() >= 1 << 16:
                gradient.view(-1)[-4096:] = 0
        return found

    with replaced(stage._PipelineStageBase, "_retrieve_recv_grads", retrieve):
        yield
