"""Send one message to each process of a world and receive one answer from each, without blocking on any one process."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Iterable, Mapping, Sequence

from mgpu_check.engine.launcher import Launcher
from mgpu_check.engine.pauses import CROSSED, LOOK, Pauses
from mgpu_check.engine.process import Process
from mgpu_check.processes import protocol
from mgpu_check.processes.channel import Channel, Garbled, frame
from mgpu_check.processes.clock import Clock

# Seconds that the other ranks get once a rank has raised or died: twice the time that rank took, within these bounds,
# and more while they compute. This decides only how much the report says about the other ranks, never the outcome.
_LEAST_GRACE, _MOST_GRACE = 0.05, 2.0

_NOTHING_YET = object()


def send(processes: Mapping[int, Process], message_for: Callable[[int], object]) -> list[int]:
    """Send each process its message without blocking, and return the processes that are gone.

    `collect` sends the rest.
    """
    gone = []
    last: object = None
    framed = b""
    for index, process in processes.items():
        message = message_for(index)
        if message is not last:  # one message for all is pickled once
            last, framed = message, frame(message)
        try:
            process.connection.send(framed)
        except OSError:
            gone.append(index)
    return gone


def send_rest(processes: Iterable[Process], timeout: float) -> None:
    """Send the rest of the messages to all processes at the same time, for at most `timeout` seconds."""
    deadline = Clock.now() + timeout
    with selectors.PollSelector() as selector:
        for process in processes:
            if process.connection.unsent:
                selector.register(process.connection, selectors.EVENT_WRITE)
        while selector.get_map() and (ready := selector.select(Clock.until(deadline))):
            for key, _ in ready:
                channel = key.fileobj
                assert isinstance(channel, Channel)
                with contextlib.suppress(OSError):  # `collect` detects the dead process
                    channel.flush()
                    if channel.unsent:
                        continue
                selector.unregister(channel)


def collect(
    launcher: Launcher,
    processes: Mapping[int, Process],
    timeout: float,
    expected: type,
    went_well: Callable[[object], bool],
    answers: dict[int, object],
    pauses: Pauses | None = None,
) -> tuple[list[int], dict[int, str]]:
    """Wait for one answer of each process.

    Args:
        timeout: seconds for all processes together. Once one dies or fails, the others get a short grace.
        went_well: whether an answer reports success.
        pauses: resumes processes that wait for each other during the call. If it finds a difference, or processes that
            can never meet, all that have not answered are late.

    Returns:
        The processes that did not answer in time, and, for each process that sent an invalid message and so counts as
        dead, what is wrong with the message.
    """
    garbled: dict[int, str] = {}
    waiting = {index: process for index, process in processes.items() if index not in answers}
    patience = _Patience(timeout)
    if answers:
        patience.shorten()
    overdue = False
    with selectors.PollSelector() as selector:
        for index, process in waiting.items():
            selector.register(process.connection, _interest(process), index)
        watched: list[int] = []
        while waiting:
            # A child of a dead rank may hold its connection open. The launcher reports the exit even then.
            watched = _watch(selector, watched, launcher.waitables())
            left = len(waiting)
            ready = selector.select(_moment(patience, pauses))
            if not ready and pauses is not None and Clock.now() < patience.deadline:
                if not pauses.look(waiting):
                    break
                continue
            if not ready or overdue:
                if not patience.extend(waiting.values()):
                    break
                overdue = False
                continue
            for index in _heard([key.data for key, _ in ready], launcher, waiting):
                process = waiting[index]
                try:
                    answer = _hear(process, expected, pauses is not None)
                except Garbled as error:
                    garbled[index] = str(error)
                    answer = None
                if answer is _NOTHING_YET:
                    selector.modify(process.connection, _interest(process), index)
                    continue
                if isinstance(answer, protocol.Paused):
                    assert pauses is not None
                    pauses.come(index, answer)
                    continue
                del waiting[index]
                selector.unregister(process.connection)
                answers[index] = answer
                if not went_well(answer):
                    patience.shorten()
            if pauses and not pauses.settle(waiting, patience.short):
                break
            # A process that keeps sending gets no more time than a silent one.
            overdue = len(waiting) == left and Clock.now() > patience.deadline
    return sorted(waiting), garbled


class _Patience:
    """The deadline for answers, which a failure brings forward.

    Attributes:
        deadline: the current deadline.
        latest: the latest deadline that `extend` may set.
        short: whether a failure has brought the deadline forward.
    """

    def __init__(self, timeout: float) -> None:
        self._started = Clock.now()
        self.deadline = self.latest = self._started + timeout
        self.short = False

    def shorten(self) -> None:
        """Reduce the remaining time to a short grace, because a process died or failed."""
        self.short = True
        now = Clock.now()
        grace = min(_MOST_GRACE, max(_LEAST_GRACE, 2 * (now - self._started)))
        self.deadline, self.latest = min(self.deadline, now + grace), min(self.latest, now + _MOST_GRACE)

    def extend(self, waiting: Iterable[Process]) -> bool:
        """Postpone the deadline if one of the processes computes, and return whether it was postponed."""
        now = Clock.now()
        if now >= self.latest or not any(process.runnable() for process in waiting):
            return False
        self.deadline = min(self.latest, now + _LEAST_GRACE)
        return True


def _moment(patience: _Patience, pauses: Pauses | None) -> float:
    """Return the seconds until the next deadline or the next look at ranks that have not answered."""
    left = Clock.until(patience.deadline)
    return left if pauses is None else min(left, LOOK if pauses else CROSSED)


def _heard(ready: Sequence[int | None], launcher: Launcher, waiting: Mapping[int, Process]) -> list[int]:
    """Return the processes that have sent something or ended. In `ready`, None means the launcher."""
    heard = [index for index in ready if index is not None]
    if len(heard) < len(ready):
        launcher.collect()
        heard += [i for i, process in waiting.items() if process.exit_code is not None and i not in heard]
    return heard


def _interest(process: Process) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if process.connection.unsent else 0)


def _hear(process: Process, expected: type, pauses: bool = False) -> object:
    """Read the answer of a process: None if it ended without an answer, `_NOTHING_YET` until the answer is complete."""
    try:
        answer = process.connection.receive()
        if answer is None:
            process.connection.flush()
    except (EOFError, OSError):
        return None
    if answer is None:
        return _NOTHING_YET if process.exit_code is None else None
    if not isinstance(answer, expected) and not (pauses and isinstance(answer, protocol.Paused)):
        raise Garbled(f"it is {type(answer).__name__}, not {expected.__name__}")
    return answer


def _watch(selector: selectors.BaseSelector, watched: list[int], wanted: list[int]) -> list[int]:
    """Replace the file descriptors `watched` in `selector` by `wanted`, and return `wanted`."""
    if watched != wanted:
        for fd in watched:
            selector.unregister(fd)
        for fd in wanted:
            selector.register(fd, selectors.EVENT_READ)
    return wanted


def agree(outcomes: Sequence[protocol.Outcome]) -> bool:
    """Return whether all members of each group have entered the same collectives."""
    seen: dict[protocol.Group, set[tuple[int, int]]] = {}
    counted: dict[protocol.Group, int] = {}
    for outcome in outcomes:
        for group, count, check in outcome.agreement:
            seen.setdefault(group, set()).add((count, check))
            counted[group] = counted.get(group, 0) + 1
    return all(len(seen[group]) == 1 and counted[group] == len(group.ranks) for group in seen)
