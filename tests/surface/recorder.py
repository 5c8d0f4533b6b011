"""Record the calls of the surface in a process, and write down the classes that it has not written before.

Functions, constructors and methods are replaced by wrappers, for the time of a context.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mgpu_check.torch_hooks.patches import Patches
from tests.surface.demands import CALLED, Call
from tests.surface.names import Callee, SurfaceParameter, entries

ENDING = ".json"


class _CallRecorder:
    """The classes that this process has seen."""

    def __init__(self) -> None:
        self.seen: set[Call] = set()
        self.written: set[Call] = set()
        self.on = False
        self._here = threading.local()
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
            self.seen.add((path, "", CALLED))
            for parameter, value in bound(parameters, args, kwargs):
                self.seen |= {(path, parameter.name, name) for name in classes_of(parameter, value)}
        finally:
            self._here.busy = False

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
            self._names = [(module, name, new) for module, name, new in found._names(found._new_of)]
            self._modules = len(sys.modules)
        for module, name, new in self._names:
            patches.set(module, name, new)

    def fresh(self) -> tuple[Call, ...]:
        """Return the classes that were not written before."""
        fresh = self.seen - self.written
        self.written |= fresh
        return tuple(sorted(fresh))


@functools.cache
def _recorder() -> _CallRecorder:
    return _CallRecorder()


@contextlib.contextmanager
def recording(directory: str) -> Iterator[None]:
    """Record the calls of this process until the context exits, and write new classes to a file in `directory`."""
    recorder = _recorder()
    patches = Patches()
    try:
        recorder.apply(patches)
        recorder.on = True
        yield
    finally:
        recorder.on = False
        patches.undo()
        _write(recorder.fresh(), Path(directory))


def _write(calls: Sequence[Call], directory: Path) -> None:
    """Write calls to a new file. The file gets its name at the end: a rank may be killed while it writes."""
    if not calls:
        return
    number, name = tempfile.mkstemp(dir=directory)
    with open(number, "w") as file:
        json.dump(calls, file)
    os.rename(name, f"{name}{ENDING}")


def written_to(directory: Path) -> Iterator[Call]:
    """Yield the calls that the processes of a run have written."""
    for path in sorted(directory.glob(f"*{ENDING}")):
        yield from map(tuple, json.loads(path.read_text()))


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


def classes_of(parameter: SurfaceParameter, value: Any) -> set[str]:
    """Return the classes of an argument: whether it is the default, and the value of an option that has few."""
    found = set()
    if parameter.optional:
        found.add("default" if _same(value, parameter.default) else "not the default")
    name = value.name if isinstance(value, enum.Enum) else repr(value) if type(value) is str else str(value)
    return found | ({name} & parameter.domain) if parameter.domain else found


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    plain = (bool, int, float, str, tuple, frozenset, type(None), torch.dtype, enum.Enum)
    return type(value) is type(default) and isinstance(value, plain) and bool(value == default)


def _current(entry: Callee, up: int = 0) -> Any:
    """Return what has the name of an entry now: the simulated node replaces functions."""
    names = entry.path.split(".")[: -up or None]
    for count in range(len(names) - 1, 0, -1):
        if (module := sys.modules.get(".".join(names[:count]))) is not None:
            return functools.reduce(getattr, names[count:], module)
    raise AttributeError(f"torch has no {entry.path}")
