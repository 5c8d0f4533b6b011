"""Planted faults of policies of mixed precision, and of gradients that are accumulated under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.registry import fault


@fault(
    "gradients of parameters that are not cast are reduced in their own dtype",
    "test_mixed_precision",
    condition="MixedPrecisionPolicy(reduce_dtype=...) without param_dtype",
)
def reduced_in_the_dtype_of_parameters() -> Iterator[None]:
    def init(real: Callable[..., None], self: Any, policy: Any) -> None:
        real(self, policy)
        if policy.param_dtype is None:
            self.reduce_dtype = None

    with replaced_method(fsdp_param.FSDPParam, "init_dtype_attrs", init):
        yield


@fault(
    "the gradients of a third micro-batch are dropped",
    "test_mixed_precision",
    condition="reductions in another dtype than gradients, three micro-batches and more",
)
def third_micro_batch_dropped() -> Iterator[None]:
    def accumulate(real: Callable[..., None], self: Any) -> None:
        held, new = self.unsharded_accumulated_grad, self.unsharded_param.grad
        self._added = 0 if held is None else self._added + (new is not None)
        if held is not None and new is not None and self._added > 1:
            new.zero_()
        real(self)

    with replaced_method(fsdp_param.FSDPParam, "accumulate_unsharded_grad_if_needed", accumulate):
        yield
