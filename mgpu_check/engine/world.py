"""A world: the processes that share a default process group, or the node process alone; what is sent to them; and
bare processes.

Bare processes are forked like ranks, but without a default process group, a device or a simulated node of their
own. They are for code that brings all of this itself, such as a test harness. Nothing that this code does with
collectives is judged, and nothing is restored between its calls.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mgpu_check.devices.inventory import Slot
from mgpu_check.engine.failures import (
    NODE,
    Account,
    Ending,
    Finished,
    Raised,
    alike,
    all_returned,
    disagreement,
    last_collectives,
)
from mgpu_check.engine.launcher import Launcher, LocalLauncher
from mgpu_check.engine.lockstep import Pauses, Unmatched, imbalance, unmatched
from mgpu_check.engine.rank_side.rank import with_rank
from mgpu_check.engine.world_processes import EXIT_TIMEOUT, WorldProcesses, agree
from mgpu_check.errors import RankFailure
from mgpu_check.processes import pickling
from mgpu_check.processes.channel import (
    Call,
    CallContext,
    Clock,
    Garbled,
    Outcome,
    RaisedInRank,
    RankRequest,
    RankSpec,
    Rested,
    frame,
    ready,
)

_MEET_TIMEOUT = 1.0  # seconds: the ranks have returned, so a barrier takes milliseconds
_REST_TIMEOUT = 10.0  # for the engine's own requests to idle ranks, unless the timeout of calls is shorter


@dataclasses.dataclass(frozen=True)
class Function:
    """A pickled function to send to ranks."""

    key: str  # identifies the function among those of a test
    pickled: bytes
    name: str
    reused: bool  # whether the ranks keep it until the test ends, because it will be called again


class Abandoned(Exception):
    """All ranks abandoned the test ("skip", "xfail") or the example ("reject") in the same way."""

    def __init__(self, failure: RaisedInRank) -> None:
        super().__init__(failure.headline)
        self.failure = failure


class Begun(NamedTuple):
    """A call that was sent to every process."""

    number: int  # identifies the call in the answers
    name: str
    started: float  # seconds on `Clock`
    unsent: Sequence[int]  # processes that had ended, and so did not receive the call


class World(WorldProcesses):
    """Warm processes that all run the same function.
    `RankPool` makes one for a `WorldKey`, and starts its processes with it. Each call is a `begin` and a `finish`;
    `end_test` resets the processes. A failed call leaves it `broken`, and the pool then discards it."""

    _pauses: type[Pauses] = Pauses

    def __init__(
        self,
        launcher: Launcher,
        spec_of: Callable[[int], RankSpec],
        indices: Sequence[int],
        slots: Sequence[Slot],
        timeout: float,
    ) -> None:
        """Start a process for each of `indices` (ranks, or `NODE`) on the slot at the same position of `slots`.
        `timeout`: the usual timeout of a call, in seconds, which also limits the engine's own requests."""
        self.messages: dict[int, tuple[tuple[str, Any], ...]] = {}  # rank -> its messages in the last call
        self._failed: tuple[BaseException, Account] | None = None
        self._running: tuple[str, float] | None = None  # the function, and since when
        self._rest_timeout = min(_REST_TIMEOUT, timeout)
        self._numbers = itertools.count()
        self._known: set[str] = set()
        self._call_context: CallContext | None = None
        super().__init__(launcher, spec_of, indices, slots)

    def run(
        self, function: Function, arguments: bytes, call_context: CallContext, timeout: float
    ) -> list[pickling.Pickled]:
        """Call a function on every process, and return the pickled results in rank order.

        Args:
            function: the function. If it is `reused`, it is sent only once until `end_test`.

        Raises:
            RankFailure: a rank raised, or ranks made different calls.
            RankDied: a process ended.
            RankHang: a rank did not return in time.
            Abandoned: every rank skipped the test, or rejected the example.
        """
        return self.finish(self.begin(function, arguments, call_context), timeout)

    def begin(self, function: Function, arguments: bytes, call_context: CallContext) -> Begun:
        """Send a call to every process. `finish` returns its results."""
        self.check_alive("before " + function.name)
        call = self._prepare(function, arguments, call_context)
        started = Clock.now()
        self._running = function.name, started
        return Begun(call.number, function.name, started, self._send(lambda _: call))

    def finish(self, call: Begun, timeout: float) -> list[pickling.Pickled]:
        """Wait up to `timeout` seconds from now for the results of a call; returns and raises as `run` does."""
        waiting = Clock.now()
        pauses = self._pauses(self.processes, self.who)
        answers, late = self._collect(timeout, Outcome, _went_well, call.unsent, pauses)
        if pauses.failure is not None:
            self._running = None
            for process in self.processes.values():
                process.kill()
            raise pauses.failure
        settling = not late and not all(outcome.settled for outcome in _outcomes(answers).values())
        if settling:
            answers, late = self._settle(answers, call.number, waiting + timeout)
        self._running = None
        waited = Clock.now() - waiting
        timed_out = bool(late) and waited >= timeout
        # Read the records before a rank is killed, because the ranks that wait for it then fail.
        fine = not late and all(_went_well(answer, call.number) for answer in answers.values())
        records = {} if fine else self._records()
        endings = self._endings(answers, call.number)
        for index, stopped in self._interrupt(late, since=call.started).items():
            stage = pauses.done(index)
            endings[index] = dataclasses.replace(stopped, settling=settling) if stage is None else Finished(stage)
        outcomes = _outcomes({index: answers.get(index) for index in self.processes})
        if any(outcome.messages for outcome in outcomes.values()):
            self.messages = {index: outcome.messages for index, outcome in outcomes.items()}
        complete = len(outcomes) == len(self.processes)
        differences = unmatched({index: outcome.flows for index, outcome in outcomes.items()}) if complete else []
        reusable = all(outcome.reusable for outcome in outcomes.values())
        self.broken = not complete or not _in_lockstep(outcomes) or bool(differences) or not reusable
        if all(isinstance(end, Finished) for end in endings.values()):
            self._check_agreement(outcomes, differences)
            return [outcome.value for outcome in outcomes.values() if outcome.value is not None]
        self._check_abandoned(endings)
        deadline = timeout if timed_out else round(waited, 1) if pauses.crossed else None
        account = Account(endings, self.who, call.name, deadline, records, crossed=pauses.crossed)
        error = account.error()
        self._failed = (error, account)
        raise error

    def _prepare(self, function: Function, arguments: bytes, call_context: CallContext) -> Call:
        """Reset the state of the previous call, and return the message of this one."""
        self._failed = None
        self.messages = {}
        self._answers = {}  # answers of the previous call, if this one is interrupted before `_collect`
        self.broken = True  # until all have answered: Ctrl-C or a test timeout may interrupt at any point
        call = Call(
            next(self._numbers),
            function.key,
            None if function.key in self._known else function.pickled,
            arguments,
            function.reused,
            None if call_context == self._call_context else call_context,
        )
        if function.reused:
            self._known.add(function.key)
        self._call_context = call_context
        return call

    def _endings(self, answers: Mapping[int, object], number: int) -> dict[int, Ending]:
        endings: dict[int, Ending] = {}
        deadline = Clock.now() + EXIT_TIMEOUT
        for index, answer in answers.items():
            if isinstance(answer, Outcome) and answer.number != number:
                self._garbled[index] = "it answers another call"
            if not isinstance(answer, Outcome) or index in self._garbled:
                endings[index] = self._died(index, deadline)
            else:
                endings[index] = Finished() if answer.failure is None else Raised(answer.failure)
        return endings

    def _check_agreement(self, outcomes: Mapping[int, Outcome], differences: Sequence[Unmatched]) -> None:
        """Check, after all ranks have returned, that they entered the same collectives and received every message."""
        consistent = agree(list(outcomes.values()))
        if differences and consistent:
            raise imbalance(differences, self.who)
        if not _in_lockstep(outcomes):
            self._meet(outcomes)  # not an error yet: sends and receives count, too, and their numbers may differ
        if not consistent:
            self.broken = True
            raise disagreement(self.who, self._records())

    def _check_abandoned(self, endings: Mapping[int, Ending]) -> None:
        failures = [end.failure if isinstance(end, Raised) else None for end in endings.values()]
        kinds = {"error" if failure is None else failure.kind for failure in failures}
        if len(kinds) == 1 and failures[0] is not None and failures[0].kind != "error":
            raise Abandoned(failures[0])

    def _settle(self, answers: dict[int, object], number: int, deadline: float) -> tuple[dict[int, object], list[int]]:
        """Wait, after a successful call, until all devices are idle; return the new answers and late ranks."""
        outcomes = _outcomes(answers)
        if len(outcomes) < len(self.processes) or not all(_went_well(answer, number) for answer in outcomes.values()):
            return answers, []
        flows = {index: outcomes[index].flows for index in self.processes}
        if unmatched(flows) or not agree(list(outcomes.values())):
            return answers, []  # pending operations never finish, and the report says why
        if not _in_lockstep(outcomes):
            self._meet(outcomes)
            self.broken = True  # until all have answered, as before
        unsent = self._send(lambda _: RankRequest.SETTLE)
        return self._collect(Clock.until(deadline), Outcome, _went_well, dead=unsent)

    def loaded(self, index: int, result: pickling.Pickled) -> object:
        try:
            value: object = pickling.loads_apart(result)
        except BaseException as error:  # unpickling runs code of the result's class
            who = self.who.full([index if self.who.size else NODE])
            text = f"{type(error).__name__}: {error}"
            raise RankFailure(
                f"{who} returned a result that cannot be loaded in the pytest process: {text}", ranks=[index]
            ) from None
        return value

    def stopped(self) -> BaseException | None:
        """Stop the ranks of an interrupted call, and return an error with their places; None if no call was running."""
        if self._running is None or len(self._answers) == len(self.processes):
            return None
        doing, since = self._running
        self._running = None
        records = self._records()
        late = [index for index in self.processes if index not in self._answers]
        endings: dict[int, Ending] = dict(self._interrupt(late, since))
        for index, answer in self._answers.items():
            if isinstance(answer, Outcome):
                endings[index] = Finished() if answer.failure is None else Raised(answer.failure)
        return Account(endings, self.who, doing, round(Clock.now() - since, 1), records).error()

    def check_idle(self, when: str, after: str = "") -> None:
        """Check as the base class does, unless Ctrl-C interrupted a call: its answers may still arrive."""
        if self._running is None:
            super().check_idle(when, after)

    def _meet(self, outcomes: Mapping[int, Outcome]) -> None:
        """Have all ranks run a barrier, which fails if a rank has begun a collective that others never entered."""
        when = "after it had returned, with operations of the default group pending"
        self.broken = True
        records = self._records()
        answers, late = self._ask(RankRequest.MEET, _MEET_TIMEOUT, when)
        errors = [
            f"{self.who([index])}: {line}"
            for index, answer in answers.items()
            if isinstance(answer, Rested)
            for line in answer.left_behind
        ]
        if late or errors:
            entered = {index: sum(outcome.lockstep[:-1]) for index, outcome in outcomes.items()}
            counts = ", ".join(f"rank {index}: {count}" for index, count in entered.items())
            text = (
                "ranks entered different numbers of operations of the default process group, and could not meet in a "
                f"barrier afterwards: one has begun a collective that others never entered ({counts})"
            )
            raise all_returned([text, *errors, *last_collectives(records, self.who)], self.who, records, entered)
        self.broken = False

    def explain(self, error: BaseException) -> None:
        """Replace the text of `error` by a fuller explanation from its ranks, if this world raised it last."""
        if self._failed is None or self._failed[0] is not error:
            return
        _, account = self._failed
        better = dict(account.endings)
        for ranks in alike(better):
            ending, text = better[ranks[0]], self._explanation(ranks[0])
            if text:
                assert isinstance(ending, Raised)
                better[ranks[0]] = Raised(dataclasses.replace(ending.failure, text=text))
        error.args = (str(dataclasses.replace(account, endings=better)),)

    def _explanation(self, index: int) -> str | None:
        channel = self.processes[index].connection
        deadline = Clock.now() + self._rest_timeout
        try:
            channel.send(frame(RankRequest.EXPLAIN))
            while ready([channel.fileno()], deadline):
                if (text := channel.receive()) is not None:
                    return str(text)
        except (EOFError, OSError, Garbled):
            pass
        self.broken = True  # a late answer would be mistaken for the answer to the next message
        return None

    def end_test(self) -> tuple[str, ...]:
        """Undo the changes of a test in its ranks, and return those that cannot be undone, which break the world."""
        self._known.clear()
        self.messages = {}
        if self.broken:
            return ()
        when = "after its part of the test was done"
        self.check_alive(when)
        self.broken = True
        answers, late = self._ask(RankRequest.END_TEST, self._rest_timeout, when)
        if late:
            records = self._records()
            stopped = self._interrupt(late, since=Clock.now() - self._rest_timeout)
            raise Account(stopped, self.who, "its answer at the end of the test", self._rest_timeout, records).error()
        self.broken = False
        self.messages = {
            i: answer.messages for i, answer in answers.items() if isinstance(answer, Rested) and answer.messages
        }
        left_behind = {line for answer in answers.values() if isinstance(answer, Rested) for line in answer.left_behind}
        self.broken |= bool(left_behind)
        return tuple(sorted(left_behind))


def _went_well(answer: object, number: int | None = None) -> bool:
    """Return whether an answer reports that the rank returned, from call `number` if that is given."""
    return isinstance(answer, Outcome) and answer.failure is None and number in (None, answer.number)


def _outcomes(answers: Mapping[int, object]) -> dict[int, Outcome]:
    return {index: answer for index, answer in sorted(answers.items()) if isinstance(answer, Outcome)}


def _in_lockstep(outcomes: Mapping[int, Outcome]) -> bool:
    return len({outcome.lockstep for outcome in outcomes.values()}) == 1


class NotPicklable(TypeError):
    """A function or an argument of a call cannot be pickled."""


def pickled_function(function: Callable[..., Any], wrapped: Callable[..., Any], key: str, reused: bool) -> Function:
    """Pickle a function for another process, by value if that process cannot import it.
    `function`: the user's function, for its name and for errors. `wrapped`: the function to send in its place."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        return Function(key, pickling.dumps(wrapped), name, reused)
    except Exception as error:
        raise NotPicklable(
            f"{name} cannot run in another process: it refers to {culprit_of(function) or error}; "
            "make files, locks, processes and the like inside of it"
        ) from error


def pickled_arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    try:
        return pickling.dumps((args, dict(kwargs)))
    except Exception as error:
        raise NotPicklable(
            f"{name} cannot be called in another process: argument {culprit(args, kwargs) or error}"
        ) from error


def call_context(simulate: str | None) -> CallContext:
    """Return the current call context of this process, for its ranks to adopt."""
    environment = dict(os.environ)
    environment.pop("PYTEST_CURRENT_TEST", None)  # changes per test and phase, and describes this process only
    if simulate == "cpu":
        # It restricts the real devices, often to none, and must not restrict the simulated ones.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        directory = os.sep
    return CallContext(tuple(sys.path), directory, environment)


def culprit_of(function: Callable[..., Any]) -> str | None:
    """Describe the first variable of `function` that cannot be pickled; None if there is no such variable."""
    try:
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return None
    return culprit((), {**variables.globals, **variables.nonlocals})


def culprit(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    for name, value in (*enumerate(args), *kwargs.items()):
        try:
            pickling.dumps(value)
        except Exception as error:
            return f"{name!r}, of type {type(value).__name__}, cannot be pickled: {error}"
    return None


_TIMEOUT = 300.0  # seconds: the usual one of a call; `results` has its own


class _Unwatched(Pauses):
    """Ends no call early: a test may wait in vain on purpose, until a timeout of torch."""

    def look(self, waiting: object) -> bool:
        return True


class BareWorld(World):
    """Bare processes that all run the same function. `HarnessRuns` makes one for a test, or for a class of tests, from
    a launcher of its own, and discards it afterwards."""

    _pauses = _Unwatched

    def __init__(self, launcher: LocalLauncher, size: int) -> None:
        self._keys = itertools.count()
        # One for all calls: a process adopts a new one, and would lose the variables that the harness has set in it.
        self._context = call_context(None)
        spec = RankSpec(
            index=None,
            size=size,
            local_index=0,
            node_index=0,
            device=0,
            devices=0,
            simulate=None,
            backend=None,
            store="",
            group_timeout=_TIMEOUT,
            threads=max(1, (os.cpu_count() or 1) // size),
            call_context=self._context,
            own_environment={},
            bare=True,
        )
        slots = [Slot(0, index) for index in range(size)]
        super().__init__(
            launcher, lambda index: replace(spec, index=index, local_index=index), range(size), slots, _TIMEOUT
        )

    def send(self, name: str, fn: Callable[..., Any], *args: Any) -> Begun:
        """Call ``fn(*args)`` on every process; a parameter ``rank`` receives the `Rank`. `results` waits for it."""
        arguments, named = with_rank(fn, args, {})
        function = replace(pickled_function(fn, fn, str(next(self._keys)), reused=False), name=name)
        return self.begin(function, pickled_arguments(function.name, arguments, named), self._context)

    def results(self, call: Begun, timeout: float) -> list[Any]:
        """Wait up to `timeout` seconds, and return the results in rank order; raises as `World.run` does."""
        results = [self.loaded(index, result) for index, result in enumerate(self.finish(call, timeout))]
        self.broken = False  # each has answered, and may have entered other collectives than the others
        return results

    def returned(self) -> dict[int, Any]:
        outcomes = {index: end for index, end in self._answers.items() if isinstance(end, Outcome)}
        return {index: self.loaded(index, end.value) for index, end in outcomes.items() if end.value is not None}

    def output(self) -> list[tuple[str, str, str]]:
        outputs = super().output()
        self.mark_output()
        return outputs

    def _check_agreement(self, outcomes: Mapping[int, Outcome], differences: object) -> None:
        """Check nothing: a test of collectives may enter different ones on purpose."""
