"""Find places where code under test may depend on the order of a set, from its bytecode.

The search covers the functions that the user passes to a gate, and the functions and classes of the user's own modules
that they name. It misses sets that an installed package returns, functions that are looked up by a string (`getattr`),
and objects whose class is not named.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mgpu_check.processes.frames import is_engine, is_installed
from mgpu_check.processes.record import relative

_INSTRUCTIONS = frozenset({"BUILD_SET", "SET_ADD", "SET_UPDATE"})
_NAMES = frozenset({"set", "frozenset", "hash", "__hash__"})
_VIEWS = frozenset({"keys", "items"})
_OPERATIONS = frozenset({"&", "|", "-", "^", "&=", "|=", "-=", "^="})
"""Operators that make a set from the keys or items of a mapping."""


def sets_used(functions: Iterable[object]) -> list[str]:
    """Return the functions that make sets or take hashes: "names (train.py:7)", in the order of discovery."""
    found: dict[str, None] = {}
    for code in _reached(functions):
        line = _line_of_set(code)
        if line is not None:
            name = next(part for part in reversed([code.co_name, *code.co_qualname.split(".")]) if "<" not in part)
            found[f"{name} ({relative(code.co_filename)}:{line})"] = None
    return list(found)


def _line_of_set(code: types.CodeType) -> int | None:
    instructions = list(dis.get_instructions(code))
    views = bool(_VIEWS & set(code.co_names))
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        operator = instruction.argrepr if instruction.opname == "BINARY_OP" else ""
        constant = isinstance(instruction.argval, frozenset) and instruction.opname == "LOAD_CONST"
        contained = following is not None and following.opname == "CONTAINS_OP"
        if (
            instruction.opname in _INSTRUCTIONS
            or (constant and not contained)
            or (instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in _NAMES)
            or (views and operator in _OPERATIONS)
        ):
            return instruction.positions.lineno if instruction.positions is not None else code.co_firstlineno
    return None


def _reached(functions: Iterable[object]) -> Iterator[types.CodeType]:
    """Yield the code of the user's own functions, and of all functions and classes that they name, each once."""
    waiting = list(functions)
    seen: set[int] = set()
    kept: list[object] = []  # keeps objects alive, so that no id is reused
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        kept.append(one)
        if isinstance(one, type):
            waiting += [part for kind in one.__mro__ if _is_own_class(kind) for part in vars(kind).values()]
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, (property, functools.cached_property)):
            waiting += [one.func] if isinstance(one, functools.cached_property) else [one.fget, one.fset]
        elif isinstance(one, (types.MethodType, staticmethod, classmethod)):
            waiting.append(one.__func__)
        elif isinstance(one, types.FunctionType):
            function = _unwrapped(one)
            if not _is_own(function.__code__.co_filename):
                continue
            codes = list(_nested(function.__code__))
            yield from codes
            waiting += _named(function, {name for code in codes for name in code.co_names})
        elif _is_own_class(type(one)):
            waiting.append(type(one))


def _unwrapped(function: Any) -> Any:
    try:
        return inspect.unwrap(function)
    except ValueError:  # it wraps itself
        return function


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _named(function: Callable[..., Any], names: set[str]) -> Iterator[object]:
    """Yield the objects that a function names: globals, its closure, its defaults, and attributes of modules."""
    there = _unwrapped(function)
    spaces = [there.__globals__]
    for name in names:
        module = there.__globals__.get(name)
        if isinstance(module, types.ModuleType) and _is_own(getattr(module, "__file__", None) or ""):
            spaces.append(vars(module))
    for space in spaces:
        yield from (space[name] for name in names if name in space)
    for cell in there.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # the cell is still empty
    yield from there.__defaults__ or ()


def _is_own_class(kind: type) -> bool:
    return any(
        isinstance(part, types.FunctionType) and _is_own(part.__code__.co_filename) for part in vars(kind).values()
    )


def _is_own(file: str) -> bool:
    return bool(file) and not is_installed(file) and not is_engine(file)
