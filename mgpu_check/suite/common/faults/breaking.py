"""Break torch from outside: the constructor and the communication of DistributedDataParallel, and any function."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.suite.common.faults.registry import Planter
from mgpu_check.suite.common.faults.when import When
from mgpu_check.torch_hooks.patches import Patches, replaced

DDP = DistributedDataParallel
Change = Callable[[torch.Tensor, Any, DistributedDataParallel], torch.Tensor | None]


def around(owner: Any, *names: str) -> Planter:
    """Plant a function in place of functions of `owner`. It gets the original function, and then the arguments of the
    call.

    If it returns NotImplemented, the original is called.

    Args:
        owner: a module or class, or its name as in ``package.module:Class``, which is imported when the fault is
            planted.
    """

    @contextlib.contextmanager
    def plant(change: Callable[..., Any]) -> Iterator[None]:
        def changed(real: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(real)
            def call(*args: Any, **kwargs: Any) -> Any:
                result = change(real, *args, **kwargs)
                return real(*args, **kwargs) if result is NotImplemented else result

            return call

        patches = Patches()
        try:
            for name in names:
                patches.wrap(pkgutil.resolve_name(owner) if isinstance(owner, str) else owner, name, changed)
            yield
        finally:
            patches.undo()

    return plant


def both(one: Planter, other: Planter) -> Planter:
    """Plant a function in two places."""

    @contextlib.contextmanager
    def plant(change: Callable[..., Any]) -> Iterator[None]:
        with one(change), other(change):
            yield

    return plant


def given(owner: Any, *names: str) -> Planter:
    """Plant a function that changes what functions of `owner` are given. It gets the arguments of the call.

    It returns a tuple that takes the place of the first arguments, or None if it has changed them in place.
    """

    def plant(change: Callable[..., Any]) -> AbstractContextManager[None]:
        def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            others = change(*args, **kwargs)
            first = others if isinstance(others, tuple) else ()
            return real(*first, *args[len(first) :], **kwargs)

        return around(owner, *names)(call)

    return plant


def returned(owner: Any, *names: str) -> Planter:
    """Plant a function that changes what functions of `owner` return. It gets the result, and then the arguments of the
    call.

    It returns another result, or None if it has changed the result or the arguments in place.
    """

    def plant(change: Callable[..., Any]) -> AbstractContextManager[None]:
        def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            other = change(result, *args, **kwargs)
            return result if other is None or other is NotImplemented else other

        return around(owner, *names)(call)

    return plant


def optimized(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextlib.contextmanager
def wrapped(
    after: Callable[[DistributedDataParallel], None] = lambda model: None,
    before: Callable[[nn.Module], None] = lambda module: None,
    **forced: Any,
) -> Iterator[None]:
    """Build DDP with other arguments, and change the module before and the wrapper after."""
    real = DistributedDataParallel.__init__

    @functools.wraps(real)  # checks read the options of this version of torch from its signature
    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        before(module)
        real(self, module, *args, **(kwargs | forced))
        after(self)

    with replaced(DistributedDataParallel, "__init__", init):
        yield


@contextlib.contextmanager
def communicated(
    change: Change, where: Callable[[DistributedDataParallel], bool] = lambda model: True
) -> Iterator[None]:
    """Make DDP communicate a copy of each bucket changed by `change`, for the models that `where` selects.

    `change` may also change the copy in place and return None.
    Other models get no communication hook, because a model accepts only one, and because `join` divides differently
    with one.
    """

    def register(model: DistributedDataParallel) -> None:
        if not where(model):
            return
        group = model.process_group

        def communicate(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer().clone()
            changed = change(buffer, bucket, model)
            buffer = (buffer if changed is None or changed is NotImplemented else changed) * (1 / group.size())
            dist.all_reduce(buffer, group=group)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done

        # DDP compares annotations with its own types, and does not resolve string annotations.
        communicate.__annotations__.clear()
        model.register_comm_hook(None, communicate)

    with wrapped(register):
        yield


def communicating(where: When | None = None) -> Planter:
    """Plant a change of each bucket that DDP communicates; see `communicated`. `where` is a condition on the model."""
    return lambda change: communicated(change, where.holds if where else lambda model: True)


def slices(buffer: torch.Tensor, bucket: Any) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield each parameter of a bucket with its flat part of `buffer`."""
    at = 0
    for parameter in bucket.parameters():
        yield parameter, buffer[at : at + parameter.numel()]
        at += parameter.numel()


def upper_bits(values: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 11 significand bits of TF32, by Veltkamp's splitting; return other dtypes unchanged."""
    if values.dtype != torch.float32:
        return values
    large = values * ((1 << 13) + 1)
    return large - (large - values)
