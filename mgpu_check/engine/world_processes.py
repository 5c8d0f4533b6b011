"""The processes of a world: start and end them, send one message to each and receive one answer from each, without
blocking on any one process.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Iterable, Mapping, Sequence

from mgpu_check.devices.inventory import Slot
from mgpu_check.engine.failures import NODE, Died, Interrupted, Who
from mgpu_check.engine.launcher import Launcher
from mgpu_check.engine.lockstep import CROSSED, LOOK, Pauses
from mgpu_check.engine.process import STACKS_TIMEOUT, STREAMS, Process
from mgpu_check.errors import AgentLost, RankDied, StartupFailure
from mgpu_check.processes import environments
from mgpu_check.processes.channel import (
    Channel,
    Clock,
    Garbled,
    Group,
    Outcome,
    Paused,
    RankSpec,
    Ready,
    Rested,
    frame,
    ready,
)
from mgpu_check.processes.child_processes import STACKS_SIGNAL
from mgpu_check.processes.collective_records import Record
from mgpu_check.processes.tracebacks import HALTED

# Seconds that the other ranks get once a rank has raised or died: twice the time that rank took, within these bounds,
# and more while they compute. This decides only how much the report says about the other ranks, never the outcome.
_LEAST_GRACE, _MOST_GRACE = 0.05, 2.0

_NOTHING_YET = object()


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
                with contextlib.suppress(OSError):  # `_collect` detects the dead process
                    channel.flush()
                    if channel.unsent:
                        continue
                selector.unregister(channel)


class _Patience:
    """The deadline for answers, which a failure brings forward."""

    def __init__(self, timeout: float) -> None:
        self._started = Clock.now()
        self.deadline = self.latest = self._started + timeout  # latest: that `extend` may set
        self.short = False  # whether a failure has brought the deadline forward

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
    if not isinstance(answer, expected) and not (pauses and isinstance(answer, Paused)):
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


def agree(outcomes: Sequence[Outcome]) -> bool:
    """Return whether all members of each group have entered the same collectives."""
    checks: dict[Group, set[tuple[int, int]]] = {}
    counted: dict[Group, int] = {}
    for outcome in outcomes:
        for group, count, check in outcome.agreement:
            checks.setdefault(group, set()).add((count, check))
            counted[group] = counted.get(group, 0) + 1
    return all(len(checks[group]) == 1 and counted[group] == len(group.ranks) for group in checks)


EXIT_TIMEOUT = 1.0  # seconds from the end of a connection to the exit code of its process
_START_TIMEOUT = 120.0  # seconds: device contexts and NCCL communicators take several seconds each
_LAST_CHARACTERS = 4000  # of stderr in a report, enough for a traceback


class WorldProcesses:
    """Warm processes, one for each rank of a world, or the node process.
    They are *broken* once they cannot be used again: a process died or was killed, or they are out of lockstep."""

    def __init__(
        self, launcher: Launcher, spec_of: Callable[[int], RankSpec], indices: Sequence[int], slots: Sequence[Slot]
    ) -> None:
        """Start a process for each of `indices` (ranks, or `NODE`) on the slot at the same position of `slots`."""
        self.launcher = launcher
        hosts = {index: launcher.host_name(slot.host) for index, slot in zip(indices, slots, strict=True)}
        self.who = Who(0 if list(indices) == [NODE] else len(indices), hosts if all(hosts.values()) else {})
        self.broken = False
        self._answers: dict[int, object] = {}
        self._garbled: dict[int, str] = {}
        self.processes: dict[int, Process] = {}
        try:
            specs = {index: spec_of(index) for index in indices}
            seeds_apart = any(environments.apart(spec.own_environment) for spec in specs.values())
            self.processes = dict(zip(indices, launcher.launch(slots, seeds_apart), strict=True))
            self._await_ready(self._send(specs.__getitem__))
        except BaseException as error:
            if not isinstance(error, Exception):  # from outside, as by pytest-timeout
                error.add_note(
                    "ranks were still starting; the first test with ranks waits until torch is imported, so its time "
                    "limit must include that"
                )
            self.discard()
            raise

    def _await_ready(self, unsent: Sequence[int]) -> None:
        def is_up(answer: object) -> bool:
            return isinstance(answer, Ready) and answer.failure is None

        answers, late = self._collect(_START_TIMEOUT, Ready, is_up, dead=unsent)
        for index, answer in answers.items():
            if answer is None:
                end = self._died(index, Clock.now() + EXIT_TIMEOUT)
                raise StartupFailure(
                    f"{self.who.full([index])} died while it started: {end.cause}\n"
                    f"{self.processes[index].output('stderr')}{end.last_words}",
                    ranks=[index],
                )
            assert isinstance(answer, Ready)
            if answer.failure is not None:
                failure = StartupFailure(
                    f"{self.who.full([index])} could not start: {answer.failure.headline}\n{answer.failure.text}",
                    ranks=[index],
                )
                failure.cause = answer.failure.type.rpartition(".")[2]
                raise failure
        if late:
            raise StartupFailure(f"{self.who.full(late)} did not start within {_START_TIMEOUT:g} s", ranks=late)

    def _ask(self, message: object, timeout: float, when: str) -> tuple[dict[int, object], list[int]]:
        """Send `message` to all processes, and return their answers and the late ones; raise `RankDied` if one died."""
        unsent = self._send(lambda _: message)
        answers, late = self._collect(timeout, Rested, lambda answer: answer is not None, dead=unsent)
        dead = [index for index, answer in answers.items() if answer is None]
        if dead:
            self._raise_dead(dead, when)
        return answers, late

    def check_alive(self, when: str, after: str = "") -> None:
        """Raise `RankDied` if a process has ended. The check costs one system call.
        `when`: a clause that follows "died". `after`: text to append to that line."""
        idle = {process.connection.fileno(): index for index, process in self.processes.items()}
        # An idle process sends nothing, so readable data is the end of its connection, or garbage.
        gone = sorted(idle[fd] for fd in ready(list(idle), 0.0))
        for index in gone:
            try:
                problem = "nothing was asked" if self.processes[index].connection.receive() else "half a message"
                raise Garbled(problem)
            except Garbled as error:
                self._garbled[index] = str(error)
            except (EOFError, OSError):
                pass
        if gone:
            self._raise_dead(gone, when, after)

    def check_idle(self, when: str, after: str = "") -> None:
        """Check as `check_alive` does, and count a halted process as dead, because an idle one would go unnoticed."""
        self.check_alive(when, after)
        if halted := [index for index, process in self.processes.items() if process.halted()]:
            self.broken = True
            raise RankDied(f"{self.who.full(halted)} did not run any more {when}: {HALTED}{after}", ranks=halted)

    def _raise_dead(self, indices: Sequence[int], when: str, after: str = "") -> None:
        self.broken = True
        deadline = Clock.now() + EXIT_TIMEOUT
        ends = {index: self._died(index, deadline) for index in indices}
        texts = []
        for index, end in ends.items():
            words = end.last_words or self._last_lines(index)
            texts.append(f"{self.who.full([index])} died {when}: {end.cause}{after}\n{words}".rstrip())
        error_class = AgentLost if any(end.lost for end in ends.values()) else RankDied
        raise error_class("\n".join(texts), ranks=indices)

    def _last_lines(self, index: int) -> str:
        text = self.processes[index].output("stderr")  # no call reports it, because the process was idle
        return text if len(text) < _LAST_CHARACTERS else "…" + text[-_LAST_CHARACTERS:].partition("\n")[2]

    def _send(self, message_for: Callable[[int], object]) -> list[int]:
        """Send each process its message without blocking, and return those that are gone. `_collect` sends the rest."""
        gone = []
        last: object = None
        framed = b""
        for index, process in self.processes.items():
            message = message_for(index)
            if message is not last:  # one message for all is pickled once
                last, framed = message, frame(message)
            try:
                process.connection.send(framed)
            except OSError:
                gone.append(index)
        return gone

    def _collect(
        self,
        timeout: float,
        expected: type,
        went_well: Callable[[object], bool],
        dead: Sequence[int] = (),
        pauses: Pauses | None = None,
    ) -> tuple[dict[int, object], list[int]]:
        """Wait for one answer of each process; return the answers, and the processes that did not answer in time.

        `timeout`: seconds for all processes together. Once one dies or fails, the others get a short grace.
        `went_well`: whether an answer reports success. `dead`: processes that have ended already. A process that sends
        an invalid message counts as dead, too. `pauses`: resumes processes that wait for each other during the call. If
        it finds a difference, or processes that can never meet, all that have not answered are late.
        """
        answers = self._answers = dict.fromkeys(dead)
        waiting = {index: process for index, process in self.processes.items() if index not in answers}
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
                watched = _watch(selector, watched, self.launcher.waitables())
                waiting_before = len(waiting)
                # Until the next deadline, or the next look at ranks that have not answered.
                look = patience.deadline if pauses is None else Clock.now() + (LOOK if pauses else CROSSED)
                ready = selector.select(Clock.until(min(look, patience.deadline)))
                if not ready and pauses is not None and Clock.now() < patience.deadline:
                    if not pauses.look(waiting):
                        break
                    continue
                if not ready or overdue:
                    if not patience.extend(waiting.values()):
                        break
                    overdue = False
                    continue
                for index in _heard([key.data for key, _ in ready], self.launcher, waiting):
                    process = waiting[index]
                    try:
                        answer = _hear(process, expected, pauses is not None)
                    except Garbled as error:
                        self._garbled[index] = str(error)
                        answer = None
                    if answer is _NOTHING_YET:
                        selector.modify(process.connection, _interest(process), index)
                        continue
                    if isinstance(answer, Paused):
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
                overdue = len(waiting) == waiting_before and Clock.now() > patience.deadline
        return answers, sorted(waiting)

    def _records(self) -> dict[int, Record]:
        return {} if self.who.size == 0 else {index: process.record() for index, process in self.processes.items()}

    def _interrupt(self, indices: Sequence[int], since: float) -> dict[int, Interrupted]:
        processes = {index: self.processes[index] for index in indices}
        for process in processes.values():
            process.ask_for_stacks(STACKS_SIGNAL)
        deadline = Clock.now() + STACKS_TIMEOUT
        stacks = {index: p.stacks(Clock.until(deadline)) for index, p in processes.items()}
        seconds = Clock.now() - since
        for process in processes.values():
            process.kill()
        return {index: Interrupted(seconds, text) for index, text in stacks.items()}

    def _died(self, index: int, deadline: float) -> Died:
        """Return how a process with a closed connection ended; wait for its exit code until `deadline`."""
        process = self.processes[index]
        while index not in self._garbled and process.exit_code is None and ready(self.launcher.waitables(), deadline):
            self.launcher.collect()
        cause = process.cause()
        if process.exit_code is None:
            program = process.replaced_by()
            cause = "it has closed its connection to the pytest process, and still ran"
            if program:
                cause = f"another program ran in its place, by exec: {program}; start it by subprocess instead"
        if index in self._garbled:
            cause = f"it has written an invalid message to its connection to the pytest process: {self._garbled[index]}"
        if process.exit_code is None:
            process.kill()
        return Died(cause, process.last_words(), process.lost is not None, process.exit_code)

    def output(self) -> list[tuple[str, str, str]]:
        """Return what the processes have printed since `mark_output`: (process, one of `STREAMS`, text)."""
        texts = (
            ("node process" if index == NODE else self.who.full([index]), name, process.output(name))
            for index, process in self.processes.items()
            for name in STREAMS
        )
        return [entry for entry in texts if entry[2]]

    def mark_output(self) -> None:
        for process in self.processes.values():
            process.mark_output()
        for process in self.processes.values():
            process.await_mark()

    def discard(self) -> None:
        self.broken = True
        self.launcher.collect()  # a process that has ended must not be signalled: its id may be reused
        for process in self.processes.values():
            process.kill()
            process.close()
        self.processes = {}
