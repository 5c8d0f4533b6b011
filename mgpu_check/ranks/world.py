"""A world: the processes of one world size, with their own default process group; or the node process alone."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from mgpu_check.errors import RankDied, RankFailure, StartupFailure
from mgpu_check.ranks import protocol
from mgpu_check.ranks.failures import NODE, Died, Ending, Finished, Interrupted, Raised, Who, alike, error_of
from mgpu_check.ranks.launcher import Launcher
from mgpu_check.ranks.process import Process, describe_exit
from mgpu_check.ranks.worker_signal import STACKS_SIGNAL

__all__ = ["Abandoned", "Function", "World"]

# How long the other ranks may go on once one has raised or died: twice what it took that one, within these bounds, and
# longer as long as they compute. It decides only how much of the others' story is told, never the verdict.
_LEAST_GRACE, _MOST_GRACE = 0.05, 2.0
_EXIT_TIMEOUT = 1.0
_START_TIMEOUT = 120.0
_EXPLAIN_TIMEOUT = 10.0
_MEET_TIMEOUT = 1.0
_REST_TIMEOUT = 10.0


@dataclasses.dataclass(frozen=True)
class Function:
    """A function as it is sent.

    Attributes:
        key: its name among those of a test.
        reused: it will be called again, and the ranks are to keep it until the test ends.
    """

    key: str
    pickled: bytes
    name: str
    reused: bool


class Abandoned(Exception):
    """All ranks gave up the test ("skip", "xfail") or the example ("reject") alike."""

    def __init__(self, failure: protocol.Failure) -> None:
        super().__init__(failure.headline)
        self.failure = failure


class World:
    """Warm processes that run the same function each.

    A world is *broken* once it may not be used again: a process died, was killed, or they are out of lockstep.
    """

    def __init__(self, launcher: Launcher, spec_of: Callable[[int], protocol.RankSpec], indices: Sequence[int]) -> None:
        """Start a process for each of `indices`: ranks, or `NODE`.

        Raises:
            StartupFailure: one did not come up.
        """
        self.launcher = launcher
        self.who = Who(0 if list(indices) == [NODE] else len(indices))
        self.broken = False
        self._failed: tuple[BaseException, dict[int, Ending], Callable[[dict[int, Ending]], BaseException]] | None = (
            None
        )
        self._numbers = itertools.count()
        self._known: set[str] = set()
        self._surroundings: protocol.Surroundings | None = None
        self.processes: dict[int, Process] = {}
        try:
            for index in indices:
                self.processes[index] = launcher.launch()
            for index, process in self.processes.items():
                _send(process, spec_of(index))
            self._await_ready()
        except BaseException:
            self.discard()
            raise

    def _await_ready(self) -> None:
        answers, late = self._collect(_START_TIMEOUT, lambda _: True)
        for index, answer in answers.items():
            if answer is None:
                end = self._died(index)
                raise StartupFailure(
                    f"{self.who([index])}{self.who.of} died while it started: {describe_exit(end.exit_code)}\n"
                    f"{self.processes[index].output('stderr')}{end.last_words}",
                    ranks=[index],
                )
            assert isinstance(answer, protocol.Ready)
            if answer.failure is not None:
                raise StartupFailure(
                    f"{self.who([index])}{self.who.of} could not start: {answer.failure.headline}\n{answer.failure.text}",
                    ranks=[index],
                )
        if late:
            raise StartupFailure(f"{self.who(late)}{self.who.of} did not start within {_START_TIMEOUT:g} s", ranks=late)

    def run(
        self,
        function: Function,
        arguments: bytes,
        surroundings: protocol.Surroundings,
        timeout: float,
    ) -> list[bytes]:
        """Call a function on every process; the pickled results, in rank order.

        Args:
            function: sent once only, until `end_test`, if it is to be called again.

        Raises:
            RankFailure, RankDied, RankHang: see there.
            Abandoned: every rank skipped the test, or rejected the example.
        """
        doing = function.name
        self.check_alive("before " + doing)
        self._failed = None
        number = next(self._numbers)
        call = protocol.Call(
            number,
            function.key,
            None if function.key in self._known else function.pickled,
            arguments,
            function.reused,
            None if surroundings == self._surroundings else surroundings,
        )
        if function.reused:
            self._known.add(function.key)
        self._surroundings = surroundings
        started = time.monotonic()
        self.broken = True  # until all have answered: Ctrl-C or a timeout of the test may come from anywhere in between
        unsent = [index for index, process in self.processes.items() if not _send(process, call)]
        answers, late = self._collect(timeout, _went_well, dead=unsent)
        timed_out = bool(late) and time.monotonic() - started >= timeout
        endings: dict[int, Ending] = {}
        for index, answer in answers.items():
            if answer is None:
                endings[index] = self._died(index)
            else:
                assert isinstance(answer, protocol.Outcome) and answer.number == number
                endings[index] = Finished() if answer.failure is None else Raised(answer.failure)
        endings.update(self._interrupt(late, since=started))
        ordered = (answers.get(index) for index in self.processes)
        outcomes = [answer for answer in ordered if isinstance(answer, protocol.Outcome)]
        in_lockstep = len({outcome.lockstep for outcome in outcomes}) == 1
        self.broken = len(outcomes) < len(self.processes) or not in_lockstep
        if all(isinstance(end, Finished) for end in endings.values()):
            if not in_lockstep:
                # No error yet: sends and receives count too, and a rank may well have more of them.
                self._meet(
                    {index: outcome.lockstep[0] for index, outcome in zip(self.processes, outcomes, strict=True)}
                )
            return [outcome.value for outcome in outcomes if outcome.value is not None]
        kinds = {end.failure.kind if isinstance(end, Raised) else "error" for end in endings.values()}
        first = next(iter(endings.values()))
        if len(kinds) == 1 and isinstance(first, Raised) and first.failure.kind != "error":
            raise Abandoned(first.failure)

        def told(endings: dict[int, Ending]) -> BaseException:
            return error_of(endings, self.who, doing, timeout if timed_out else None)

        error = told(endings)
        self._failed = (error, endings, told)
        raise error

    def _meet(self, entered: dict[int, int]) -> None:
        """See that all ranks enter and leave a barrier: that none has begun what the others do not know of.

        Raises:
            RankDied: one ended instead.
            RankFailure: they cannot meet; `entered` says how many operations each had entered.
        """
        when = "after it had returned, with operations of the default group pending"
        self.broken = True
        answers, late = self._ask(protocol.Meet(), _MEET_TIMEOUT, when)
        if late or any(isinstance(answer, protocol.Rested) and answer.dirt for answer in answers.values()):
            counts = ", ".join(f"rank {index}: {count}" for index, count in entered.items())
            raise RankFailure(
                "ranks entered different numbers of operations of the default process group, and could not meet in a "
                f"barrier afterwards: one has begun a collective that others never entered ({counts})",
                ranks=entered,
            )
        self.broken = False

    def _ask(self, message: object, timeout: float, when: str) -> tuple[dict[int, object], list[int]]:
        """Send `message` to all, and collect the answers; raises `RankDied` if there is a dead one."""
        unsent = [index for index, process in self.processes.items() if not _send(process, message)]
        answers, late = self._collect(timeout, lambda answer: answer is not None, dead=unsent)
        dead = [index for index, answer in answers.items() if answer is None]
        if dead:
            self._raise_dead(dead, when)
        return answers, late

    def explain(self, error: BaseException) -> None:
        """Give `error` the best text that its ranks can make of it, if it is the last that this world has raised."""
        if self._failed is None or self._failed[0] is not error:
            return
        _, endings, told = self._failed
        better = dict(endings)
        for ranks in alike(better):
            ending, text = better[ranks[0]], self._explanation(ranks[0])
            if text:
                assert isinstance(ending, Raised)
                better[ranks[0]] = Raised(dataclasses.replace(ending.failure, text=text))
        error.args = told(better).args

    def _explanation(self, index: int) -> str:
        connection = self.processes[index].connection
        if not _send(self.processes[index], protocol.Explain()) or not connection.poll(_EXPLAIN_TIMEOUT):
            return ""
        try:
            return str(connection.recv())
        except (EOFError, OSError):
            return ""

    def end_test(self) -> tuple[str, ...]:
        """Undo what the test left; what cannot be undone is returned, and breaks the world.

        Raises:
            RankDied: a process ended after it had answered.
            RankHang: one does not answer any more.
        """
        self._known.clear()
        if self.broken:
            return ()
        when = "after its part of the test was done"
        self.check_alive(when)
        self.broken = True
        answers, late = self._ask(protocol.EndTest(), _REST_TIMEOUT, when)
        if late:
            stopped = self._interrupt(late, since=time.monotonic() - _REST_TIMEOUT)
            raise error_of(stopped, self.who, "its answer at the end of the test", _REST_TIMEOUT)
        self.broken = False
        dirt = {line for answer in answers.values() if isinstance(answer, protocol.Rested) for line in answer.dirt}
        self.broken |= bool(dirt)
        return tuple(sorted(dirt))

    def check_alive(self, when: str) -> None:
        """Raise `RankDied` if a process has ended; costs one system call."""
        idle = [process.connection for process in self.processes.values()]
        if wait(idle, 0):
            # An idle process says nothing, so what can be read is the end of its connection.
            gone = set(wait(idle, 0))
            self._raise_dead([i for i, process in self.processes.items() if process.connection in gone], when)

    def _raise_dead(self, indices: Sequence[int], when: str) -> None:
        self.broken = True
        ends = {index: self._died(index) for index in indices}
        text = "\n".join(
            f"{self.who([index])}{self.who.of} died {when}: {describe_exit(end.exit_code)}\n{end.last_words}".rstrip()
            for index, end in ends.items()
        )
        raise RankDied(text, ranks=indices)

    def _collect(
        self, timeout: float, went_well: Callable[[object], bool], dead: Sequence[int] = ()
    ) -> tuple[dict[int, object], list[int]]:
        """One answer of each process, None from a dead one, in the order of arrival; and who gave none in time."""
        started = time.monotonic()
        deadline = started + timeout
        answers: dict[int, object] = dict.fromkeys(dead)
        waiting: dict[object, int] = {p.connection: i for i, p in self.processes.items() if i not in answers}
        latest = deadline  # until when it can be put off, once a failure has brought it forward
        if answers:
            deadline, latest = min(deadline, started + _LEAST_GRACE), min(deadline, started + _MOST_GRACE)
        while waiting:
            # The launcher tells of an end that a connection hides, because a child of the rank holds it open.
            ready = wait(
                [*(self.processes[i].connection for i in waiting.values()), *self.launcher.waitables()],
                max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                now = time.monotonic()
                if now < latest and any(self.processes[i].runnable() for i in waiting.values()):
                    deadline = min(latest, now + _LEAST_GRACE)
                    continue
                break
            self.launcher.collect()
            ended = [c for c, i in waiting.items() if self.processes[i].exit_code is not None and c not in ready]
            for connection in [*(c for c in ready if c in waiting), *ended]:
                index = waiting.pop(connection)
                try:
                    answers[index] = None if connection in ended else self.processes[index].connection.recv()
                except (EOFError, OSError):
                    answers[index] = None
                if not went_well(answers[index]):
                    now = time.monotonic()
                    grace = min(_MOST_GRACE, max(_LEAST_GRACE, 2 * (now - started)))
                    deadline, latest = min(deadline, now + grace), min(latest, now + _MOST_GRACE)
        return answers, sorted(waiting.values())

    def _interrupt(self, indices: Sequence[int], since: float) -> dict[int, Ending]:
        """Stop processes that do not answer, and say where they were."""
        processes = {index: self.processes[index] for index in indices}
        for process in processes.values():
            process.ask_for_stacks(STACKS_SIGNAL)
        stacks = {index: process.stacks() for index, process in processes.items()}
        seconds = time.monotonic() - since
        for process in processes.values():
            process.kill()
        return {index: Interrupted(seconds, text) for index, text in stacks.items()}

    def _died(self, index: int) -> Died:
        process = self.processes[index]
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while process.exit_code is None and wait(self.launcher.waitables(), max(0.0, deadline - time.monotonic())):
            self.launcher.collect()
        return Died(process.exit_code, process.last_words())

    def mark_output(self) -> None:
        """Let `Process.output` start from here."""
        for process in self.processes.values():
            process.mark_output()

    def discard(self) -> None:
        """End all processes, at once."""
        self.broken = True
        self.launcher.collect()  # who has ended already must not be signalled: its number may be another's by now
        for process in self.processes.values():
            process.kill()
            process.close()
        self.processes = {}


def _went_well(answer: object) -> bool:
    return isinstance(answer, protocol.Outcome) and answer.failure is None


def _send(process: Process, message: object) -> bool:
    try:
        process.connection.send(message)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True
