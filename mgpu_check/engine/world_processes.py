"""The processes of a world: start them, exchange messages with them, and end them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mgpu_check.devices.placement import Slot
from mgpu_check.engine import hash_seeds
from mgpu_check.engine.answers import collect, send
from mgpu_check.engine.failures import NODE, Died, Interrupted, Who
from mgpu_check.engine.launcher import Launcher
from mgpu_check.engine.pauses import Pauses
from mgpu_check.engine.process import STACKS_TIMEOUT, Process
from mgpu_check.errors import AgentLost, RankDied, StartupFailure
from mgpu_check.processes import protocol
from mgpu_check.processes.channel import Garbled
from mgpu_check.processes.clock import Clock, ready
from mgpu_check.processes.record import Record
from mgpu_check.processes.signals import STACKS_SIGNAL
from mgpu_check.processes.stacks import HALTED

EXIT_TIMEOUT = 1.0  # seconds from the end of a connection to the exit code of its process
_START_TIMEOUT = 120.0  # seconds: device contexts and NCCL communicators take several seconds each
_LAST_CHARACTERS = 4000  # of stderr in a report, enough for a traceback


class WorldProcesses:
    """Warm processes, one for each rank of a world, or the node process.

    They are *broken* once they cannot be used again: a process died or was killed, or they are out of lockstep.
    """

    def __init__(
        self,
        launcher: Launcher,
        spec_of: Callable[[int], protocol.RankSpec],
        indices: Sequence[int],
        slots: Sequence[Slot],
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
            seeds_apart = any(hash_seeds.apart(spec.own_environment) for spec in specs.values())
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
        answers, late = self._collect(_START_TIMEOUT, protocol.Ready, _is_up, dead=unsent)
        for index, answer in answers.items():
            if answer is None:
                end = self._died(index, Clock.now() + EXIT_TIMEOUT)
                raise StartupFailure(
                    f"{self.who.full([index])} died while it started: {end.cause}\n"
                    f"{self.processes[index].output('stderr')}{end.last_words}",
                    ranks=[index],
                )
            assert isinstance(answer, protocol.Ready)
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
        answers, late = self._collect(timeout, protocol.Rested, lambda answer: answer is not None, dead=unsent)
        dead = [index for index, answer in answers.items() if answer is None]
        if dead:
            self._raise_dead(dead, when)
        return answers, late

    def check_alive(self, when: str, after: str = "") -> None:
        """Raise `RankDied` if a process has ended. The check costs one system call.

        Args:
            when: a clause that follows "died".
            after: text to append to that line.
        """
        idle = {process.connection.fileno(): index for index, process in self.processes.items()}
        # An idle process sends nothing, so readable data is the end of its connection, or garbage.
        gone = sorted(idle[fd] for fd in ready(list(idle), 0.0))
        for index in gone:
            try:
                said = "nothing was asked" if self.processes[index].connection.receive() else "half a message"
                raise Garbled(said)
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
        text = "\n".join(
            (
                f"{self.who.full([index])} died {when}: {end.cause}{after}\n{end.last_words or self._last_lines(index)}"
            ).rstrip()
            for index, end in ends.items()
        )
        kind = AgentLost if any(end.lost for end in ends.values()) else RankDied
        raise kind(text, ranks=indices)

    def _last_lines(self, index: int) -> str:
        """Return the last lines of stderr of a process that died while idle, because no call reports them."""
        text = self.processes[index].output("stderr")
        return text if len(text) < _LAST_CHARACTERS else "…" + text[-_LAST_CHARACTERS:].partition("\n")[2]

    def _send(self, message_for: Callable[[int], object]) -> list[int]:
        return send(self.processes, message_for)

    def _collect(
        self,
        timeout: float,
        expected: type,
        went_well: Callable[[object], bool],
        dead: Sequence[int] = (),
        pauses: Pauses | None = None,
    ) -> tuple[dict[int, object], list[int]]:
        self._answers = dict.fromkeys(dead)
        late, garbled = collect(self.launcher, self.processes, timeout, expected, went_well, self._answers, pauses)
        self._garbled.update(garbled)
        return self._answers, late

    def _records(self) -> dict[int, Record]:
        """Return the record of collectives of each rank; empty for a node process."""
        return {} if self.who.size == 0 else {index: process.record() for index, process in self.processes.items()}

    def _interrupt(self, indices: Sequence[int], since: float) -> dict[int, Interrupted]:
        """Kill processes that do not answer, and return where they were."""
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


def _is_up(answer: object) -> bool:
    return isinstance(answer, protocol.Ready) and answer.failure is None
