"""Track which streams record a CUDA graph, and refuse the calls that CUDA refuses meanwhile.

A capture begins on one stream. A stream that waits for a capturing one joins its capture. It must be waited for before
the capture ends. CUDA refuses to wait for results of the device, and to order captured work after other work.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NoReturn

from mgpu_check.simulated.state import cuda_error

_MODES = ("global", "thread_local", "relaxed")
_UNSUPPORTED = 900, "operation not permitted when stream is capturing"
_INVALIDATED = 901, "operation failed due to a previous error during capture"
_MERGE = 902, "operation would result in a merge of separate capture sequences"
_UNJOINED = 904, "capturing stream has unjoined work"
_ISOLATION = 905, "dependency created on uncaptured work in another stream"
_CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream"

_under_way: list[Capture] = []


class Capture:
    """A capture of one graph: its streams, and whether an error has invalidated it."""

    def __init__(self, mode: str) -> None:
        if mode not in _MODES:
            raise RuntimeError(
                "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got " + str(mode)
            )
        self.mode = mode
        self.branches: list[Branch] = []
        self._streams: list[Recording] = []
        self.broken = False
        self.ended = False
        self._thread = threading.get_ident()

    def begin_on(self, stream: Recording) -> Branch:
        """Start recording on a stream, and return its branch, which is empty.

        The first stream is the origin of the capture. The capture is under way from then on.
        """
        if not self.branches:
            _under_way.append(self)
        stream.branch = made = Branch(self, id(stream))
        self.branches.append(made)
        self._streams.append(stream)
        return made

    def fail(self, error: tuple[int, str]) -> NoReturn:
        self.broken = True
        raise cuda_error(*error)

    def end(self) -> None:
        """Stop recording, as cudaStreamEndCapture does on the stream of the first branch."""
        self.release()
        origin = self.branches[0]
        if self.broken:
            raise cuda_error(*_INVALIDATED)
        if any(other.work > origin.seen.get(other.stream, 0) for other in self.branches[1:]):
            raise cuda_error(*_UNJOINED)

    def release(self) -> None:
        self.ended = True
        _under_way.remove(self)
        for stream in self._streams:
            stream.branch = None
        self._streams.clear()

    def reaches_this_thread(self) -> bool:
        """Return whether a potentially unsafe call of this thread invalidates this capture."""
        return self.mode == "global" or (self.mode == "thread_local" and self._thread == threading.get_ident())


@dataclass(eq=False)
class Branch:
    """The part of a capture that one stream has recorded so far, or up to an event.

    Attributes:
        work: number of operations that it has recorded.
        seen: stream -> number of its operations that come before the next operation of this stream.
    """

    capture: Capture
    stream: int
    work: int = 0
    seen: dict[int, int] = field(default_factory=dict)

    def mark(self) -> Branch:
        """Return the branch for an event that is recorded now."""
        return Branch(self.capture, self.stream, self.work, {**self.seen, self.stream: self.work})


class Recording:
    """The base class of streams and events: their branch of a capture."""

    branch: Branch | None = None
    marks_only = False  # True for an event, which only marks the work of a stream

    def refuse_wait(self) -> None:
        if self.branch is None:
            return
        if self.marks_only:
            raise cuda_error(*_CAPTURED_EVENT)
        self.branch.capture.fail(_UNSUPPORTED)

    def follow(self, other: Recording) -> None:
        """Order the later work of this stream after the recorded work of another stream or event."""
        mine, theirs = self.branch, other.branch
        if theirs is None:
            if mine is not None:
                mine.capture.fail(_ISOLATION)
            return
        if theirs.capture.ended:
            raise cuda_error(*_CAPTURED_EVENT)
        if mine is None:
            mine = theirs.capture.begin_on(self)
        elif mine.capture is not theirs.capture:
            mine.capture.fail(_MERGE)
        for stream, work in theirs.mark().seen.items():
            mine.seen[stream] = max(mine.seen.get(stream, 0), work)


def abandon() -> None:
    for capture in list(_under_way):
        capture.release()


def refuse_in_thread() -> None:
    """Refuse a call that may be unsafe while a stream captures, such as a wait for a whole device."""
    for capture in _under_way:
        if capture.reaches_this_thread():
            capture.fail(_UNSUPPORTED)
