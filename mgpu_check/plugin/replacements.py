"""Repeat on ranks the changes that fixtures and test files have made to modules of the pytest process.

A change affects one process. Ranks import the modules themselves, so they would use the originals, and a test could
pass on them. `Replacements` is for the pytest process, `Changes` for the ranks. A test file may set what the main block
of a script sets, so ranks take over what test files and conftests set on modules of the user, too.
"""

from __future__ import annotations

import ast
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Self
from unittest import mock

import cloudpickle
import pytest

from mgpu_check.plugin.private_names import AssertionRewritingHook
from mgpu_check.processes import pickling
from mgpu_check.processes.tracebacks import is_file_under_test
from mgpu_check.torch_hooks.patches import Patches, around

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


Place = tuple[Any, bool, Any]
"""An object, whether it is a mapping whose item is set, and the name of the attribute or the key of the item."""

_PACKAGE = str(Path(__file__).parents[1])
_CHANGING = {"update", "setdefault", "pop", "append", "extend", "insert", "add", "remove", "discard", "clear"}


_watched: weakref.WeakSet[types.ModuleType] = weakref.WeakSet()
"""All watched modules: to look for them among thousands would take longer than a short call."""


class WatchedModule(types.ModuleType):
    """A module that remembers which files set its attributes. Its own code sets them in its dictionary, unseen."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        _watched.add(self)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        vars(self).setdefault("__set_by__", {})[name] = sys._getframe(1).f_code.co_filename

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        vars(self).setdefault("__set_by__", {})[name] = sys._getframe(1).f_code.co_filename

    def __reduce__(self) -> tuple[Any, ...]:
        # As for any module: by name, or by value if other processes cannot import it.
        return cloudpickle.Pickler.dispatch_table[types.ModuleType](self)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Within the context, modules of the user that are imported are watched."""

    @around
    def create_module(create: Any, loader: Any, spec: Any) -> types.ModuleType | None:
        module: types.ModuleType | None = create(loader, spec)
        if module is not None or spec.name.startswith("mgpu_check.") or not is_file_under_test(spec.origin or "<"):
            return module
        return WatchedModule(spec.name)

    with Patches() as patches:
        for loader in (SourceFileLoader, AssertionRewritingHook):
            patches.wrap(loader, "create_module", create_module)
        yield


def set_by(modules: Iterable[types.ModuleType]) -> Iterator[Place]:
    """Return what the code of test files and conftests has set on other modules, and below them.

    Watched modules know their attributes. The rest is read from the statements that run in the pytest process: those
    outside of functions, and those of fixtures, hooks and tests.
    """
    files = {module.__file__: module for module in modules if module.__file__}
    watched = [module for module in _watched if sys.modules.get(module.__name__) is module]
    for module in watched:
        files_by_name = vars(module).get("__set_by__", {})
        yield from ((module, False, name) for name, file in files_by_name.items() if file in files)
    targets = {file: () if file.startswith(_PACKAGE) else _targets(file) for file in files}
    if not any(targets.values()):
        return
    object_ids = {id(value) for module in watched for value in (module, *vars(module).values())}
    for file, test in files.items():
        for target in targets[file]:
            with contextlib.suppress(Exception):  # the statement may not have run, and properties may raise anything
                yield from _places(target, vars(test), object_ids)


def _places(target: ast.expr, variables: Mapping[str, Any], object_ids: Collection[int]) -> Iterator[Place]:
    """Yield what exists of a target: a statement that runs on ranks only has set nothing here.
    `object_ids`: the ids of the objects that other processes find by the name of a module, and at most one below it."""
    if not isinstance(target, ast.Attribute | ast.Subscript):
        return
    holder = _value_of_node(target.value, variables)
    if id(holder) not in object_ids:
        yield from _places(target.value, variables, object_ids)
    elif isinstance(target, ast.Attribute):
        if target.attr in vars(holder):
            yield holder, False, target.attr
    elif isinstance(holder, Mapping):
        keys = [target.slice.value] if isinstance(target.slice, ast.Constant) else [*holder]
        yield from ((holder, True, key) for key in keys if key in holder)
    elif isinstance(holder, list | set) and isinstance(target.value, ast.Attribute):
        yield _value_of_node(target.value.value, variables), False, target.value.attr


def _value_of_node(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    if any(isinstance(child, ast.Call) for child in ast.walk(node)):
        raise ValueError("a call may have effects")
    return eval(ast.unparse(node), dict(variables))


@functools.lru_cache(maxsize=256)
def _targets(file: str) -> tuple[ast.Attribute | ast.Subscript, ...]:
    """Return the attributes and items that statements of a file set in the pytest process."""
    try:
        todo: list[tuple[ast.AST, bool]] = [(ast.parse(Path(file).read_bytes()), False)]
    except (OSError, SyntaxError, ValueError):
        return ()
    targets: list[ast.Attribute | ast.Subscript] = []
    while todo:
        node, inside = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if inside or not _runs_here(node):  # a function in a test is for ranks
                continue
            inside = True
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            targets.append(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            targets.append(ast.Subscript(node.func.value, ast.Slice()))
        todo += ((child, inside) for child in ast.iter_child_nodes(node))
    return tuple(targets)


def _runs_here(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> bool:
    return not isinstance(function, ast.Lambda) and (
        function.name.startswith(("pytest_", "test", "setup_", "setUp"))
        or any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)
    )
