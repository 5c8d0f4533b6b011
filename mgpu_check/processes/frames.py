"""Recognize the engine's own files, whose frames are left out of reports."""

from __future__ import annotations

import functools
import re
import sys
import types

__all__ = ["calling_line", "is_engine", "is_installed"]

# Match the end of the path, because stacks from another host contain that host's paths.
_ENGINE = re.compile(
    r"/mgpu_check/((processes|torch_hooks|engine(/remote|/rank_side)?|gates|simulated|compare)/\w+"
    r"|plugin/(in_rank|serialization|forwarding))\.py$"
)
_INSTALLED = re.compile(r"/lib(64)?/python3\.\d+/|/(site|dist)-packages/|/torch/|^<frozen ")
_OURS = "/mgpu_check/"


@functools.lru_cache(maxsize=1024)
def is_engine(filename: str) -> bool:
    """Return whether a file belongs to the code that runs a function on a rank, or to the simulated node."""
    return _ENGINE.search(filename) is not None


@functools.lru_cache(maxsize=1024)
def is_installed(filename: str) -> bool:
    """Return whether a file belongs to the standard library, torch or another installed package, not to the user."""
    return _INSTALLED.search(filename) is not None and _OURS not in filename


def calling_line() -> tuple[str, int]:
    """Return file and line of the innermost frame of the code under test.

    Without such a frame, return those of the innermost frame outside the engine, or ("", 0).
    """
    frame: types.FrameType | None = sys._getframe(1)
    other: tuple[str, int] | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_engine(file):
            if not is_installed(file):
                return file, frame.f_lineno
            other = other or (file, frame.f_lineno)
        frame = frame.f_back
    return other or ("", 0)
