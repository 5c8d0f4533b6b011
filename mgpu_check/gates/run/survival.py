"""`assert_survives` on a rank: run a training in forked workers, let events strike them, and restart them.

`supervise` is the agent of the workers, as torchrun is: it has their store, and sees how each of them ends. A worker
counts its calls (collectives, optimizer steps, saves and renames of files); an event strikes one of them.

Imports torch: for ranks only.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, Literal

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import TCPStore
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mgpu_check.gates.gate_arguments import Unusable
from mgpu_check.gates.run.states import Opaque, flattened
from mgpu_check.processes import collective_records
from mgpu_check.processes.child_processes import end_with_parent
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.tracebacks import calling_line, line_under_test
from mgpu_check.simulated.activation import enter_in_fork, simulated_device_count
from mgpu_check.torch_hooks.collectives import recorder
from mgpu_check.torch_hooks.patches import Patches
from mgpu_check.torch_hooks.switches import seed_everything
from mgpu_check.torch_hooks.tensors import plain_copy

EventKind = Literal["kill", "stop", "slow"]
Restart = Literal["all", "rank", "none"]

_SEED = 11
_STOPPED = 1.0  # seconds that a stopped worker does nothing
_SLOW, _SLOW_CALLS = 0.05, 20  # seconds that each call is late, and how many calls are


@dataclass(frozen=True)
class Event:
    """Something happens to one worker when it makes a call: its n-th, counted over restarts."""

    kind: EventKind
    rank: int
    call: int


@dataclass(frozen=True)
class Training:
    """The functions and options of `assert_survives`. The gate sends them to the rank that supervises."""

    train: Callable[[Worker], Any]
    size: int
    restart: Restart
    timeout: float  # seconds without a call of any worker


@dataclass(frozen=True)
class Worker:
    """One process of a training, as ``train(worker)`` gets it.

    The environment is that of torchrun, so ``init_process_group("nccl")`` connects the workers of one attempt.

    Attributes:
        rank, size: of this process, in the first attempt.
        attempt: 0 at first; how often this process was restarted.
        directory: for checkpoints; all workers and attempts of one run share it.
        device: the device of this process.
    """

    rank: int
    size: int
    attempt: int
    directory: Path
    device: torch.device


@dataclass
class Ending:
    """How one run of a training has ended.

    Attributes:
        results: rank -> its results by dotted names, of the workers that returned.
        calls: rank -> the names and lines of its calls, over all attempts: "all_reduce (train.py:12)".
        problem: "" if all that should return have returned; else how the run failed, a line.
        facts: what else is known, a line each.
        ranks: the ranks that the problem is about.
    """

    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    calls: dict[int, list[str]] = field(default_factory=dict)
    problem: str = ""
    facts: list[str] = field(default_factory=list)
    ranks: tuple[int, ...] = ()


# ---------------------------------------------------------------------------------------------------------- the worker


class _Calls:
    """Counts the calls of this worker, announces each, and lets the events of this worker strike."""

    def __init__(self, events: Sequence[Event], earlier: int, pipe: connection.Connection) -> None:
        self._events = {event.call: event.kind for event in events}
        self._number, self.pipe, self._slow_until = earlier, pipe, 0
        self.over = False  # set when the training has returned: to pickle a tensor calls `torch.save`

    def __call__(self, name: str) -> EventKind | None:
        """Announce a call, and stop or delay it if that is its event; return "kill" for the caller to carry out."""
        if self.over:
            return None
        file, line = calling_line()
        number, self._number = self._number, self._number + 1
        kind = self._events.get(number)
        self.tell("call", f"{name} ({relative(file)}:{line})" if file else name)
        if kind == "slow":
            self._slow_until = number + _SLOW_CALLS
        if number < self._slow_until:
            time.sleep(_SLOW)
        if kind == "stop":
            self.tell("stopped", None)
            os.kill(os.getpid(), signal.SIGSTOP)
        return kind if kind == "kill" else None

    def tell(self, kind: str, value: Any) -> None:
        # As bytes, because torch's own pickler for processes would send tensors as shared memory, which ends with this.
        self.pipe.send_bytes(pickle.dumps((kind, value)))

    def before(self, name: str) -> None:
        if self(name) == "kill":
            _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(calls: _Calls) -> None:
    """Announce collectives, optimizer steps, saves and renames from now on; this process ends with it."""
    record = recorder.call

    def recorded(function: Callable[..., Any], form: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not recorder._inside.depth:
            calls.before(form.name)
        return record(function, form, args, kwargs)

    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: calls.before("optimizer.step"))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: calls.before("the end of optimizer.step"))
    patches = Patches()
    patches.set(recorder, "call", recorded)
    patches.set(torch, "save", functools.wraps(torch.save)(functools.partial(_save, calls, torch.save)))
    for name in ("replace", "rename"):  # pathlib calls them, too
        patches.set(os, name, functools.partial(_move, calls, name, getattr(os, name)))


def _save(calls: _Calls, save: Callable[..., None], value: Any, target: Any, *args: Any, **kwargs: Any) -> None:
    """Save; or write half of the file and die."""
    if calls("torch.save") != "kill":
        return save(value, target, *args, **kwargs)
    buffer = io.BytesIO()
    save(value, buffer, *args, **kwargs)
    half = buffer.getvalue()[: buffer.tell() // 2]
    if hasattr(target, "write"):
        target.write(half)
        target.flush()
    else:
        Path(target).write_bytes(half)
    return _die()


def _move(calls: _Calls, name: str, move: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    calls.before(f"os.{name}")
    return move(*args, **kwargs)


_inherited: list[Any] = []


def _leave_group() -> None:
    """Forget the process group of the rank that has forked this process, whose threads do not exist here.

    torch has no public function for it: `destroy_process_group` waits for these threads.
    """
    tables = [getattr(c10d._world, name) for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config")]
    tables += [c10d._world.tags_to_pg, c10d._world.pg_to_tag]
    _inherited.extend([c10d._world.default_pg, *[dict(table) for table in tables]])  # keeps them: their ends would hang
    for table in tables:
        table.clear()
    c10d._update_default_pg(None)
    torch._C._distributed_c10d._unregister_all_process_groups()
    c10d._world.group_count = 0


def _work(training: Training, worker: Worker, calls: _Calls, variables: dict[str, str], record: int) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    _leave_group()
    os.environ.update(variables)
    enter_in_fork(worker.size)
    torch.cuda.set_device(worker.device)
    recorder.attach(record)
    recorder.begin()
    _watch(calls)
    seed_everything(_SEED)
    try:
        value = training.train(worker)
        calls.over = True
        calls.tell("returned", {} if value is None else flattened(value, take=plain_copy))
    except Opaque as error:
        calls.tell("unusable", f"train(worker) returned what cannot be compared: {error}")
    except BaseException as error:
        stack = reversed([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])
        file, line = line_under_test(stack) or ("", 0)
        text = f"{traceback.format_exception_only(error)[-1].strip():.200}"
        calls.tell("raised", f"{text} at {relative(file)}:{line}" if file else text)
    os._exit(0)  # without the ends of groups whose other members may be gone


# ------------------------------------------------------------------------------------------------------ the supervisor


@dataclass(eq=False)
class _Process:
    worker: Worker
    process: Any
    pipe: connection.Connection
    record: IO[bytes]
    outcome: tuple[str, Any] | None = None  # ("returned", results), ("raised", error and line), ("killed", exit code)
    wakes: float | None = None  # when a stopped process continues

    def position(self) -> str:
        self.record.seek(0)
        last = collective_records.parse(self.record.read()).last
        if last is None:
            return f"rank {self.worker.rank} has entered no collective"
        verb = "waits in" if last.unfinished else "was last in"
        return f"rank {self.worker.rank} {verb} {last}"


def supervise(training: Training, events: Sequence[Event]) -> Ending:
    """Run the training once, with these events; restart workers as declared. Raises `Unusable`: on real devices."""
    if simulated_device_count() is None:
        raise Unusable("workers are forked, which a process that uses a real GPU cannot do; run with --simulate")
    with TemporaryDirectory(prefix="mgpu-check-survival-") as directory, contextlib.ExitStack() as stack:
        return _Run(training, events, Path(directory), stack).ended()


def _store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


class _Run:
    def __init__(
        self, training: Training, events: Sequence[Event], directory: Path, stack: contextlib.ExitStack
    ) -> None:
        self.training, self.events, self.directory, self._stack = training, events, directory, stack
        self.ending = Ending(calls={rank: [] for rank in range(training.size)})
        self.store = _store()
        self.kills_left = sum(event.kind == "kill" for event in events)
        self.processes: dict[int, _Process] = {}
        self.finished: list[_Process] = []  # of the present attempts, the first to end first
        stack.callback(self._end_all)

    def ended(self) -> Ending:
        for rank in range(self.training.size):
            self._start(rank, 0)
        heard = time.monotonic()
        while not self.ending.problem and any(p.outcome is None for p in self.processes.values()):
            if self._listen():
                heard = time.monotonic()
            elif time.monotonic() - heard > self.training.timeout:
                self._hangs()
            self._recover()
        for rank, process in self.processes.items():
            if process.outcome is not None and process.outcome[0] == "returned":
                self.ending.results[rank] = process.outcome[1]
        return self.ending

    def _start(self, rank: int, attempt: int) -> None:
        worker = Worker(rank, self.training.size, attempt, self.directory, torch.device("cuda", rank))
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(worker.size),
            "LOCAL_WORLD_SIZE": str(worker.size),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ours, theirs = multiprocessing.Pipe(duplex=False)
        record: IO[bytes] = TemporaryFile()  # noqa: SIM115 - the stack closes it
        self._stack.callback(record.close)
        events = [event for event in self.events if event.rank == rank]
        calls = _Calls(events, len(self.ending.calls[rank]), theirs)
        arguments = (self.training, worker, calls, variables, record.fileno())
        process = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        self.processes[rank] = _Process(worker, process, ours, record)

    def _listen(self) -> bool:
        """Take what workers say, and note those that ended; return whether one did something."""
        running = [process for process in self.processes.values() if process.outcome is None]
        ready = connection.wait([process.pipe for process in running], timeout=0.05)
        for process in running:
            if process.pipe not in ready:
                continue
            try:
                kind, value = pickle.loads(process.pipe.recv_bytes())
            except (EOFError, OSError, pickle.UnpicklingError):
                process.process.join()
                process.outcome = "killed", process.process.exitcode
                self.finished.append(process)
                continue
            if kind == "call":
                self.ending.calls[process.worker.rank].append(value)
            elif kind == "stopped":
                process.wakes = time.monotonic() + _STOPPED
            else:
                process.outcome = kind, value
                self.finished.append(process)
        for process in running:
            if process.wakes is not None and time.monotonic() >= process.wakes:
                process.wakes = None
                os.kill(process.process.pid, signal.SIGCONT)
        return bool(ready) or any(process.wakes is not None for process in running)

    def _recover(self) -> None:
        """Restart what an event has killed, or say why the run has failed."""
        killed = [p for p in self.processes.values() if p.outcome == ("killed", -signal.SIGKILL)]
        failed = [p for p in self.finished if p.outcome and p.outcome[0] in ("raised", "unusable", "killed")]
        if not failed:
            return
        if self.training.restart == "all" and killed and self.kills_left:
            self.kills_left -= len(killed)
            attempt = 1 + max(p.worker.attempt for p in self.processes.values())
            self._end_all()
            self.finished.clear()
            self.store = _store()  # torch expects one for each restart: torch/distributed/rendezvous.py, torch 2.13
            for rank in range(self.training.size):
                self._start(rank, attempt)
            return
        if self.training.restart == "all" and self.kills_left and not killed and self._dying():
            return  # the error of a survivor has come before the end of the one that was killed
        for process in list(killed):
            if self.kills_left > 0 and process.outcome is not None:
                self.kills_left -= 1
                process.pipe.close()
                process.outcome = "gone", None
                failed.remove(process)
                if self.training.restart == "rank":
                    self._start(process.worker.rank, process.worker.attempt + 1)
        if failed:
            self._fails(failed[0])

    def _dying(self) -> bool:
        """Return whether a worker that an event kills has ended, or is about to."""
        running = [p for p in self.processes.values() if p.outcome is None]
        return any(
            connection.wait([p.process.sentinel], timeout=0.2) for p in running if self._is_struck(p.worker.rank)
        )

    def _is_struck(self, rank: int) -> bool:
        count = len(self.ending.calls[rank])
        return any(e.kind == "kill" and e.rank == rank and e.call < count for e in self.events)

    def _fails(self, process: _Process) -> None:
        kind, value = process.outcome or ("", None)
        rank = process.worker.rank
        if kind == "unusable":
            raise Unusable(value)
        attempt = f" in attempt {process.worker.attempt + 1}" if process.worker.attempt else ""
        if kind == "raised":
            self.ending.problem = f"rank {rank} raised {value}{attempt}"
        else:
            self.ending.problem = f"rank {rank} ended with {_exit(value)}{attempt}"
        self.ending.ranks = (rank,)

    def _hangs(self) -> None:
        waiting = [p for p in self.processes.values() if p.outcome is None]
        self.ending.problem = f"no rank made a call for {self.training.timeout:g} s: {waiting[0].position()}"
        self.ending.facts += [p.position() for p in waiting[1:]]
        self.ending.ranks = tuple(p.worker.rank for p in waiting)

    def _end_all(self) -> None:
        for process in self.processes.values():
            process.process.kill()
            process.process.join()
            process.pipe.close()


def _exit(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
