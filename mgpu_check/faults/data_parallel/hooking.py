"""Planted faults of hooks that replicas inherit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from mgpu_check.faults.breaking import data_parallel_fault, replaced_method


@data_parallel_fault(
    "a replica is called with the arguments by keyword that it had before its hook changed them",
    "test_hooks",
    condition="forward pre-hooks with keyword arguments",
)
def keywords_of_before_the_hook() -> Iterator[None]:
    def register(
        real: Callable[..., Any],
        self: nn.Module,
        hook: Callable[..., Any],
        *,
        with_kwargs: bool = False,
        **options: Any,
    ) -> Any:
        def called(module: nn.Module, given: Any, named: Any) -> Any:
            made = hook(module, given, dict(named))
            return made if made is None or not getattr(module, "_is_replica", False) else (made[0], named)

        return real(self, called if with_kwargs else hook, with_kwargs=with_kwargs, **options)

    with replaced_method(nn.Module, "register_forward_pre_hook", register):
        yield


@data_parallel_fault(
    "what a forward hook makes of the outputs of a replica is dropped",
    "test_hooks",
    condition="forward hooks with keyword arguments",
)
def outputs_of_before_the_hook() -> Iterator[None]:
    def register(
        real: Callable[..., Any],
        self: nn.Module,
        hook: Callable[..., Any],
        *,
        with_kwargs: bool = False,
        **options: Any,
    ) -> Any:
        def called(module: nn.Module, *given: Any) -> Any:
            made = hook(module, *given)
            return None if getattr(module, "_is_replica", False) else made

        return real(self, called if with_kwargs else hook, with_kwargs=with_kwargs, **options)

    with replaced_method(nn.Module, "register_forward_hook", register):
        yield
