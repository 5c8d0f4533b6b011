"""Record the calls of the surface in a process, and report the classes that it has not reported before.

Functions, constructors and methods are replaced by wrappers, for the time of a context. A mode of torch records the
operators, except those that another operator calls, and those of threads that the code under test starts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mgpu_check.asserts.surface import Call, tell
from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.processes.frames import is_engine
from mgpu_check.suite.surface.classes import classes_of
from mgpu_check.suite.surface.demands import CALLED
from mgpu_check.suite.surface.names import Callee, SurfaceParameter, called_by, entries, operators
from mgpu_check.torch_hooks.patches import Patches

RECORDING = f"{__name__}:recording"
"""The function below, by its name: ranks record with it."""


class _CallRecorder:
    """The classes that this process has seen."""

    def __init__(self) -> None:
        self.seen: set[Call] = set()
        self.told: set[Call] = set()
        self.on = False
        self._here = threading.local()
        self._operators = operators()
        self._entries = list(entries())
        self._names: list[tuple[Any, str, object]] = []
        self._modules = 0

    def note(
        self, path: str, parameters: Sequence[SurfaceParameter], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Add the classes of the arguments of a call."""
        if not self.on or getattr(self._here, "busy", False):
            return
        self._here.busy = True  # to sort a value calls operators
        try:
            rank = current_rank()
            place = (None, 0) if rank is None else (rank.index, rank.size)
            self.seen.add((path, "", CALLED))
            for parameter, value in bound(parameters, args, kwargs):
                for found in classes_of(parameter, value, *place):
                    self.seen.add((path, parameter.name, found))
        finally:
            self._here.busy = False

    def operator(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        path = called_by(function)
        if path in self._operators:
            self.note(*self._operators[path], args, kwargs)

    def wrap(self, entry: Callee) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        skipped = entry.owner is not None

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def recorded(*args: Any, **kwargs: Any) -> Any:
                self.note(entry.path, entry.parameters, args[skipped:], kwargs)
                return function(*args, **kwargs)

            return recorded

        return around

    def apply(self, patches: Patches) -> None:
        """Replace the surface under all its names. The names are looked up again only if a module was imported."""
        for entry in self._entries:
            if entry.kind != "function":
                patches.wrap(entry.owner or _current(entry, up=1), entry.attribute, self.wrap(entry))
        if self._modules != len(sys.modules):
            found = Patches()
            for entry in self._entries:
                if entry.kind == "function":
                    function = _current(entry)
                    found.replace(function, self.wrap(entry)(function))
            self._names = [(module, name, new) for module, name, new in found.names()]
            self._modules = len(sys.modules)
        for module, name, new in self._names:
            patches.set(module, name, new)

    def fresh(self) -> tuple[Call, ...]:
        """Return the classes that were not reported before."""
        found = self.seen - self.told
        self.told |= found
        return tuple(sorted(found))


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _recorder().operator(func, args, kwargs or {})
        return _of_c(func)(*args, **(kwargs or {}))


def _of_c(function: Any) -> Any:
    """Return the function of C in place of the simulated node's wrapper of a method or attribute of a tensor.

    The wrapper has called C, which calls the mode with the wrapper again, because it looks the function up by its name.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, property) and owner in _PROPERTIES:
        return getattr(getattr(torch._C.TensorBase, _PROPERTIES[owner]), function.__name__)
    name = getattr(function, "__name__", "")
    code = getattr(function, "__code__", None)
    if code is not None and is_engine(code.co_filename) and vars(torch.Tensor).get(name) is function:
        return getattr(torch._C.TensorBase, name, function)
    return function


_PROPERTIES = {value: name for name, value in vars(torch.Tensor).items() if isinstance(value, property)}
"""The attributes of tensors that the simulated node replaces; this module is imported in a rank."""


@functools.cache
def _recorder() -> _CallRecorder:
    return _CallRecorder()


@contextlib.contextmanager
def recording(_: str = "") -> Iterator[None]:
    """Record the calls of this process until the context exits, and report what is new."""
    recorder = _recorder()
    patches = Patches()
    try:
        recorder.apply(patches)
        recorder.on = True
        with _Mode():
            yield
    finally:
        recorder.on = False
        patches.undo()
        tell(recorder.fresh())


def bound(
    parameters: Sequence[SurfaceParameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[SurfaceParameter, Any]]:
    """Yield each parameter with its argument, or its default; arguments that no parameter takes, by their names."""
    at, left = 0, dict(kwargs)
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            for value in args[at:]:
                yield parameter, value
            at = len(args)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY and at < len(args):
            yield parameter, args[at]
            at += 1
        elif parameter.name in left:
            yield parameter, left.pop(parameter.name)
        elif parameter.optional:
            yield parameter, parameter.default
    for name, value in left.items():
        yield SurfaceParameter(name), value


def _current(entry: Callee, up: int = 0) -> Any:
    """Return what has the name of an entry now: the simulated node replaces functions."""
    names = entry.path.split(".")[: -up or None]
    for count in range(len(names) - 1, 0, -1):
        if (module := sys.modules.get(".".join(names[:count]))) is not None:
            return functools.reduce(getattr, names[count:], module)
    raise AttributeError(f"torch has no {entry.path}")
