"""Find what test files and conftests set on modules of the user.

Ranks import these modules anew. A test file may set what the main block of a script sets, so ranks take it over.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import cloudpickle

from mgpu_check.plugin.private_names import AssertionRewritingHook
from mgpu_check.processes.tracebacks import is_file_under_test
from mgpu_check.torch_hooks.patches import Patches, around

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
        reduced: tuple[Any, ...] = cloudpickle.Pickler.dispatch_table[types.ModuleType](self)
        return reduced


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
    holder = _value(target.value, variables)
    if id(holder) not in object_ids:
        yield from _places(target.value, variables, object_ids)
    elif isinstance(target, ast.Attribute):
        if target.attr in vars(holder):
            yield holder, False, target.attr
    elif isinstance(holder, Mapping):
        keys = [target.slice.value] if isinstance(target.slice, ast.Constant) else [*holder]
        yield from ((holder, True, key) for key in keys if key in holder)
    elif isinstance(holder, list | set) and isinstance(target.value, ast.Attribute):
        yield _value(target.value.value, variables), False, target.value.attr


def _value(node: ast.expr, variables: Mapping[str, Any]) -> Any:
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
