"""Store what the ranks were given, for a run on one device that is given the same: a file of pickled items per rank.

Each item has a *channel*, a *location* and a value. The location is the stack of the user's code, with the number of
the micro-batch. The items of one channel and location are counted, so that the n-th item of a rank meets the n-th of
the others.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import pickle
import struct
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mgpu_check.compare.trace import write_all
from mgpu_check.processes.tracebacks import is_installed
from mgpu_check.torch_hooks.nested import leaves, tensors_of, with_tensors
from mgpu_check.torch_hooks.tensors import plain

STEPS = 2  # optimizer steps that are replayed unless the user says: the first gradient, and the first after an update
_HEAD = struct.Struct("=QQ")
_LIMIT = 2**30  # bytes of a rank, to bound the space of large batches
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep
_IN_SCRIPT = _OURS + "compare/in_script/"
_AROUND = (
    *(_TORCH, f"{_OURS}simulated{os.sep}", f"{_OURS}torch_hooks{os.sep}", "<frozen "),
    *(_IN_SCRIPT + module for module in ("script_calls", "replay", "tape")),
)
"""Files whose frames may be between the code of the user and a draw of the user."""
_DIRECTORY = os.getcwd()  # when the run starts: the script may change it


class Tape:
    """Writes the items of a rank to a file descriptor, up to a limit.
    `replay.install` makes it in the process of a rank; a `RankRecording` and its parts write to it, until its limit or
    the last recorded step. The runner reads the file afterwards."""

    def __init__(self, fd: int) -> None:
        self._fd, self._size = fd, 0
        self.full = False

    def put(self, channel: str, location: str, value: Any) -> None:
        """Append an item, unless the limit was reached. A single model that exceeds it is left out."""
        if self.full:
            return
        tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
        self._size += (size := sum(t.numel() * t.element_size() for t in tensors))
        if self._size > _LIMIT and channel == "start":
            self._size, value = self._size - size, Unstored(f"it has more than {_LIMIT} bytes")
        self.full = self._size > _LIMIT
        if self.full:
            return
        head = pickle.dumps((channel, location))
        try:
            # Cloned, because a view would store all of its storage.
            body = pickle.dumps(with_tensors(value, [plain(tensor).clone() for tensor in tensors_of(value)]))
        except Exception as error:  # an object of the user that cannot be pickled
            body = pickle.dumps(Unstored(f"{type(value).__name__} cannot be pickled: {error}"))
        write_all(self._fd, _HEAD.pack(len(head), len(body)), head, body)


class Unstored(NamedTuple):
    """Takes the place of a value that could not be stored."""

    reason: str


class Tapes:
    """The items of all ranks, each read when it is needed, from a file that `write_joint` has written.
    `replay.install` makes it in the run on one device, whose `RankReplaying` takes one item of each rank in turn."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        size = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))[1]
        self._dealt, self.world, self.turned, self.other_seeds = self._read((_HEAD.size, size))
        self._at: dict[tuple[str, str], list[list[tuple[int, int]]]] = defaultdict(
            lambda: [[] for _ in range(self.world)]
        )
        self._next: Counter[tuple[str, str]] = Counter()
        self._exact: set[tuple[str, str]] = set()  # channel and place that ranks and one device have
        self._nearest: dict[tuple[str, str], tuple[str, str] | None] = {}  # a place of one device -> that of ranks
        self.confused = False  # one device has two places for one of ranks
        for rank, channel, location, start, own in _items(fd):
            self._at[channel, location][rank].append((start, own))

    def _read(self, at: tuple[int, int]) -> Any:
        start, size = at
        return pickle.loads(os.pread(self._fd, size, start))

    def turn(self, channel: str, location: str, micro: int | None = None) -> list[Any]:
        """Return the next value of each rank for this place; of one rank if micro-batches are dealt.

        The list is empty if a rank has no further value.

        `micro`: the number of the micro-batch; None if the place has one value for each micro-batch.
        """
        number = self._next[channel, f"{location} {micro}"]
        self._next[channel, f"{location} {micro}"] += 1
        rank = None
        if self._dealt and micro is not None:
            micro, rank = divmod(micro, self.world)
        elif self._dealt:
            number, rank = divmod(number, self.world)
        entries = self._entries(channel, location, micro)
        if not entries:
            return []
        if rank is not None:
            entries = [entries[rank]]
        return [self._read(own[number]) for own in entries] if all(number < len(own) for own in entries) else []

    def _entries(self, channel: str, location: str, micro: int | None = None) -> Sequence[list[tuple[int, int]]]:
        """Return the values of each rank for a place, or for the only place of ranks whose innermost lines are alike.

        One device may call a function from another line: ``if distributed: train(rank) else: train(0)``.
        """
        at = channel, location if micro is None else f"{location} {micro}"
        if at in self._at:
            self.confused = self.confused or at in self._nearest.values()
            self._exact.add(at)
            return self._at[at]
        if at not in self._nearest:
            alike = {other: _lines_in_common(at[1], other[1]) for other in self._at.keys() - self._exact}
            most = max((lines for other, lines in alike.items() if other[0] == channel), default=0)
            nearest = [other for other, lines in alike.items() if other[0] == channel and lines == most > 0]
            self._nearest[at] = nearest[0] if len(nearest) == 1 else None
        nearest_place = self._nearest[at]
        return () if nearest_place is None else self._at[nearest_place]

    def first(self, channel: str, location: str, number: int = 0) -> Any:
        """Return a value of the first rank that has it; None if no rank has it."""
        for own in self._entries(channel, location):
            if number < len(own):
                return self._read(own[number])
        return None


def _lines_in_common(place: str, other: str) -> int:
    """Return how many of the innermost lines two places have in common; 0 if the words around them differ."""
    (*own, end), (*others, other_end) = place.split(), other.split()
    common = itertools.takewhile(operator.itemgetter(0), ((a == b, a) for a, b in zip(own, others, strict=False)))
    lines = sum(word.rpartition(":")[2].isdigit() for _, word in common)
    # A number at the end counts micro-batches or loops; a line may be another one.
    return lines if end == other_end or not (end.isdigit() or other_end.isdigit()) else 0


def write_joint(
    fd: int,
    tapes: Sequence[int],
    dealt: bool,
    *,
    turned: bool = False,
    other_seeds: bool = False,
    backwards: bool = False,
) -> None:
    """Write the items of all ranks to one file, in place of its content.

    Args:
        tapes: the files of the ranks, in order.
        dealt: one device takes the micro-batches of the ranks in turn, instead of joining them: its micro-batch
            ``n * world + r`` is the n-th of rank r.
        turned: see `mgpu_check.compare.in_script.joining.SampleRows`.
        other_seeds: change the seeds that the script sets on one device.
        backwards: the samples of the last rank come first.
    """
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    head = pickle.dumps((dealt, len(tapes), turned, other_seeds))
    write_all(fd, _HEAD.pack(0, len(head)), head)
    for tape in reversed(tapes) if backwards else tapes:
        write_all(fd, _HEAD.pack(0, 0))
        size, start = os.fstat(tape).st_size, 0
        while start < size:
            start += os.sendfile(fd, tape, start, size - start)


def _items(fd: int) -> Iterator[tuple[int, str, str, int, int]]:
    end, start, rank = os.fstat(fd).st_size, 0, -1
    start += _HEAD.size + _HEAD.unpack(os.pread(fd, _HEAD.size, 0))[1]
    while start < end:
        head, body = _HEAD.unpack(os.pread(fd, _HEAD.size, start))
        start += _HEAD.size
        if not head:
            rank += 1
            continue
        channel, location = pickle.loads(os.pread(fd, head, start))
        yield rank, channel, location, start + head, body
        start += head + body


def place(of_a_loop: bool = False) -> str:
    """Return the stack of the script outside of torch and mgpu-check, the innermost line first.

    The lines of installed packages that call the innermost line of the user are left out: those of a Trainer differ
    between one device and ranks.

    `of_a_loop`: leave out all lines of installed packages, as those of a Trainer's loop over a loader, unless the
    script itself is installed: without its lines, all of its loops would have one place.
    """
    lines: list[str] = []
    of_users: list[str] = []
    reached_user = False  # a line of the user
    for frame in _frames():
        name = frame.f_code.co_filename
        main = frame.f_globals.get("__name__") == "__main__"
        if not name.startswith((_TORCH, _OURS, "<frozen ")):
            line, users = f"{_within_run(name)}:{frame.f_lineno}", _is_users(name)
            reached_user = reached_user or users
            if users or main:
                of_users.append(line)
            if users or main or not reached_user:
                lines.append(line)
        if main and frame.f_code.co_name == "<module>":
            break  # further frames start the script
    return " ".join(of_users if of_a_loop and reached_user else lines)


@functools.cache
def _is_users(file: str) -> bool:
    """Return whether a file is neither installed nor the start of an installed program.
    The directories above that of the run do not count: a project may be in a directory named "torch"."""
    return os.path.dirname(file) != os.path.dirname(sys.executable) and not is_installed("/" + _within_run(file))


@functools.cache
def _within_run(file: str) -> str:
    """Return the path from the directory of the run: each run may have a directory of its own."""
    return file if file.startswith("<") else os.path.relpath(file, _DIRECTORY)


def nearest_line() -> str | None:
    """Return the innermost line outside of torch; None if this package itself computes, such as a perturbation."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_AROUND):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return None
    return f"{_within_run(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_within_gradients() -> bool:
    """Return whether `torch.func` differentiates a function, whose tensors it saves before operators run."""
    return any(frame.f_code.co_filename.endswith("torch/_functorch/eager_transforms.py") for frame in _frames())


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
