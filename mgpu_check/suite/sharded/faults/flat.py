"""Planted faults of FSDP1, `FullyShardedDataParallel` with flat parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import _runtime_utils as runtime
from torch.distributed.fsdp._flat_param import HandleShardingStrategy

from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

_CHECK = ("test_flat_parameters",)


@fault("gradients of a flat parameter under no_sync are forgotten", *_CHECK, condition="no_sync")
def unsynchronized_gradients_forgotten() -> Iterator[None]:
    real = runtime._post_backward_hook

    def hook(state: Any, handle: Any, *args: Any) -> None:
        gradient = handle.flat_param.grad
        if not state._sync_gradients and gradient is not None:
            gradient.zero_()
        real(state, handle, *args)

    with replaced(runtime, "_post_backward_hook", hook):
        yield


@fault("hybrid strategies of FSDP1 do not reduce gradients over replicas", *_CHECK, condition="HYBRID_SHARD")
def flat_repeats_not_reduced() -> Iterator[None]:
    real = runtime._reduce_grad

    def reduce(state: Any, handle: Any) -> None:
        strategy, handle._sharding_strategy = handle._sharding_strategy, HandleShardingStrategy.FULL_SHARD
        try:
            real(state, handle)
        finally:
            handle._sharding_strategy = strategy

    with replaced(runtime, "_reduce_grad", reduce):
        yield


@fault("FSDP1 clips by the norm of each rank's part", *_CHECK, condition="several ranks")
def norm_of_the_part() -> Iterator[None]:
    def clip(self: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    with replaced(FullyShardedDataParallel, "clip_grad_norm_", clip):
        yield
