"""Repeat on ranks what fixtures have replaced in modules of the pytest process, by `monkeypatch` or `unittest.mock`.

A replacement affects one process. Ranks import the modules themselves, so they would use the originals, and a test
could pass because of that. `Replacements` is for the pytest process, `replaced` for the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import cloudpickle
import pytest

from mgpu_check.processes import pickling

_MISSING = "_mgpu_check_missing"  # a marker that can be pickled and is not a user's value
_OWN = ("_pytest", "pytest", "mgpu_check", "pluggy", "hypothesis")
_STREAMS = ("stdout", "stderr")
_patch: Any = mock._patch  # base of all kinds of `mock.patch` except `mock.patch.dict`
_patch_dict: Any = mock._patch_dict


@dataclass(frozen=True)
class _Replacement:
    """One replaced attribute.

    Attributes:
        module, path: the object that holds the attribute: a module's name, and attribute names below it.
        item: whether `name` is a key of a mapping, not an attribute.
        value: the pickled new value; None if the attribute was removed.
    """

    module: str
    path: tuple[str, ...]
    item: bool
    name: Any
    value: bytes | None


class Replacements:
    """Records the replacements in this process between `start` and `end`."""

    def __init__(self) -> None:
        self._patches: weakref.WeakSet[pytest.MonkeyPatch] = weakref.WeakSet()
        self._mocks: list[Any] = []
        self._undo = contextlib.ExitStack()
        self._paths = _ImportPaths()

    def start(self) -> None:
        """Start to record."""
        # Include existing patches, such as one that a conftest created at import.
        self._patches.update(one for one in gc.get_referrers(pytest.MonkeyPatch) if type(one) is pytest.MonkeyPatch)
        seen, mocks = self._patches, self._mocks
        made = pytest.MonkeyPatch.__init__

        @functools.wraps(made)
        def make(self: pytest.MonkeyPatch) -> None:
            made(self)
            seen.add(self)

        self._set(pytest.MonkeyPatch, "__init__", make)
        for kind in (_patch, _patch_dict):
            self._set(kind, "__enter__", _noting(kind.__enter__, mocks.append))
            self._set(kind, "__exit__", _noting(kind.__exit__, self._forget))

    def _set(self, kind: Any, name: str, value: Any) -> None:
        self._undo.callback(setattr, kind, name, getattr(kind, name))
        setattr(kind, name, value)

    def _forget(self, one: Any) -> None:
        self._mocks[:] = [other for other in self._mocks if other is not one]

    def end(self) -> None:
        """Stop recording."""
        self._undo.close()

    def pickled(self, function: Callable[..., Any]) -> bytes:
        """Pickle the current replacements for `replaced` in another process; b"" if there are no replacements.

        Warns of replacements that cannot be sent: mocks, because ranks would only get copies, and values that cannot be
        pickled. The warning points at the first line of `function`, which the ranks will run.
        """
        found: dict[tuple[int, Any], tuple[Any, bool, Any]] = {}
        for patch in list(self._patches):
            for target, name, _ in patch._setattr:
                found[id(target), name] = target, False, name
            for target, key, _ in patch._setitem:
                found[id(target), repr(key)] = target, True, key
        for one in self._mocks:
            if isinstance(one, _patch_dict):
                original = getattr(one, "_original", None) or {}
                now = one.in_dict
                for key in {*original, *now}:
                    if key not in now or key not in original or now[key] is not original[key]:
                        found[id(now), repr(key)] = now, True, key
            elif one.target is not None:
                found[id(one.target), one.attribute] = one.target, False, one.attribute
        if not found:
            return b""
        made = [self._replacement(*one, function) for one in found.values()]
        self._paths.forget_all_but([target for target, _, _ in found.values()])
        known = tuple(one for one in made if one is not None)
        return pickling.dumps(known) if known else b""

    def _replacement(self, target: Any, item: bool, name: Any, function: Callable[..., Any]) -> _Replacement | None:
        if target is os.environ or (target is sys and name in _STREAMS):
            return None  # ranks receive the variables anyway, and have their own output
        path = self._paths.of(target)
        return None if path is None else _replacement(path, target, item, name, function)


class _ImportPaths:
    """Finds import paths of objects for other processes.

    The paths are cached, because a search goes through all modules, and every call needs them.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int, tuple[str, tuple[str, ...]] | None]] = {}

    def of(self, target: Any) -> tuple[str, tuple[str, ...]] | None:
        """Return the module and the names below it; None if there is no such path, or the module is pickled by
        value."""
        known, modules, path = self._known.get(id(target), (None, 0, None))
        if known is not target or modules != len(sys.modules):
            path = _import_path(target)
            self._known[id(target)] = target, len(sys.modules), path
        return path

    def forget_all_but(self, targets: list[Any]) -> None:
        """Drop all other objects from the cache, so that it does not keep them alive."""
        ids = {id(target) for target in targets}
        self._known = {one: known for one, known in self._known.items() if one in ids}


def _noting(original: Callable[..., Any], note: Callable[[Any], object]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noting(self: Any, *args: Any) -> Any:
        note(self)
        return original(self, *args)

    return noting


def _replacement(
    where: tuple[str, tuple[str, ...]], target: Any, item: bool, name: Any, function: Callable[..., Any]
) -> _Replacement | None:
    module, path = where
    value = _value(target, item, name)
    if value is _MISSING:
        return _Replacement(module, path, item, name, None)
    shown = ".".join((module, *path, *(() if item else (name,)))) + (f"[{name!r}]" if item else "")
    why = "is a mock, and its calls would not be seen here" if isinstance(value, mock.NonCallableMock) else ""
    if not why:
        try:
            return _Replacement(module, path, item, name, pickling.dumps(value))
        except Exception as error:
            why = f"cannot be pickled: {error}"
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", _replacement.__code__)
    warnings.warn_explicit(
        f"{shown} is replaced in the pytest process only, and ranks have the original, because the replacement "
        f"{why}; replace it in the function that runs on the ranks",
        pytest.PytestWarning,
        code.co_filename,
        code.co_firstlineno,
    )
    return None


def _value(target: Any, item: bool, name: Any) -> Any:
    if item:
        return target.get(name, _MISSING)
    if hasattr(target, "__dict__"):  # only the target's own attribute, not that of its class
        return vars(target).get(name, _MISSING)
    return getattr(target, name, _MISSING)


def _import_path(target: Any) -> tuple[str, tuple[str, ...]] | None:
    """Return the import path of `target` for another process; None if it has no such path, or is pickled by value."""
    if isinstance(target, types.ModuleType):
        return (
            (target.__name__, ()) if _importable(target.__name__) and sys.modules[target.__name__] is target else None
        )
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if isinstance(module, str) and module.partition(".")[0] in _OWN:
        return None  # a replacement of pytest in itself
    if isinstance(module, str) and isinstance(name, str) and _importable(module):
        path = tuple(name.split("."))
        with contextlib.suppress(AttributeError):
            if _found(sys.modules[module], path) is target:
                return module, path
    for module, holder in list(sys.modules.items()):
        if _importable(module):
            for name, value in list(vars(holder).items()):
                if value is target:
                    return module, (name,)
    return None


def _importable(module: str) -> bool:
    known = sys.modules.get(module)
    by_value = cloudpickle.list_registry_pickle_by_value()
    return (
        isinstance(known, types.ModuleType)
        and known.__spec__ is not None
        and module.partition(".")[0] not in _OWN
        and not any(module == one or module.startswith(one + ".") for one in by_value)
    )


def _found(holder: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(getattr, path, holder)


@contextlib.contextmanager
def replaced(pickled: bytes) -> Iterator[None]:
    """Within the context, apply the replacements of `Replacements.pickled` in a rank.

    They include items of mappings and removed attributes, which `torch_hooks.patches` does not support.
    """
    if not pickled:
        yield
        return
    with contextlib.ExitStack() as undo:
        for one in pickling.loads(pickled):
            try:
                target = _found(importlib.import_module(one.module), one.path)
            except (ImportError, AttributeError):
                continue  # this process has no original to replace
            undo.callback(_put, target, one.item, one.name, _value(target, one.item, one.name))
            _put(target, one.item, one.name, _MISSING if one.value is None else pickling.loads(one.value))
        yield


def _put(target: Any, item: bool, name: Any, value: Any) -> None:
    absent = isinstance(value, str) and value == _MISSING
    if item:
        assert isinstance(target, Mapping)
        changed: Any = target
        if absent:
            changed.pop(name, None)
        else:
            changed[name] = value
    elif not absent:
        setattr(target, name, value)
    elif name in getattr(target, "__dict__", (name,)):
        delattr(target, name)
