"""Recognize the engine's own files, whose frames are left out of reports."""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Iterable, Iterator

# Match the end of the path, because stacks from another host contain that host's paths.
_ENGINE = re.compile(
    r"/mgpu_check/(processes|torch_hooks|engine(/remote|/rank_side)?|gates|simulated|compare|devices|plugin)/\w+\.py$"
)
_CHECK = re.compile(r"/mgpu_check/suite/(?!.*/test_\w+\.py$).+\.py$")
_INSTALLED = re.compile(r"/lib(64)?/python3\.\d+/|/(site|dist)-packages/|/torch/|^<frozen ")
_OURS = "/mgpu_check/"


@functools.lru_cache(maxsize=1024)
def is_engine(filename: str) -> bool:
    """Return whether a file belongs to the code that runs a function on a rank, or to the simulated node."""
    return _ENGINE.search(filename) is not None


@functools.lru_cache(maxsize=1024)
def is_check(filename: str) -> bool:
    """Return whether a file has checks of the packaged suite; the files of its tests only call them."""
    return _CHECK.search(filename) is not None


@functools.lru_cache(maxsize=1024)
def is_installed(filename: str) -> bool:
    """Return whether a file belongs to the standard library, torch or another installed package, not to the user."""
    return _INSTALLED.search(filename) is not None and _OURS not in filename


def is_file_under_test(filename: str) -> bool:
    """Return whether a file belongs to the code under test: not to the engine, nor to an installed package.

    Generated code, such as a method of a dataclass, is in no file: its name is "<string>".
    """
    return not is_engine(filename) and not is_installed(filename) and not filename.startswith("<")


def line_under_test(lines: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the first line of the code under test in a stack of files and lines, the innermost first.

    Without such a line, return the first of generated code (`python -c` runs such code), else the first of an installed
    package, else None.
    """
    others = []
    for file, line in lines:
        if is_file_under_test(file):
            return file, line
        if not is_engine(file):
            others.append((file, line))
    generated = [one for one in others if not is_installed(one[0])]
    return next(iter([*generated, *others]), None)


def calling_line() -> tuple[str, int]:
    """Return file and line of the innermost frame of the code under test; ("", 0) without one."""
    return line_under_test(_callers()) or ("", 0)


def _callers() -> Iterator[tuple[str, int]]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
