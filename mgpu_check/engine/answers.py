"""Send one message to each process of a world, and receive one answer from each, without ever waiting for a single one."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Iterable, Mapping, Sequence

from mgpu_check.engine.launcher import Launcher
from mgpu_check.engine.pauses import LOOK, Pauses
from mgpu_check.engine.process import Process
from mgpu_check.processes import protocol
from mgpu_check.processes.channel import Channel, Garbled, frame
from mgpu_check.processes.clock import Clock

__all__ = ["agree", "collect", "send", "send_rest"]

# How long the other ranks may go on once one has raised or died: twice what it took that one, within these bounds, and
# longer as long as they compute. It decides only how much of the others' story is told, never the outcome.
_LEAST_GRACE, _MOST_GRACE = 0.05, 2.0

_NOTHING_YET = object()


def send(processes: Mapping[int, Process], message_for: Callable[[int], object]) -> list[int]:
    """Send each process its message, as far as it takes it now; `collect` sends the rest. Those that are gone."""
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
    """Send what `send` has left, to all processes at the same time; give up on those that take none of it until the timeout."""
    deadline = Clock.now() + timeout
    with selectors.PollSelector() as selector:
        for process in processes:
            if process.connection.unsent:
                selector.register(process.connection, selectors.EVENT_WRITE)
        while selector.get_map() and (ready := selector.select(Clock.until(deadline))):
            for key, _ in ready:
                channel = key.fileobj
                assert isinstance(channel, Channel)
                with contextlib.suppress(OSError):  # who waits for its answer finds out
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
        expected: of which type an answer is.
        timeout: seconds for all of them. Once one is dead, or has not gone well, the others get a short grace.
        answers: those to which the answers are added, in the order of their arrival, None from a dead process; has those
            that are gone already.
        pauses: lets processes go on that wait for others in the middle; where they are not to, all that have not answered
            are late.

    Returns:
        Who gave none in time; and, for a process that sent what is no message, and counts as dead, what is wrong with it.
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
            # The launcher tells of an end that a connection hides, because a child of the rank holds it open.
            watched = _watch(selector, watched, launcher.waitables())
            left = len(waiting)
            ready = selector.select(_moment(patience, pauses))
            if not ready and pauses and Clock.now() < patience.deadline:
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
            # Who goes on and on, and never ends, gets no more time than who says nothing.
            overdue = len(waiting) == left and Clock.now() > patience.deadline
    return sorted(waiting), garbled


class _Patience:
    """Until when answers are waited for.

    Attributes:
        deadline: as it is now.
        latest: until when it can be put off, once a failure has brought it forward.
        short: a failure has.
    """

    def __init__(self, timeout: float) -> None:
        self._started = Clock.now()
        self.deadline = self.latest = self._started + timeout
        self.short = False

    def shorten(self) -> None:
        """Give the others a short grace, because one is dead, or has not gone well."""
        self.short = True
        now = Clock.now()
        grace = min(_MOST_GRACE, max(_LEAST_GRACE, 2 * (now - self._started)))
        self.deadline, self.latest = min(self.deadline, now + grace), min(self.latest, now + _MOST_GRACE)

    def extend(self, waiting: Iterable[Process]) -> bool:
        """Put the deadline off if one of the processes computes; return whether it was put off."""
        now = Clock.now()
        if now >= self.latest or not any(process.runnable() for process in waiting):
            return False
        self.deadline = min(self.latest, now + _LEAST_GRACE)
        return True


def _moment(patience: _Patience, pauses: Pauses | None) -> float:
    """Return for how long nothing but waiting is to be done."""
    left = Clock.until(patience.deadline)
    return min(left, LOOK) if pauses else left


def _heard(ready: Sequence[int | None], launcher: Launcher, waiting: Mapping[int, Process]) -> list[int]:
    """Return which processes have something to say, None standing for the launcher, or have ended."""
    heard = [index for index in ready if index is not None]
    if len(heard) < len(ready):
        launcher.collect()
        heard += [i for i, process in waiting.items() if process.exit_code is not None and i not in heard]
    return heard


def _interest(process: Process) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if process.connection.unsent else 0)


def _hear(process: Process, expected: type, pauses: bool = False) -> object:
    """Read what a process sends; None if it has ended without, `_NOTHING_YET` as long as it is not complete.

    Raises:
        Garbled: it is no answer of the type `expected`.
    """
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
    """Have the file descriptors `wanted` in `selector`, instead of `watched`."""
    if watched != wanted:
        for fd in watched:
            selector.unregister(fd)
        for fd in wanted:
            selector.register(fd, selectors.EVENT_READ)
    return wanted


def agree(outcomes: Sequence[protocol.Outcome]) -> bool:
    """Return whether the members of each group have entered the same collectives in it."""
    seen: dict[protocol.Group, set[tuple[int, int]]] = {}
    counted: dict[protocol.Group, int] = {}
    for outcome in outcomes:
        for group, count, check in outcome.agreement:
            seen.setdefault(group, set()).add((count, check))
            counted[group] = counted.get(group, 0) + 1
    return all(len(seen[group]) == 1 and counted[group] == len(group.ranks) for group in seen)
