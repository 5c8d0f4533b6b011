"""Prepare test functions to run in other processes: wrap them, and choose the modules that are pickled by value."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import cloudpickle

from mgpu_check.plugin.rank_messages import Logging
from mgpu_check.plugin.replacements import Changes

Filter = tuple[str, str, type[Warning], str, int]
"""Arguments of `warnings.filterwarnings`: action, message, category, module, line."""


def warning_filters() -> tuple[Filter, ...]:
    """Return the current warning filters, highest priority first. pytest sets them per test, from options and marks."""
    filters: list[Any] = []
    for action, message, category, module, line in warnings.filters:
        # Message and module are patterns; in the interpreter's own filters, plain texts or None.
        texts = [getattr(matcher, "pattern", matcher) or "" for matcher in (message, module)]
        # With "always", every rank would print the same line for every example.
        filters.append(("default" if action in ("always", "all") else action, texts[0], category, texts[1], line))
    return tuple(filters)


@dataclass(frozen=True)
class Planting:
    """A fault, and the function that plants it in a rank."""

    # such as ``package.module:function``; it takes `fault`, and returns a context in which the fault is planted
    function: str
    fault: str  # the name of the fault

    def planted(self) -> AbstractContextManager[None]:
        """Import what plants the fault, and return its context; that raises `ValueError` if it knows no such fault."""
        return pkgutil.resolve_name(self.function)(self.fault)


@dataclass(frozen=True)
class Shipped:
    """A function to call on ranks with pytest's handling of assertions and warnings."""

    # changes of modules to make during the call. The first field, because unpickling makes them.
    changes: Changes | None
    function: Callable[..., Any]
    fault: Planting | None  # what to plant in the process during the call, or None
    filters: tuple[Filter, ...]  # highest priority first
    drawn: bool = False  # whether its arguments may come from a Hypothesis example
    coverage: str | None = None  # configuration of coverage.py, see `Measuring`; None if coverage is not measured
    how_to_log: Logging | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        from mgpu_check.plugin import in_rank  # in the rank: it imports torch

        return in_rank.call(self, args, kwargs)


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of `function` without attributes: ranks need neither pytest's marks nor Hypothesis' settings."""
    if isinstance(function, types.MethodType):
        return types.MethodType(bare(function.__func__), function.__self__)
    if isinstance(function, functools.partial):
        return functools.partial(bare(function.func), *function.args, **function.keywords)
    if not isinstance(function, types.FunctionType):
        return function
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    return copy


@contextlib.contextmanager
def by_value(modules: Iterable[types.ModuleType]) -> Iterator[None]:
    """Within the context, pickle `modules` by value: ranks cannot import test modules as pytest has rewritten them."""
    registered = []
    for module in modules:
        # pytest removes a conftest that is in no package from `sys.modules` before it imports the next one
        # (_pytest/config/__init__.py, _importconftest, 9.2); cloudpickle then pickles it by value.
        is_loaded = module.__name__ in sys.modules
        if is_loaded and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
