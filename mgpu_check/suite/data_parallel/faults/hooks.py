"""Planted faults of hooks that replicas inherit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.registry import fault


@contextlib.contextmanager
def _on_replicas(register: str, instead: Callable[[tuple[Any, ...], Any], Any]) -> Iterator[None]:
    """Replace the results of hooks with keyword arguments on replicas.

    Args:
        register: name of the method that registers the hooks.
        instead: returns the new result, from the arguments of the hook without the module and from its result.
    """

    def registered(
        real: Callable[..., Any],
        self: nn.Module,
        hook: Callable[..., Any],
        *,
        with_kwargs: bool = False,
        **options: Any,
    ) -> Any:
        def called(module: nn.Module, *given: Any) -> Any:
            made = hook(module, *given)
            return instead(given, made) if getattr(module, "_is_replica", False) else made

        return real(self, called if with_kwargs else hook, with_kwargs=with_kwargs, **options)

    with replaced_method(nn.Module, register, registered):
        yield


@fault(
    "a replica ignores the keyword arguments that its pre-hook returns",
    "test_hooks",
    condition="forward pre-hooks with keyword arguments",
)
def keywords_of_before_the_hook() -> Iterator[None]:
    with _on_replicas("register_forward_pre_hook", lambda given, made: made and (made[0], given[1])):
        yield


@fault(
    "the result of a forward hook on a replica is dropped",
    "test_hooks",
    condition="forward hooks with keyword arguments",
)
def outputs_of_before_the_hook() -> Iterator[None]:
    with _on_replicas("register_forward_hook", lambda given, made: None):
        yield
