"""Read the source of a script: the line that asks for data, whether the script can do without, and what it reads."""

from __future__ import annotations

import ast
import functools
import glob
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from mgpu_check.processes.tracebacks import is_installed

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_WALKERS = (os.__file__, glob.__file__, pathlib.__file__.removesuffix("__init__.py"))  # they ignore errors
_ABSENCE = {"FileNotFoundError", "OSError", "IOError", "EnvironmentError"}
_ENDS = {"exit", "_exit", "quit", "abort", "error", "fatal", "fail"}
_LISTS = {"listdir", "scandir", "iterdir", "walk", "glob", "iglob", "rglob"}
_DIRECTORIES = {"isdir", "is_dir", "walk", "ImageFolder"}
_NO_ROWS = re.compile(
    r"environ|os|sys|.*(args?|conf|config|cfg|ckpt|checkpoint|state|kwargs|stats|logs?|metrics|model)"
)


def frames() -> Iterator[FrameType]:
    """Yield the frames of this thread without those of mgpu-check, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_PACKAGE, "<frozen ")):
            yield frame
        frame = frame.f_back


def is_of_user(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith("<") and not is_installed(file) and not file.startswith((_PACKAGE, _STANDARD))


def calling_frame() -> FrameType | None:
    """Return the innermost frame of the user's code; None in a thread of a library."""
    return next(filter(is_of_user, frames()), None)


@functools.cache
def tree_of(file: str) -> ast.Module:
    """Return the parsed source of a file; an empty module if it cannot be parsed."""
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _spans(nodes: Sequence[ast.stmt | ast.expr], line: int) -> bool:
    return any(node.lineno <= line <= (node.end_lineno or node.lineno) for node in nodes)


def _name(node: ast.expr | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _ends(body: list[ast.stmt]) -> bool:
    """Return whether statements end the script: they raise, or call a function such as `sys.exit`."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    return any(isinstance(it, ast.Raise) or (isinstance(it, ast.Call) and _name(it.func) in _ENDS) for it in nodes)


def _catches(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return not _ABSENCE.isdisjoint(map(_name, types)) and not _ends(handler.body)


def is_handled() -> bool:
    """Return whether the code catches the error of a missing file and continues, so that it needs no file."""
    for frame in frames():
        file, line = frame.f_code.co_filename, frame.f_lineno
        if file.startswith(("<", *_WALKERS)):
            continue
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Try) and _spans(node.body, line) and any(map(_catches, node.handlers)):
                return True
    return False


def is_demanded(frame: FrameType) -> bool:
    """Return whether the code ends if the file that it asks about does not exist."""
    line = frame.f_lineno
    for node in ast.walk(tree_of(frame.f_code.co_filename)):
        if isinstance(node, ast.Assert) and _spans([node], line):
            return True
        if isinstance(node, ast.If) and _spans([node.test], line):
            negated = any(isinstance(it, ast.UnaryOp) and isinstance(it.op, ast.Not) for it in ast.walk(node.test))
            return _ends(node.body if negated else node.orelse)
    return False


def _constants(file: str) -> Iterator[ast.Constant]:
    return (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Constant))


def has_constant(file: str, value: object) -> bool:
    return any(node.value == value for node in _constants(file))


def strings(file: str) -> list[str]:
    """Return the strings in a source file, in the order of their lines."""
    nodes = [node for node in _constants(file) if isinstance(node.value, str)]
    return [str(node.value) for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset))]


def keys(file: str) -> list[str]:
    """Return the keys of rows that a source file uses: ``row["a"]``, ``row.get("a")`` and ``frame[["a", "b"]]``."""
    names: list[tuple[int, object]] = []
    for node in ast.walk(tree_of(file)):
        owner, index = None, None
        if isinstance(node, ast.Subscript):
            owner, index = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            owner, index = node.func.value, next(iter(node.args), None)
        if index is not None and not _NO_ROWS.fullmatch(_name(owner).lower()):
            parts = index.elts if isinstance(index, ast.List) else [index]
            names += [(part.lineno, part.value) for part in parts if isinstance(part, ast.Constant)]
    return list(dict.fromkeys(value for _, value in sorted(names, key=lambda it: it[0]) if isinstance(value, str)))


def lists_classes(file: str) -> bool:
    """Return whether a source file lists directories in a directory."""
    names = [_name(node.func) for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)]
    return not _DIRECTORIES.isdisjoint(names) or sum(name in _LISTS for name in names) > 1


def user_files() -> list[str]:
    """Return the source files of the user that this process has imported, the script first."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    own = [os.path.abspath(file) for file in [main, *files] if file and file.endswith(".py")]
    return [
        file for file in dict.fromkeys(own) if not is_installed(file) and not file.startswith((_PACKAGE, _STANDARD))
    ]
