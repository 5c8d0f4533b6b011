"""Read the source of a script: the line that asks for data, whether the script can do without, and what it reads."""

from __future__ import annotations

import ast
import contextlib
import functools
import glob
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from mgpu_check.processes.tracebacks import is_installed

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
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


def is_of_user(file: str) -> bool:
    """Return whether a source file is neither installed nor generated."""
    return not file.startswith(("<", _PACKAGE)) and not is_installed(file)


def calling_frame() -> FrameType | None:
    """Return the innermost frame of the user's code; None in a thread of a library."""
    return next((frame for frame in frames() if is_of_user(frame.f_code.co_filename)), None)


def is_globbed() -> bool:
    """Return whether `glob` lists a directory: `Area.matched` makes what it looks for, if nothing matches."""
    frame = next(frames())
    return frame.f_code.co_filename.startswith(_WALKERS[1:]) and frame.f_code.co_name != "iterdir"


@functools.cache
def _nodes(file: str) -> list[ast.AST]:
    """Return the nodes of a source file in the order of their lines; none if it cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(Path(file).read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    return sorted(nodes, key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))


def _spans(nodes: Sequence[ast.stmt | ast.expr], line: int) -> bool:
    return any(node.lineno <= line <= (node.end_lineno or node.lineno) for node in nodes)


def _name(node: ast.expr | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _ends(body: list[ast.stmt]) -> bool:
    """Return whether statements end the script: they raise, or call a function such as `sys.exit`."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    return any(isinstance(it, ast.Raise) or (isinstance(it, ast.Call) and _name(it.func) in _ENDS) for it in nodes)


def is_handled() -> bool:
    """Return whether the code catches the error of a missing file and continues, so that it needs no file."""
    for frame in frames():
        file, line = frame.f_code.co_filename, frame.f_lineno
        nodes = [] if file.startswith(("<", *_WALKERS)) else _nodes(file)
        tries = [node for node in nodes if isinstance(node, ast.Try) and _spans(node.body, line)]
        for handler in (handler for node in tries for handler in node.handlers):
            types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            if not _ABSENCE.isdisjoint(map(_name, types)) and not _ends(handler.body):
                return True
    return False


def is_demanded(frame: FrameType) -> bool:
    """Return whether the code ends if the file that it asks about does not exist."""
    for node in _nodes(frame.f_code.co_filename):
        if isinstance(node, (ast.Assert, ast.If)) and _spans([node.test], frame.f_lineno):
            negated = any(isinstance(it, ast.UnaryOp) and isinstance(it.op, ast.Not) for it in ast.walk(node.test))
            if isinstance(node, ast.Assert):
                return not negated
            return _ends(node.body if negated else node.orelse)
    return False


def _strings_of(nodes: Iterable[ast.AST | None]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def strings(file: str) -> list[str]:
    """Return the strings in a source file, in the order of their lines."""
    return _strings_of(_nodes(file))


def keys(file: str) -> list[str]:
    """Return the keys of rows that a source file uses: ``row["a"]``, ``row.get("a")`` and ``frame[["a", "b"]]``."""
    names: list[str] = []
    for node in _nodes(file):
        owner, index = None, None
        if isinstance(node, ast.Subscript):
            owner, index = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            owner, index = node.func.value, next(iter(node.args), None)
        if not _NO_ROWS.fullmatch(_name(owner).lower()):
            names += _strings_of(index.elts if isinstance(index, ast.List) else [index])
    return list(dict.fromkeys(names))


def lists_classes(file: str) -> bool:
    """Return whether a source file lists directories in a directory."""
    names = [_name(node.func) for node in _nodes(file) if isinstance(node, ast.Call)]
    return not _DIRECTORIES.isdisjoint(names) or sum(name in _LISTS for name in names) > 1


def setting(pattern: str) -> int | None:
    """Return the number that the user gives a setting: in the files that the command line names, in the source, or in
    JSON and YAML beside the script."""
    beside = [path for name in ("*.json", "*.y*ml") for path in (*glob.glob(name), *glob.glob(f"conf*/{name}"))]
    for file in (*filter(os.path.isfile, sys.argv[1:]), *user_files(), *sorted(beside)):
        with contextlib.suppress(OSError, ValueError):
            if match := re.search(rf"\b{pattern}\b\W{{1,5}}(?P<number>\d+)\b", Path(file).read_text(encoding="utf-8")):
                return int(match["number"])
    return None


def user_files() -> list[str]:
    """Return the source files of the user that this process has imported, the script first."""
    modules = [sys.modules.get("__main__"), *sys.modules.values()]
    files = [os.path.abspath(file) for module in modules if (file := getattr(module, "__file__", None))]
    own = (file for file in dict.fromkeys(files) if file.endswith(".py") and is_of_user(file))
    return [file for file in own if os.path.lexists(file)]  # that of torch.ops is "_ops.py" (torch 2.13)
