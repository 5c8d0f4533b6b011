"""Send test functions out of the pytest process: wrap them, and choose what travels with them."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle

__all__ = ["Shipped", "bare", "by_value", "warning_filters"]


Filter = tuple[str, str, type[Warning], str, int]
"""Arguments of `warnings.filterwarnings`: action, message, category, module, line."""


def warning_filters() -> tuple[Filter, ...]:
    """Return the warning filters of now, which pytest sets for each test, from its options and marks.

    The first of them counts.
    """
    found: list[Any] = []
    for action, message, category, module, line in warnings.filters:
        # A pattern, or for the interpreter's own a plain text, or nothing.
        texts = [getattr(part, "pattern", part) or "" for part in (message, module)]
        # What is shown always here would fill the output of every rank with the same line for every example.
        found.append(("default" if action in ("always", "all") else action, texts[0], category, texts[1], line))
    return tuple(found)


@dataclass(frozen=True)
class Shipped:
    """A function as the ranks call it: by pytest's rules for assertions and warnings.

    Attributes:
        fault: name of a planted fault to have in the process meanwhile, or None.
        drawn: its arguments may be those of an example of Hypothesis.
        coverage: how coverage.py is to measure it, None where it is not.
        replacements: what it finds replaced in its modules; see `replacements`.
    """

    function: Callable[..., Any]
    fault: str | None
    filters: tuple[Filter, ...]
    drawn: bool = False
    coverage: str | None = None
    replacements: bytes = b""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        from mgpu_check.pytest_plugin import in_rank  # in the rank: it imports torch

        return in_rank.call(
            self.function,
            args,
            kwargs,
            filters=self.filters,
            fault=self.fault,
            drawn=self.drawn,
            coverage=self.coverage,
            replacements=self.replacements,
        )


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` without its attributes: pytest's marks and Hypothesis' settings are for the pytest process."""
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
    """Let what `modules` define travel by value: the ranks cannot import test modules, or not as pytest rewrote them."""
    registered = []
    for module in modules:
        # With --import-mode=importlib, pytest takes a conftest out again for the next one; it travels by value as it is.
        there = module.__name__ in sys.modules
        if there and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
