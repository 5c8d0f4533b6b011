"""Defects of autocast: wrong dtypes, nested regions, and the state after a region."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.faults.operators import altered, last, on
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

Plant = Callable[[], Iterator[None]]


def _autocast_fault(summary: str, condition: str) -> Callable[[Plant], Plant]:
    return fault(summary, "test_autocast_of_operators", condition=condition)


@_autocast_fault("softmax stays in the dtype of autocast", "one device")
def softmax_in_low_precision() -> Iterator[None]:
    """The operator is missing from the list of float32 operators."""

    def instead(softmax: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", enabled=False):
            return softmax(*args, **kwargs)

    with altered(F, "softmax", lambda x, *_, **__: on(x, last()), instead):
        yield


@_autocast_fault("leaving a region of autocast disables the outer region", "regions within others")
def outer_region_off() -> Iterator[None]:
    """The rest of the outer region computes in float32."""
    leave = torch.autocast.__exit__

    def exit_(self: Any, *args: Any) -> Any:
        result = leave(self, *args)
        if not self._enabled:
            torch.set_autocast_enabled("cuda", False)
        return result

    with replaced(torch.autocast, "__exit__", exit_):
        yield


@_autocast_fault("functions of custom_fwd do not cast their inputs", "cast_inputs")
def inputs_of_functions_not_cast() -> Iterator[None]:
    """They compute in the dtype of their inputs."""
    real = torch.amp.custom_fwd

    def custom_fwd(*args: Any, cast_inputs: Any = None, **kwargs: Any) -> Any:
        return real(*args, **kwargs)

    with replaced(torch.amp, "custom_fwd", custom_fwd):
        yield


@_autocast_fault("a region of autocast left by an exception does not restore the dtype", "left by an exception")
def dtype_of_a_failed_region_stays() -> Iterator[None]:
    """As if it was not restored in `finally`."""
    leave = torch.autocast.__exit__

    def exit_(self: Any, kind: Any, *args: Any) -> Any:
        result = leave(self, kind, *args)
        if kind is not None:
            torch.set_autocast_dtype(self.device, self.fast_dtype)
        return result

    with replaced(torch.autocast, "__exit__", exit_):
        yield


@_autocast_fault("a region without a cache disables the cache of the outer region", "cache_enabled=False")
def cache_stays_off() -> Iterator[None]:
    """Each use of a parameter casts it again."""
    leave = torch.autocast.__exit__

    def exit_(self: Any, *args: Any) -> Any:
        result = leave(self, *args)
        if not self._cache_enabled:
            torch.set_autocast_cache_enabled(False)
        return result

    with replaced(torch.autocast, "__exit__", exit_):
        yield
