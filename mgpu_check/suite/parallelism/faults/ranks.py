"""Planted faults of parallelism between ranks: in hand-written recipes, in functions they call, and in modules of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.conditions import Count, is_last, ranks_here
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.recipes import allreduce, parameter_server, pipeline, tensor_parallel
from mgpu_check.torch_hooks.patches import replaced

_LARGE = 16_384


@fault(
    "tensors of ranks beyond the largest power of two are dropped",
    "test_allreduce_by_hand",
    condition="world sizes that are no power of two",
)
def folded_ranks_dropped() -> Iterator[None]:
    real = dist.recv

    def recv(tensor: torch.Tensor, src: int | None = None, *args: Any, **kwargs: Any) -> int:
        sender = real(tensor, src, *args, **kwargs)
        power = 1 << (max(1, ranks_here()).bit_length() - 1)
        if sender >= power and sender != ranks_here() - 1 - power:
            tensor.zero_()
        return sender

    with replaced(dist, "recv", recv):
        yield


@fault(
    "the last element of a chunk that ranks exchange is not sent",
    "test_allreduce_by_hand",
    condition="chunks above 16 Ki elements",
)
def end_of_a_large_chunk_lost() -> Iterator[None]:
    real = allreduce._exchange

    def exchange(*args: Any) -> torch.Tensor:
        received = real(*args)
        if received.numel() > _LARGE:
            received[-1] = 0
        return received

    with replaced(allreduce, "_exchange", exchange):
        yield


@fault(
    "chunks leave out the remainder of the division by the number of ranks",
    "test_allreduce_by_hand",
    "test_tensor_parallelism_by_hand",
    condition="sizes that are no multiple of the world size",
)
def remainder_left_out() -> Iterator[None]:
    def chunks(elements: int, parts: int) -> list[slice]:
        size = elements // parts
        return [slice(size * part, size * (part + 1)) for part in range(parts)]

    def widest_last(elements: int, parts: int) -> list[slice]:
        # The last chunk would hold the remainder; the other ranks do not expect its size.
        *others, last = chunks(elements, parts)
        return [*others, slice(last.start, elements)]

    with replaced(allreduce, "chunks", chunks), replaced(tensor_parallel, "chunks", widest_last):
        yield


@fault(
    "a message from the last rank is sent again instead of the next one",
    "test_allreduce_by_hand",
    condition="every third message of the last rank",
)
def message_repeated() -> Iterator[None]:
    real, count = dist.send, Count()
    before: dict[tuple[int, ...], torch.Tensor] = {}

    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        strikes = is_last() and count.every(3)
        old = before.get(tuple(tensor.shape))
        before[tuple(tensor.shape)] = tensor.detach().clone()
        real(old.to(tensor.dtype) + 1 if strikes and old is not None else tensor, *args, **kwargs)

    with replaced(dist, "send", send):
        yield


@fault("the server leaves out the gradient of the last worker", "test_parameter_server")
def worker_left_out() -> Iterator[None]:
    real = parameter_server.push_and_pull

    def push_and_pull(parameters: Any, gradients: Sequence[torch.Tensor], update: Any, homes: Any) -> None:
        real(parameters, [torch.zeros_like(g) if is_last() else g for g in gradients], update, homes)

    with replaced(parameter_server, "push_and_pull", push_and_pull):
        yield


@fault(
    "workers continue with the parameters of the previous step",
    "test_parameter_server",
    condition="from the second step on, on the last rank",
)
def stale_parameters_pulled() -> Iterator[None]:
    real, count = parameter_server.push_and_pull, Count()

    def push_and_pull(parameters: Sequence[torch.Tensor], gradients: Any, update: Any, homes: Any) -> None:
        before = [value.detach().clone() for value in parameters]
        real(parameters, gradients, update, homes)
        if count.every(2) and is_last():
            for value, old in zip(parameters, before, strict=True):
                value.detach().copy_(old)

    with replaced(parameter_server, "push_and_pull", push_and_pull):
        yield


@fault(
    "a server that is not rank 0 counts its own gradient twice",
    "test_parameter_server",
    condition="parameters on a server other than rank 0",
)
def own_gradient_twice() -> Iterator[None]:
    real = parameter_server.push_and_pull

    def push_and_pull(parameters: Any, gradients: Any, update: Any, homes: Sequence[int]) -> None:
        own = dist.get_rank()
        doubled = [g * 2 if home == own and own else g for g, home in zip(gradients, homes, strict=True)]
        real(parameters, doubled, update, homes)

    with replaced(parameter_server, "push_and_pull", push_and_pull):
        yield


@fault("the gradient of inputs that all ranks hold is not summed over them", "test_tensor_parallelism_by_hand")
def gradient_of_inputs_local() -> Iterator[None]:
    with replaced(tensor_parallel, "copy_to_ranks", lambda x: x):
        yield


@fault("every rank adds the bias before the sum", "test_tensor_parallelism_by_hand")
def bias_added_by_each_rank() -> Iterator[None]:
    def forward(self: tensor_parallel.RowLinear, x: torch.Tensor) -> torch.Tensor:
        own = tensor_parallel.divide_among_ranks(x) if self.divide else x
        return tensor_parallel.sum_over_ranks(F.linear(own, self.weight, self.bias))

    with replaced(tensor_parallel.RowLinear, "forward", forward):
        yield


@fault(
    "gathered outputs keep the padding of narrower parts",
    "test_tensor_parallelism_by_hand",
    condition="widths that are no multiple of the world size",
)
def padding_kept_in_a_gather() -> Iterator[None]:
    def gathered(part: torch.Tensor, width: int) -> torch.Tensor:
        pieces = allreduce.chunks(width, dist.get_world_size())
        padded = F.pad(part, (0, pieces[0].stop - part.shape[-1])).contiguous()
        rows = [torch.empty_like(padded) for _ in pieces]
        dist.all_gather(rows, padded)
        return torch.cat(rows, -1)[..., :width]

    with replaced(tensor_parallel, "_gathered", gathered):
        yield


@fault(
    "outputs that are partial sums are not added up",
    "test_parallelized_modules",
    condition="outputs that all ranks are to hold",
)
def partial_sums_taken_for_sums() -> Iterator[None]:
    from torch.distributed.tensor import Partial

    def reduce_value(self: Partial, tensor: torch.Tensor, mesh: Any, mesh_dim: int) -> torch.Tensor:
        return tensor.clone()

    with replaced(Partial, "_reduce_value", reduce_value):
        yield


@fault(
    "the weights of a layer by columns are not divided in order",
    "test_parallelized_modules",
    condition="the last rank of three or more",
)
def columns_out_of_order() -> Iterator[None]:
    from torch.distributed.tensor.parallel import ColwiseParallel

    real = ColwiseParallel._apply

    def apply(self: ColwiseParallel, module: nn.Module, mesh: Any) -> nn.Module:
        made = real(self, module, mesh)
        if is_last() and ranks_here() > 2:
            with torch.no_grad():
                own = made.get_parameter("weight").to_local()  # type: ignore[attr-defined]
                own.copy_(own.flip(0))
        return made

    with replaced(ColwiseParallel, "_apply", apply):
        yield


@fault(
    "the loss of the last micro-batch is left out",
    "test_pipeline_by_hand",
    condition="the last of several micro-batches",
)
def micro_batch_left_out() -> Iterator[None]:
    real = pipeline.gpipe_step

    def gpipe_step(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        stage, index, stages, micro_batches, loss = args
        count = len(micro_batches)

        def without_last(out: torch.Tensor, number: int) -> torch.Tensor:
            value: torch.Tensor = loss(out, number)
            return value * 0 if number == count - 1 > 0 else value

        return real(stage, index, stages, micro_batches, without_last, **kwargs)

    with replaced(pipeline, "gpipe_step", gpipe_step):
        yield


@fault(
    "gradients of a middle stage do not reach the previous stage",
    "test_pipeline_by_hand",
    condition="pipelines of three stages or more",
)
def gradient_stops_in_the_middle() -> Iterator[None]:
    real = dist.send

    def send(tensor: torch.Tensor, dst: int | None = None, *args: Any, **kwargs: Any) -> None:
        rank = current_rank()
        if rank is not None and dst is not None and 0 < rank.index < rank.size - 1 and dst < rank.index:
            tensor = torch.zeros_like(tensor)
        real(tensor, dst, *args, **kwargs)

    with replaced(dist, "send", send):
        yield


@fault(
    "parts of a row-wise embedding after the first lack their first row",
    "test_parallelized_modules",
    condition="embeddings, the first row of a part",
)
def first_row_of_a_part_masked() -> Iterator[None]:
    from torch.distributed.tensor import placement_types

    kind = placement_types._MaskPartial
    real = kind._mask_tensor

    def mask(tokens: torch.Tensor, start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        outside, local = real(tokens, start, rows)
        return outside | (tokens == start) & (start > 0), local

    with replaced(kind, "_mask_tensor", staticmethod(mask)):
        yield


@fault(
    "the gradient of a sequence-parallel norm covers only the rank's own rows",
    "test_parallelized_modules",
    condition="SequenceParallel on two ranks or more",
)
def gradient_of_a_norm_local() -> Iterator[None]:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import SequenceParallel

    real = SequenceParallel._replicate_module_fn

    def own(gradient: torch.Tensor) -> torch.Tensor:
        assert isinstance(gradient, DTensor)
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)

    def replicate(self: SequenceParallel, name: str, module: nn.Module, mesh: Any) -> None:
        real(self, name, module, mesh)
        for parameter in module.parameters(recurse=False):
            parameter.register_hook(own)

    with replaced(SequenceParallel, "_replicate_module_fn", replicate):
        yield


@fault(
    "keyword arguments redistributed for a module get no gradient",
    "test_parallelized_modules",
    condition="PrepareModuleInput, keyword arguments that need another layout",
)
def prepared_arguments_detached() -> Iterator[None]:
    from torch.distributed.tensor.parallel import PrepareModuleInput

    real = PrepareModuleInput._prepare_input_kwarg_fn

    def prepare(self: PrepareModuleInput, *args: Any) -> tuple[Any, dict[str, Any]]:
        positional, named = real(self, *args)
        desired = self.desired_input_kwarg_layouts
        moved = {name for name, layout in self.input_kwarg_layouts.items() if layout != desired[name]}
        return positional, {name: one.detach() if name in moved else one for name, one in named.items()}

    with replaced(PrepareModuleInput, "_prepare_input_kwarg_fn", prepare):
        yield


@fault(
    "a loss of sharded logits ignores the class weights",
    "test_parallelized_modules",
    condition="loss_parallel, weights of classes",
)
def weights_of_classes_left_out() -> Iterator[None]:
    from torch.distributed.tensor.parallel import loss

    real = loss._nll_loss_forward

    def forward(x: torch.Tensor, target: torch.Tensor, weight: Any, local_weight: Any, *rest: Any) -> Any:
        return real(x, target, None, None, *rest)

    with replaced(loss, "_nll_loss_forward", forward):
        yield
