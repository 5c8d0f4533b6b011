"""Repeat on ranks the changes that fixtures and test files have made to modules of the pytest process.

A change affects one process. Ranks import the modules themselves, so they would use the originals, and a test could
pass on them. `Replacements` is for the pytest process, `Changes` for the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import os
import sys
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock

import cloudpickle
import pytest

from mgpu_check.plugin.module_state import Place, WatchedModule, set_by
from mgpu_check.processes import pickling

_MISSING = "_mgpu_check_missing"  # a marker that can be pickled and is not a user's value
_OWN = ("_pytest", "pytest", "mgpu_check", "pluggy", "hypothesis")
_STREAMS = ("stdout", "stderr")
_patch: Any = mock._patch  # base of all kinds of `mock.patch` except `mock.patch.dict`
_patch_dict: Any = mock._patch_dict


@dataclass(frozen=True)
class _Replacement:
    # module, path: the object that holds the attribute: a module's name, and attribute names below it
    module: str
    path: tuple[str, ...]
    item: bool  # whether `name` is a key of a mapping, not an attribute
    name: Any
    value: bytes | None  # the pickled new value; None if the attribute was removed


class Changes:
    """Changes of modules for a call in another process, which last as long as this context.
    Unpickling makes them already, because the function that follows may import modules that need them."""

    def __init__(self, pickled: bytes, missing: Mapping[str, str]) -> None:
        """Take the pickled replacements, and a sentence about each variable that cannot be sent, by its name."""
        self._pickled, self._missing = pickled, missing
        self._undo: contextlib.ExitStack | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._pickled, self._missing)

    def __enter__(self) -> Self:
        if self._undo is None:
            self._undo = contextlib.ExitStack()
            for replacement in pickling.loads(self._pickled):
                try:
                    target = _found(importlib.import_module(replacement.module), replacement.path)
                except Exception:  # importing a module runs its code
                    continue  # this process has no original to replace
                location = target, replacement.item, replacement.name
                self._undo.callback(_put, *location, _value(*location))
                _put(*location, _MISSING if replacement.value is None else pickling.loads(replacement.value))
        return self

    def __exit__(self, error_type: object, error: BaseException | None, tb: types.TracebackType | None) -> None:
        assert self._undo is not None
        self._undo.close()
        self._undo = None
        module = getattr(getattr(error, "obj", None), "__name__", None)  # of an AttributeError
        if isinstance(error, NameError):
            *_, (frame, _) = traceback.walk_tb(tb)
            module = frame.f_globals.get("__name__")
        if error is not None and (sentence := self._missing.get(f"{module}.{getattr(error, 'name', None)}")):
            error.add_note(sentence)


def _made(pickled: bytes, missing: Mapping[str, str]) -> Changes:
    return Changes(pickled, missing).__enter__()


class Replacements:
    """Records replacements between `start` and `end`; `modules` returns the current test's own ones, and conftests.

    `execution.record_replacements` makes one after the collection, and pytest ends it with the run. Each call on ranks
    takes its `changes`.
    """

    def __init__(self, modules: Callable[[], Iterable[types.ModuleType]]) -> None:
        self._modules = modules
        self._warned: dict[tuple[str, int], set[str]] = {}
        self._patches: weakref.WeakSet[pytest.MonkeyPatch] = weakref.WeakSet()
        self._mocks: list[Any] = []
        self._undo = contextlib.ExitStack()
        self._paths = _ImportPaths()

    def start(self) -> None:
        # Include existing patches, such as one that a conftest created at import.
        self._patches.update(
            referrer for referrer in gc.get_referrers(pytest.MonkeyPatch) if type(referrer) is pytest.MonkeyPatch
        )
        patches, mocks = self._patches, self._mocks
        original = pytest.MonkeyPatch.__init__

        @functools.wraps(original)
        def make(self: pytest.MonkeyPatch) -> None:
            original(self)
            patches.add(self)

        self._set(pytest.MonkeyPatch, "__init__", make)
        for patch_class in (_patch, _patch_dict):
            self._set(patch_class, "__enter__", _noting(patch_class.__enter__, mocks.append))
            self._set(patch_class, "__exit__", _noting(patch_class.__exit__, self._forget))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def _forget(self, mock_patch: Any) -> None:
        self._mocks[:] = [candidate for candidate in self._mocks if candidate is not mock_patch]

    def end(self) -> None:
        self._undo.close()

    def changes(self, function: Callable[..., Any]) -> Changes:
        """Return the current replacements, and those of test files, for a call of `function` in another process.

        Warns of values that cannot be sent: mocks, because ranks would only get copies, and values that cannot be
        pickled. The warning points at the first line of `function`, which the ranks will run.
        """
        replacements: list[_Replacement] = []
        missing: dict[str, str] = {}
        for target, item, name in self._places():
            if target is os.environ or (target is sys and name in _STREAMS):
                continue  # ranks receive the variables anyway, and have their own output
            if (path := self._paths.of(target)) is None:
                continue
            try:
                replacements.append(_replacement(path, target, item, name))
            except _CannotBeSent as error:
                shown = ".".join((path[0], *path[1], *(() if item else (name,)))) + (f"[{name!r}]" if item else "")
                missing[shown] = (
                    f"{shown} is set in the pytest process only, because its value {error}; set it in the function "
                    "that runs on the ranks, such as build or step"
                )
        code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", _replacement.__code__)
        position = code.co_filename, code.co_firstlineno
        for sentence in set(missing.values()) - self._warned.setdefault(position, set()):
            self._warned[position].add(sentence)
            warnings.warn_explicit(sentence, pytest.PytestWarning, *position)
        return Changes(pickling.dumps(tuple(replacements)), missing)

    def _places(self) -> Collection[Place]:
        places: dict[tuple[int, Any], Place] = {}
        for patch in list(self._patches):
            for target, name, _ in patch._setattr:
                places[id(target), name] = target, False, name
            for target, key, _ in patch._setitem:
                places[id(target), repr(key)] = target, True, key
        for mock_patch in self._mocks:
            if isinstance(mock_patch, _patch_dict):
                original = getattr(mock_patch, "_original", None) or {}
                now = mock_patch.in_dict
                for key in {*original, *now}:
                    if key not in now or key not in original or now[key] is not original[key]:
                        places[id(now), repr(key)] = now, True, key
            elif mock_patch.target is not None:
                places[id(mock_patch.target), mock_patch.attribute] = mock_patch.target, False, mock_patch.attribute
        for target, item, name in set_by(self._modules()):
            path = self._paths.of(target)
            if path is not None and isinstance(sys.modules[path[0]], WatchedModule):
                places.setdefault((id(target), repr(name) if item else name), (target, item, name))
        self._paths.forget_all_but([target for target, _, _ in places.values()])
        return places.values()


class _ImportPaths:
    """Finds import paths of objects for other processes.
    The paths are cached, because a search goes through all modules, and every call needs them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int, tuple[str, tuple[str, ...]] | None]] = {}

    def of(self, target: Any) -> tuple[str, tuple[str, ...]] | None:
        """Return the module and the names below it; None without such a path, or if the module is pickled by value."""
        cached, modules, path = self._known.get(id(target), (None, 0, None))
        if cached is not target or modules != len(sys.modules):
            path = _import_path(target)
            self._known[id(target)] = target, len(sys.modules), path
        return path

    def forget_all_but(self, targets: list[Any]) -> None:
        """Drop all other objects from the cache, so that it does not keep them alive."""
        ids = {id(target) for target in targets}
        self._known = {object_id: entry for object_id, entry in self._known.items() if object_id in ids}


def _noting(original: Callable[..., Any], note: Callable[[Any], object]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noting(self: Any, *args: Any) -> Any:
        note(self)
        return original(self, *args)

    return noting


class _CannotBeSent(Exception):
    """A value of the pytest process cannot be sent to ranks; the text says why."""


def _replacement(location: tuple[str, tuple[str, ...]], target: Any, item: bool, name: Any) -> _Replacement:
    value = _value(target, item, name)
    if value is _MISSING:
        return _Replacement(*location, item, name, None)
    if isinstance(value, mock.NonCallableMock):
        raise _CannotBeSent("is a mock, and its calls would not be seen here")
    try:
        return _Replacement(*location, item, name, pickling.dumps(value))
    except Exception as error:
        raise _CannotBeSent(f"cannot be pickled: {error}") from error


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
    imported = sys.modules.get(module)
    by_value = cloudpickle.list_registry_pickle_by_value()
    return (
        isinstance(imported, types.ModuleType)
        and imported.__spec__ is not None
        and module.partition(".")[0] not in _OWN
        and not any(module == package or module.startswith(package + ".") for package in by_value)
    )


def _found(holder: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(getattr, path, holder)


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
