"""The frames of the code under test in stacks: which files are the engine's own and left out of reports, and the
stacks that `faulthandler` writes.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mgpu_check.applications import applications
from mgpu_check.processes.collective_records import relative

# Match the end of the path, because stacks from another host contain that host's paths.
_ENGINE = re.compile(r"/mgpu_check/((processes|torch_hooks|devices|plugin)/|(engine|gates|simulated)/(\w+/)?)\w+\.py$")
_ORACLE = re.compile(r"/mgpu_check/oracles/(\w+/)?\w+\.py$")
_APPLICATION = re.compile(r"/mgpu_check/(?P<folder>\w+)/.+\.py$")
_TEST = re.compile(r"(^|/)test_\w+\.py$")
_INSTALLED = re.compile(r"/lib(64)?/python3\.\d+/|/(site|dist)-packages/|/torch/|^<frozen ")
_OURS = "/mgpu_check/"


@functools.lru_cache(maxsize=1024)
def is_engine(filename: str) -> bool:
    """Return whether a file belongs to the code that runs a function on a rank, or to the simulated node."""
    return _ENGINE.search(filename) is not None or _shown_as(filename) == "engine"


@functools.lru_cache(maxsize=1024)
def is_check(filename: str) -> bool:
    """Return whether a file has checks of a packaged suite, or their oracles; the files of its tests only call them."""
    return is_of_checks(filename) and _TEST.search(filename) is None


def is_of_checks(filename: str) -> bool:
    """Return whether a file belongs to a packaged suite, or to the oracles of its checks."""
    return _shown_as(filename) == "check" or _ORACLE.search(filename) is not None


def _shown_as(filename: str) -> str:
    """Return how the application that has a file shows its frames; the user's files show as "user"."""
    match = _APPLICATION.search(filename)
    application = applications().get(match["folder"]) if match else None
    return "user" if application is None else application.frames


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
    generated = [location for location in others if not is_installed(location[0])]
    return next(iter([*generated, *others]), None)


def calling_line() -> tuple[str, int]:
    """Return file and line of the innermost frame of the code under test; ("", 0) without one."""
    # The caller's frame: a frame that refers to itself would keep the locals of all its callers, tensors too, until the
    # garbage collector ends it in the middle of a backward pass, where torch 2.13 then crashes.
    lines = ((frame.f_code.co_filename, frame.f_lineno) for frame in callers(sys._getframe(1)))
    return line_under_test(lines) or ("", 0)


def callers(frame: types.FrameType) -> Iterator[types.FrameType]:
    """Yield the frames that have called a frame, the innermost first."""
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


HALTED = "stopped by a signal, such as SIGSTOP, or by a debugger"  # in place of the stacks of a halted process

# Lines below the test's frames that are the same in every rank. The engine's frames are left out, too.
_NOISE = re.compile(r'^  File "<string>", line 1 in <module>$|^Extension modules: ')
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
RETURNING = {"pickle_result", "send_result"}  # the functions of a rank that pickle and send the result of a call
_COLLECTIVES = re.compile(r"/torch/(distributed/|nn/parallel/distributed\.py$)")
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True)
class Location:
    """The location in the code where a rank was."""

    collective: str | None  # the collective that it was in, or None
    function: str
    # file, line: the innermost line of the code under test
    file: str
    line: int

    def __str__(self) -> str:
        name = self.collective or self.function
        return f"{name} ({relative(self.file)}:{self.line})"


def clean(text: str) -> str:
    """Return the stacks without the engine's own frames."""
    return "\n".join(line for line in text.strip().splitlines() if not _is_noise(line)).strip()


def _is_noise(line: str) -> bool:
    frame = _FRAME.match(line)
    return bool(_NOISE.match(line)) or (frame is not None and is_engine(frame["file"]) and not _is_return(frame))


def is_returning(stacks: str) -> bool:
    """Return whether a rank has run the function, and pickles or sends the result, in no code under test."""
    for frame in _frames_of(stacks):
        if _is_return(frame):
            return True
        if is_file_under_test(frame["file"]):
            return False  # a `__reduce__` of the user, or a signal handler
    return False


def _is_return(frame: re.Match[str]) -> bool:
    return frame["function"] in RETURNING and is_engine(frame["file"])


def location_of(stacks: str) -> Location | None:
    """Return the location of the thread that received the signal; None without stacks."""
    frames = _frames_of(stacks)
    collective = frames[0]["function"] if frames and _COLLECTIVES.search(frames[0]["file"]) else None
    if frames and frames[0]["function"] == _BACKWARD:
        # DistributedDataParallel's reducer waits there for the other ranks (torch/autograd/graph.py, torch 2.13).
        collective = "backward"
    position = line_under_test((frame["file"], int(frame["line"])) for frame in frames)
    return None if position is None else Location(collective, frames[0]["function"], *position)


def _frames_of(stacks: str) -> list[re.Match[str]]:
    """Return the frames of the thread that received the signal, which is written last, the innermost first.

    That is the main thread, unless it cannot receive signals.
    """
    frames: list[re.Match[str]] = []
    lines = stacks.splitlines()
    threads = [number for number, line in enumerate(lines) if line.startswith(("Current thread", "Thread 0x"))]
    current = [number for number in threads if lines[number].startswith("Current")]
    for line in lines[(current or threads)[-1] + 1 :] if threads else ():
        if (frame := _FRAME.match(line)) is None:
            break
        frames.append(frame)
    return frames
