"""Find where code under test may depend on the order of a set, by its bytecode.

It looks at the functions that the user hands to a gate, and at the functions and classes of the user's own modules that those
name. What it does not see: sets that an installed package makes and returns, functions that are looked up by a text
(`getattr`), and objects whose class nobody names.
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

__all__ = ["sets_used"]

_INSTRUCTIONS = frozenset({"BUILD_SET", "SET_ADD", "SET_UPDATE"})
_NAMES = frozenset({"set", "frozenset", "hash", "__hash__"})
_VIEWS = frozenset({"keys", "items"})
_OPERATIONS = frozenset({"&", "|", "-", "^", "&=", "|=", "-=", "^="})
"""Of the keys of a mapping they make a set."""


def sets_used(functions: Iterable[object]) -> list[str]:
    """Return where sets are made, or hashes are taken: "names (train.py:7)", in the order in which they are reached."""
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
    """Yield the code of functions, and of all that they name, as far as it is the user's own; each once."""
    waiting = list(functions)
    seen: set[int] = set()
    kept: list[object] = []  # so that nothing that is seen gives its id to another
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
    """Yield what a function names: globals, what it closes over, its defaults, and attributes of modules."""
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
            continue  # it is not filled yet
    yield from there.__defaults__ or ()


def _is_own_class(kind: type) -> bool:
    return any(
        isinstance(part, types.FunctionType) and _is_own(part.__code__.co_filename) for part in vars(kind).values()
    )


def _is_own(file: str) -> bool:
    return bool(file) and not is_installed(file) and not is_engine(file)
