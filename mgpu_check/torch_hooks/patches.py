"""Replace attributes of torch, Python or recipes, and restore all of them. Imports no torch.

`unittest.mock` replaces single attributes. This module can also replace an object under all its names in loaded
modules.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ClassMethodDescriptorType, ModuleType
from typing import Any, Self, TypeVar

_ABSENT = object()
R = TypeVar("R")


class Patches:
    """A list of replacements with an exact undo, in reverse order.

    `set` and `wrap` replace one attribute of one owner. `replace` replaces an object under every name that a loaded
    module has for it, which includes an earlier ``from torch import randn``. `undo` also restores names that modules
    bind to the replacement later. Without `undo` the replacements are permanent. ``with Patches() as patches`` undoes
    them at its end.
    """

    def __init__(self, *, among: str = "", sparing: str | None = None) -> None:
        """Create an empty list.

        `among`: prefix of the modules that `replace` changes; empty for all. `sparing`: prefix of modules that
        `replace` does not change, or None.
        """
        self._among, self._sparing = among, sparing
        self._undo: list[tuple[object, str, object]] = []
        self._renamed: list[tuple[ModuleType, str, object, object]] = []
        self._new_of: dict[int, object] = {}
        self._old_of: dict[int, object] = {}
        self._at_exit: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def set(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name``, remembering whether the owner itself (not a base class) had it before."""
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def wrap(self, owner: object, name: str, around: Callable[[Any], Any]) -> None:
        """Set ``owner.name`` to ``around(function)``, with the present function.

        Static and class methods keep their kind. The function of a class method takes the class.
        """
        attribute = inspect.getattr_static(owner, name) if isinstance(owner, type) else None
        if isinstance(attribute, (classmethod, ClassMethodDescriptorType)):
            self.set(owner, name, classmethod(around(function_of(attribute))))
        elif isinstance(attribute, staticmethod):
            self.set(owner, name, staticmethod(around(attribute.__func__)))
        else:
            self.set(owner, name, around(getattr(owner, name)))

    def replace(self, old: object, new: object) -> None:
        """Register `new` as the replacement of `old` in the namespaces of loaded modules, for the next `apply`.

        One object may replace several. A name that is bound to it later is then restored to the last of them.
        """
        self._new_of[id(old)] = new
        self._old_of[id(new)] = old

    def replaced(self) -> list[tuple[int, object]]:
        """Return the ``id`` of each replaced object with its replacement."""
        return list(self._new_of.items())

    def changed(self, owner: object) -> frozenset[str]:
        """Return the names of the attributes of `owner` that have been set."""
        return frozenset(name for patched, name, _ in self._undo if patched is owner)

    def at_exit(self, call: Callable[[], object]) -> None:
        """Register `call` to run in `undo`, before anything is restored."""
        self._at_exit.append(call)

    def apply(self) -> None:
        """Make the replacements that `replace` registered."""
        for module, name, value in self._names(self._new_of):
            self._renamed.append((module, name, vars(module)[name], value))
            setattr(module, name, value)

    def undo(self) -> None:
        """Restore everything, even if a call of `at_exit` raises."""
        try:
            for call in reversed(self._at_exit):
                call()
        finally:
            for owner, name, value in reversed(self._undo):
                if value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)
            for module, name, old, new in reversed(self._renamed):
                if vars(module).get(name) is new:  # nobody has bound the name to something else
                    setattr(module, name, old)
            for module, name, value in self._names(self._old_of):
                setattr(module, name, value)

    def _names(self, mapping: dict[int, object]) -> list[tuple[ModuleType, str, object]]:
        bindings = []
        for module in list(sys.modules.values()) if mapping else ():
            if not isinstance(module, ModuleType) or not module.__name__.startswith(self._among):
                continue
            if self._sparing is not None and module.__name__.startswith(self._sparing):
                continue
            if mapping.keys().isdisjoint(map(id, list(vars(module).values()))):
                continue  # most modules: by far the fastest way to look at 200,000 names
            for name, value in list(vars(module).items()):
                replacement = mapping.get(id(value), _ABSENT)
                if replacement is not _ABSENT:
                    bindings.append((module, name, replacement))
        return bindings


def function_of(attribute: Any) -> Callable[..., Any]:
    """Return the function of a class method, which takes the class first. It may be one of C, which has no function:
    ``torch.autograd.Function.apply`` since torch 2.14."""
    return getattr(attribute, "__func__", None) or (
        lambda cls, *args, **kwargs: attribute.__get__(None, cls)(*args, **kwargs)
    )


def around(new: Callable[..., R]) -> Callable[[Callable[..., Any]], Callable[..., R]]:
    """Make `new`, whose first argument is the original function, a wrapper for `Patches.wrap`."""

    @functools.wraps(new)
    def wrap(original: Callable[..., Any]) -> Callable[..., R]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> R:
            return new(original, *args, **kwargs)

        return call

    return wrap


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute that `owner` has to `value`, and restore it on exit; an inherited one is inherited again."""
    getattr(owner, name)
    with Patches() as patches:
        patches.set(owner, name, value)
        yield


@contextlib.contextmanager
def temporarily(put: Callable[[Any], object], value: Any, before: Any) -> Iterator[Any]:
    """Call a setter with `value`, yield the value `before`, and call the setter with that on exit."""
    put(value)
    try:
        yield before
    finally:
        put(before)


@contextlib.contextmanager
def entered(*contexts: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Enter all contexts, the last one innermost."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
