"""Plant faults of DistributedDataParallel: change its buckets, its hooks, and the state that it sends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as distributed_module

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.breaking import DDP, around, communicated, returned, slices
from mgpu_check.suite.common.faults.registry import Planter
from mgpu_check.suite.common.faults.when import When

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
        seen = kept_by(model)
        seen[bucket.index()] = seen.get(bucket.index(), 0) + 1
        return bool(seen[bucket.index()] > than)

    return When(text, holds)


def slicewise(where: When, test: Callable[[torch.Tensor], bool]) -> Planter:
    """Plant a change of the part of a bucket of each parameter that passes `test`; it gets part, parameter and
    model."""

    def plant(change: Callable[..., None]) -> contextlib.AbstractContextManager[None]:
        def changed(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> None:
            for parameter, part in slices(buffer, bucket):
                if test(parameter):
                    change(part, parameter, model)

        return communicated(changed, where.holds)

    return plant


def hooked(call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Plant a function in place of each communication hook; it gets the hook, its state and bucket, and the model."""

    def register(real: Callable[..., Any], self: DistributedDataParallel, state: object, hook: Any) -> None:
        def planted(state: object, bucket: Any) -> Any:
            made = call(hook, state, bucket, self)
            return hook(state, bucket) if made is NotImplemented else made

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


def kept_by(model: DistributedDataParallel) -> dict[int, Any]:
    """Return a dictionary that lives as long as the model."""
    return _kept.setdefault(model, {})
