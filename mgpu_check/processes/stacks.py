"""Parse the stacks that `faulthandler` writes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mgpu_check.processes.frames import is_engine, line_under_test
from mgpu_check.processes.record import relative

HALTED = "stopped by a signal, such as SIGSTOP, or by a debugger"
"""In place of the stacks of a halted process."""

# Lines below the test's frames that are the same in every rank. The engine's frames are left out, too.
_NOISE = re.compile(r'^  File "<string>", line 1 in <module>$|^Extension modules: ')
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
RETURNING = {"pickle_result", "send_result"}
"""The functions of a rank that pickle and send the result of a call."""
_COLLECTIVES = re.compile(r"/torch/(distributed/|nn/parallel/distributed\.py$)")
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True)
class Location:
    """The location in the code where a rank was.

    Attributes:
        collective: the collective that it was in, or None.
        file, line: the innermost line of the code under test.
    """

    collective: str | None
    function: str
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
    engine = frame is not None and is_engine(frame["file"]) and frame["function"] not in RETURNING
    return bool(_NOISE.match(line)) or engine


def is_returning(stacks: str) -> bool:
    """Return whether a rank has run the function, and pickles or sends the result."""
    frames = filter(None, map(_FRAME.match, stacks.splitlines()))
    return any(frame["function"] in RETURNING and is_engine(frame["file"]) for frame in frames)


def location_of(stacks: str) -> Location | None:
    """Return the location of the thread that received the signal, which is written last; None without stacks.

    That is the main thread, unless it cannot receive signals.
    """
    frames = []
    lines = stacks.splitlines()
    threads = [number for number, line in enumerate(lines) if line.startswith(("Current thread", "Thread 0x"))]
    current = [number for number in threads if lines[number].startswith("Current")]
    for line in lines[(current or threads)[-1] + 1 :] if threads else ():
        if (frame := _FRAME.match(line)) is None:
            break
        frames.append(frame)
    collective = frames[0]["function"] if frames and _COLLECTIVES.search(frames[0]["file"]) else None
    if frames and frames[0]["function"] == _BACKWARD:
        collective = "backward"  # DistributedDataParallel's reducer waits there for the other ranks
    found = line_under_test((frame["file"], int(frame["line"])) for frame in frames)
    return None if found is None else Location(collective, frames[0]["function"], *found)
