"""The names of Megatron Core that the integration calls, for data and tensor parallel meshes, by torch alone."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.gates.divided import Copied, Reduced


class State(types.ModuleType):
    """`parallel_state`: two axes, tp varies fastest."""

    def initialize_model_parallel(self, *, tensor_model_parallel_size: int, **_: Any) -> None:
        count, ranks = tensor_model_parallel_size, list(range(dist.get_world_size()))
        self._tp, self._dp = None, None
        for axis, groups in (
            ("_tp", [ranks[i : i + count] for i in range(0, len(ranks), count)]),
            ("_dp", [ranks[i::count] for i in range(count)]),
        ):
            for members in groups:
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    setattr(self, axis, group)
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def destroy_model_parallel(self) -> None:
        self._tp = self._dp = None

    def get_tensor_model_parallel_group(self) -> Any:
        return self._tp

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tp)

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tp)

    def get_data_parallel_group(self, with_context_parallel: bool = False) -> Any:
        return self._dp

    def get_pipeline_model_parallel_group(self) -> Any:
        return self._alone

    def get_pipeline_model_parallel_last_rank(self) -> int:
        return dist.get_rank()

    def is_pipeline_first_stage(self) -> bool:
        return True

    is_pipeline_last_stage = is_pipeline_first_stage


class Wrapped(nn.Module):
    def __init__(self, config: Any, ddp: Any, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def zero_grad_buffer(self) -> None: ...


def schedule(*, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, **_: Any) -> list[Any]:
    losses = []
    for _micro_batch in range(num_microbatches):
        output, of_loss = forward_step_func(data_iterator, model)
        loss, reduced = of_loss(output)
        loss /= num_microbatches
        loss.backward()
        losses.append(reduced)
    group = sys.modules["megatron.core.parallel_state"].get_data_parallel_group()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)
    return losses


def optimizer(options: Any, chunks: Any, use_gloo_process_groups: bool) -> Any:
    made: Any = torch.optim.SGD(chunks[0].parameters(), lr=options.lr, momentum=0.9)
    made.scale_loss = None
    return made


def parameter(rows: int, columns: int, dim: int | None = None, stride: int = 1) -> nn.Parameter:
    made: Any = nn.Parameter(torch.randn(rows, columns))
    if dim is not None:
        made.tensor_model_parallel, made.partition_dim, made.partition_stride = True, dim, stride
    return made


class Gated(nn.Module):
    """An MLP with a gate: each rank has a part of the gate and the same part of the rest in one weight."""

    def __init__(self, config: Any, stride: int) -> None:
        super().__init__()
        state = sys.modules["megatron.core.parallel_state"]
        self.config, self.group = config, state.get_tensor_model_parallel_group()
        count = config.tensor_model_parallel_size
        self.norm = parameter(1, 4)
        self.up, self.down = parameter(16 // count, 4, 0, stride), parameter(4, 8 // count, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, rest = F.linear(Copied.apply(x * self.norm, self.group), self.up).chunk(2, -1)
        return Reduced.apply(F.linear(gate.sigmoid() * rest, self.down), self.group)


def install() -> None:
    """Put the names into `sys.modules`, once per process."""
    if "megatron.core" in sys.modules:
        return
    distributed = {"DistributedDataParallel": Wrapped, "DistributedDataParallelConfig": SimpleNamespace}
    names: dict[str, dict[str, Any]] = {
        "": {},
        "tensor_parallel": {"model_parallel_cuda_manual_seed": torch.manual_seed},
        "utils": {"get_model_config": lambda module: module.config},
        "distributed": {**distributed, "finalize_model_grads": None},
        "optimizer": {"OptimizerConfig": SimpleNamespace, "get_megatron_optimizer": optimizer},
        "pipeline_parallel": {"get_forward_backward_func": lambda: schedule},
    }
    sys.modules["megatron"] = types.ModuleType("megatron")
    for name, values in names.items():
        module = types.ModuleType(f"megatron.core.{name}".rstrip("."))
        vars(module).update(values)
        sys.modules[module.__name__] = module
    sys.modules["megatron.core.parallel_state"] = State("megatron.core.parallel_state")
