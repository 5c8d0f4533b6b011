"""Reading the stacks that `faulthandler` writes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

__all__ = ["Place", "clean", "place_of"]

# What stands below the test's own frames in every rank, and helps nobody.
_ENGINE_FRAME = re.compile(
    r'File ".*/mgpu_check/(ranks/(worker|forkserver)|in_rank|shipping|node/simulated/\w+)\.py"'
    r'|^  File "<string>", line 1 in <module>$|^Extension modules: '
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_COLLECTIVES = "/torch/distributed/"


@dataclass(frozen=True)
class Place:
    """Where a rank was: in a collective called at a place of the user's code, or at that place itself."""

    collective: str | None
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        name = self.collective or self.function
        directory = os.getcwd() + os.sep
        return f"{name} ({self.file.removeprefix(directory)}:{self.line})"


def clean(text: str) -> str:
    """The stacks without the engine's own frames."""
    return "\n".join(line for line in text.strip().splitlines() if not _ENGINE_FRAME.search(line)).strip()


def place_of(stacks: str) -> Place | None:
    """Where the thread that took the signal was, which is the main one unless it was not running Python at all."""
    frames = []
    inside = False
    for line in stacks.splitlines():
        if line.startswith("Current thread"):
            inside = True
        elif inside and (frame := _FRAME.match(line)):
            frames.append(frame)
        elif inside:
            break
    collective = frames[0]["function"] if frames and _COLLECTIVES in frames[0]["file"] else None
    for frame in frames:
        if "/torch/" not in frame["file"] and not _ENGINE_FRAME.search(frame[0]):
            return Place(collective, frame["function"], frame["file"], int(frame["line"]))
    return None
