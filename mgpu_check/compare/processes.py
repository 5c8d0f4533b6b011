"""Run the script once: start its processes with the variables of torchrun, wait for them, and end them.

The processes are plain ones, not children of the engine's fork server, which has already imported torch. An unchanged
script may set variables that torch reads on import. It must be ``__main__`` for the processes that it starts, and must
not find a process group that it has not made.

A script may start its ranks itself. On one device the process that trains is recorded, whoever has started it. On
several devices the script then runs once, without variables of a launcher, and each process that makes the process
group is recorded as the rank that it is there.

Nothing is left behind. Traces, output and stacks are unnamed files, which the kernel deletes with their last process.
Each process has its own process group, which is killed at the end, and each process dies with this one. Processes that
a run leaves outside of its process groups are ended, too.

A run may have a working directory of its own: a copy of the current directory, and of the directories beside it.

Arguments of the script may depend on the number of its processes, ``--batch-size={64/W}``, and on their ranks.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import itertools
import json
import math
import operator
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import IO, Literal

from mgpu_check.compare.process_watch import entered
from mgpu_check.compare.trace import HEAD, Trace, read
from mgpu_check.engine.process import describe_exit
from mgpu_check.processes import child_processes
from mgpu_check.processes.child_processes import STACKS_SIGNAL, children, held_back, kill, processor_seconds
from mgpu_check.processes.collective_records import fewest
from mgpu_check.processes.environments import PLACE, SETTINGS, SIMULATE, VARIABLES, with_startup, without_launcher
from mgpu_check.processes.scratch import Scratch
from mgpu_check.processes.tracebacks import Location, location_of

# Other braces, such as those of JSON, belong to the script.
_EXPRESSION = re.compile(r"\{([\dW.+\-*/%() ]*W[\dW.+\-*/%() ]*)\}")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def fitted(words: Sequence[str], world: int) -> list[str]:
    """Return the words with each ``{…W…}`` replaced by its value, where W is `world`, and words of the ranks.

    A word with ``{R}`` is there once for each rank: ``cuda:{R}`` is ``cuda:0 cuda:1`` for 2 processes. ``{R,}`` has the
    numbers of all ranks, ``0,1``. ``{r}`` stays: each process has its own number there.

    An expression without a decimal point must have an integer value: ``{64/W}`` is 16 for 4 processes. With a decimal
    point, as in ``{0.1*W}``, the value is a float.

    Raises:
        ValueError: an expression is invalid, or its value is not an integer.
    """
    ranks = [str(rank) for rank in range(world)]
    words = [word.replace("{R,}", ",".join(ranks)) for word in words]
    words = [word.replace("{R}", rank) for word in words for rank in (ranks if "{R}" in word else ranks[:1])]
    return [_EXPRESSION.sub(lambda match: _value(match[1], world), word) for word in words]


def _value(text: str, world: int) -> str:
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body, world)
    except (SyntaxError, ArithmeticError, TypeError) as error:
        raise ValueError(
            f"{{{text}}} is not a valid expression for W = {world}; use numbers, W, parentheses and + - * / // %, as "
            "in {64/W}"
        ) from error
    if "." in text:
        return repr(float(value))
    if value.denominator != 1:
        raise ValueError(
            f"{{{text}}} is not an integer for W = {world}; choose a number of ranks that divides it, or write "
            f"{{{text.replace('/', '//')}}} to round it down"
        )
    return str(value.numerator)


def _evaluate(node: ast.expr, world: int) -> Fraction:
    if isinstance(node, ast.Name) and node.id == "W":
        return Fraction(world)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return Fraction(repr(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _evaluate(node.operand, world)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: Fraction = _OPERATORS[type(node.op)](_evaluate(node.left, world), _evaluate(node.right, world))
        return Fraction(result)
    raise TypeError("no number")


_TIMEOUT = 5.0  # seconds; a killed process normally ends at once


def end_orphans(before: set[int]) -> None:
    """End every child of this process that is not in `before`. Their children become orphans, and are ended in turn."""
    deadline = time.monotonic() + _TIMEOUT
    while (orphans := set(children()) - before) and time.monotonic() < deadline:
        kill(orphans)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


_INTERVAL = 0.02  # seconds between two checks of the processes
_GRACE = 5.0  # seconds for the other ranks after a failure: their own errors may explain it
_STACKS_TIMEOUT = 1.0
_TAIL = 8192
_SLOW = 0.1  # part of the timeout that a process computes: one that waits for others uses less, even if it polls
_STARTED = re.compile(rb'^\{"event":"started","pid":(\d+),', re.MULTILINE)
_HERE = Path(__file__).parents[1]
_WAITING = ("stopped", "alone", "starts")  # after these events a process waits to be ended

ExitReason = Literal["finished", "stopped", "failed", "killed", "hung"]


@dataclass
class ProcessResult:
    """One process of a run after its end."""

    rank: int
    exit_code: int | None  # as in `subprocess`; None if the runner ended the process
    # "finished"; "stopped" at the last requested step; "failed", with its own exit code; "killed", because another rank
    # had failed; "hung". A signal that ends the interpreter after the end of the script does not count as a failure.
    how: ExitReason
    trace: Trace | None
    stdout: str  # its last lines
    stderr: str
    location: Location | None = None  # where the process waited when it hung
    is_slow: bool = False  # it "hung", and was computing: it may need more time

    @property
    def unimported(self) -> list[str]:
        """The modules that it could not import, or not all that it needs of them; "" for one without a name."""
        raised = self.trace.of("raised") if self.trace else ()
        return [event["unimported"] for event in raised if "unimported" in event]

    @property
    def steps(self) -> int:
        return len(self.trace.steps) if self.trace else 0

    def has(self, event: str) -> bool:
        """Return whether the trace has an event of this kind."""
        return self.trace is not None and bool(self.trace.of(event))

    def __str__(self) -> str:
        reached = f"after step {self.steps}" if self.steps else "before its first optimizer step"
        progress = {
            "failed": f"ended with {describe_exit(self.exit_code)}",
            "killed": "was waiting",
            "hung": "was still computing" if self.is_slow else "made no progress",
            "finished": "finished",
            "stopped": "was stopped",
        }
        location = f", in {self.location}" if self.location and self.how != "failed" else ""
        return f"rank {self.rank} {progress[self.how]} {reached}{location}"


@dataclass
class ScriptRun:
    """All processes of a run, in rank order; `run` returns it when all of them have ended."""

    label: str
    ranks: list[ProcessResult]
    seconds: float
    failed_rank: int | None  # the rank that failed or hung first; None if all ranks finished or were stopped
    directory: Path | None = None  # of the run alone, removed by now; None if it ran in the current directory
    starts_ranks: bool = False  # the script has started the ranks

    def shown(self, file: str) -> str:
        """Return the name of a file for reports, relative to the directory of the run if it is inside."""
        own = self.directory and self.directory.resolve()  # traces have real paths
        return str(Path(file).relative_to(own)) if own and Path(file).is_relative_to(own) else file

    def has(self, event: str) -> bool:
        """Return whether the trace of some rank has an event of this kind."""
        return any(ended.has(event) for ended in self.ranks)

    @property
    def failed(self) -> ProcessResult | None:
        return None if self.failed_rank is None else self.ranks[self.failed_rank]

    @property
    def traces(self) -> list[Trace]:
        return [ended.trace or Trace(ended.rank, len(self.ranks)) for ended in self.ranks]


class _RecordedProcess:
    """A recorded process and the files that it writes.
    `run` starts it, looks at its trace while it lives, and kills it. After `ended` has read the files, `run` closes
    them. If the script starts its ranks itself, `process` is the script, and each rank has its own trace."""

    process: subprocess.Popen[bytes]
    output: tuple[IO[bytes], IO[bytes]]  # stdout and stderr

    def __init__(self, rank: int, files: Mapping[str, int], undo: contextlib.ExitStack) -> None:
        self.rank = rank
        self.trace, self.stacks, self.entered = (temporary(undo) for _ in range(3))
        # A process that the script has started writes the trace after the script's first process.
        fcntl.fcntl(self.trace, fcntl.F_SETFL, os.O_APPEND)
        own = {"trace": self.trace.fileno(), "stacks": self.stacks.fileno(), "entered": self.entered.fileno()}
        self.fds = {**own, **files}
        self.killed = False
        self.location: Location | None = None
        self.is_slow = False

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        settings: Mapping[str, object],
        directory: Path | None,
        undo: contextlib.ExitStack,
    ) -> None:
        self.output = temporary(undo), temporary(undo)
        self.process = subprocess.Popen(
            [word.replace("{r}", str(self.rank)) for word in command],
            env={**environment, SETTINGS: json.dumps(settings)},
            stdin=subprocess.DEVNULL,
            stdout=self.output[0],
            stderr=self.output[1],
            pass_fds=list(self.fds.values()),
            process_group=0,
            cwd=directory,
        )

    def size(self) -> int:
        return os.fstat(self.trace.fileno()).st_size

    def said(self, *events: str) -> bool:
        """Return whether one of these kinds is among the last events of its trace."""
        last = os.pread(self.trace.fileno(), 200, max(0, self.size() - 200))
        return any(f'\n{{"event":"{event}"'.encode() in last for event in events)

    def pid(self) -> int:
        """Return the process that trains: the first one of the script, or one that it has started."""
        return self.started() or self.process.pid

    def started(self) -> int | None:
        """Return the process that writes the trace if the script has started it, else None."""
        match = _STARTED.search(os.pread(self.trace.fileno(), HEAD, 0))
        return int(match[1]) if match else None

    def end(self) -> str:
        """Return how a process that the script has started has ended: "ended", "raised", or "" for neither so far."""
        last = os.pread(self.trace.fileno(), 200, max(0, self.size() - 200)).rpartition(b'\n{"event":"')[2]
        event = last.partition(b'"')[0].decode(errors="replace")
        return event if event in ("ended", "raised") and self.started() is not None else ""

    def is_open(self) -> bool:
        """Return whether the process may still make progress."""
        return self.process.poll() is None and not self.end() and not self.said(*_WAITING)

    def failed(self) -> bool:
        """Return whether the process has ended, and the script failed."""
        code = self.process.returncode
        if self.started() is not None:
            # The script's first process may end with code 0 although a process that it has started has failed. It may
            # also kill that process at the end, as Ray does.
            return self.end() == "raised" or (bool(code) and not self.end() and not self.said(*_WAITING))
        # An interpreter that exits with a process group may abort: a thread of gloo that drops a tensor takes the GIL
        # while the interpreter is torn down (pytorch/pytorch#179291, pytorch/pytorch#190489).
        return code is not None and code != 0 and not (code < 0 and self.said("ended"))

    def where(self) -> Location | None:
        """Return its location in the code, from its stacks without frames of mgpu-check."""
        lines = _content(self.stacks, 0).decode(errors="replace").splitlines()
        return location_of("\n".join(line for line in lines if f'File "{_HERE}{os.sep}' not in line))

    def kill(self) -> None:
        if self.process.poll() is None:
            self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @functools.cached_property
    def recorded(self) -> Trace | None:
        """The trace, read once after the process has ended."""
        data = _content(self.trace, 0)
        return read(data) if data else None

    def clear(self) -> None:
        """Remove the temporary directories that the process could not remove because it was killed."""
        trace = self.recorded if self.killed else None
        for event in trace.of("temporary") if trace else ():
            shutil.rmtree(event["directory"], ignore_errors=True)

    def ended(self, hung: bool) -> ProcessResult:
        trace = self.recorded
        code = None if self.killed else self.process.returncode
        how: ExitReason
        if self.end():
            code = int(self.end() == "raised")
        if code is not None:
            how = "failed" if self.failed() else "finished"
        elif trace is not None and any(trace.of(event) for event in _WAITING):
            how = "stopped"
        else:
            how = "hung" if hung else "killed"
        written = (_content(file, _TAIL).decode(errors="replace") for file in self.output)
        stdout, stderr = ("\n".join(text.strip().splitlines()[-12:]) for text in written)
        return ProcessResult(self.rank, code, how, trace, stdout, stderr, self.location, self.is_slow)


def temporary(undo: contextlib.ExitStack) -> IO[bytes]:
    """Return an unnamed temporary file, which `undo` closes."""
    return undo.enter_context(tempfile.TemporaryFile(buffering=0))


def _content(file: IO[bytes], last: int) -> bytes:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, max(0, size - last) if last else 0)


def run(
    label: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    world: int,
    *,
    timeout: float,
    steps: int | None = None,
    taped: int | None = None,
    moved: int | None = None,
    directory: Path | None = None,
    files: Mapping[str, int | Sequence[int]] = MappingProxyType({}),
    distinct: bool = False,
    launcher: str = "torchrun",
    starts_ranks: bool = False,
) -> ScriptRun:
    """Run `command` in `world` processes, and wait for all of them.

    Args:
        environment: the environment of the processes; variables of a launcher in it are replaced.
        timeout: seconds within which at least one rank must make progress: start, make an optimizer step, or record an
            event.
        steps, taped, moved, distinct: see `mgpu_check.compare.in_script.recorder.install`.
        directory: working directory of the processes; None: the current one.
        files: file descriptors, one for all processes or one for each; see `Files` in `in_script/placements.py`.
        launcher: whose variables the processes get; see `mgpu_check.processes.environments.VARIABLES`.
        starts_ranks: the script is one process, which starts its ranks itself.
    """
    began = time.monotonic()
    settings: dict[str, object] = {
        "runner": os.getpid(),
        "signal": int(STACKS_SIGNAL),
        "steps": steps,
        "taped": taped,
        "moved": moved,
        "apart": distinct,
        "first": True,
        "store": None,
    }
    processes: list[_RecordedProcess] = []
    started: list[_RecordedProcess] = []
    child_processes.adopt_orphans()  # orphans become children of this process from now on
    before = set(children())
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        store = listener.getsockname()
        try:
            for rank in range(world):
                own = {name: fd if isinstance(fd, int) else fd[rank] for name, fd in files.items()}
                processes.append(_RecordedProcess(rank, own, undo))
            if starts_ranks:
                first, *others = processes
                own_settings = {**settings, "ranks": [process.fds for process in processes], "size": world}
                first.start(command, _variables(environment), own_settings, directory, undo)
                for other in others:
                    other.process, other.output = first.process, first.output
                started = processes
            else:
                # Of the processes that the script starts, one may be the rank if there is one device.
                shared = {**settings, "size": 1 if world == 1 else 0, "store": store}
                for process in processes:
                    variables = {**_variables(environment), **_launched(process.rank, world, store[1], launcher)}
                    own_settings = {**shared, **process.fds, "ranks": [process.fds]}
                    process.start(command, variables, own_settings, directory, undo)
                    started.append(process)
            # The processes can already connect; the store serves them from now on.
            undo.enter_context(_store(listener, world))
            failed_rank, hung = _wait(processes, timeout, SIMULATE in environment)
        finally:
            for process in started:
                process.kill()
            end_orphans(before)
            for process in started:
                process.clear()
            ended = [process.ended(hung) for process in started] if sys.exc_info()[0] is None else []
    return ScriptRun(label, ended, time.monotonic() - began, failed_rank, directory, starts_ranks)


@contextlib.contextmanager
def _store(listener: socket.socket, world: int) -> Iterator[None]:
    """Hold the store where ranks meet, as torchrun's agent does: no rank must bind a port then.
    A store of rank 0 would end with rank 0, while others still use it (pytorch/pytorch#128096)."""
    import torch.distributed as dist

    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]  # not in its __all__
        "127.0.0.1", port, world + 1, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    yield
    del store


def _launched(rank: int, world: int, port: int, launcher: str) -> dict[str, str]:
    """Return the variables of a rank, as the launcher sets them on one machine.
    Ranks of every launcher get an address, as scripts of jobs export it, and meet at the store of the comparison."""
    return {
        **{name: value.format(rank=rank, world=world) for name, value in VARIABLES[launcher].items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        PLACE: f"{rank}/{world}",
    }


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process without variables of a launcher."""
    variables = without_launcher(environment)
    variables["PYTHONPATH"] = with_startup(variables)
    # As for several ranks (torch/distributed/run.py, config_from_args, torch 2.13); also on one device, to sum alike.
    variables.setdefault("OMP_NUM_THREADS", "1")
    # For CUDA's libraries, independent of settings in the script: no TF32, and an order of sums that does not depend on
    # the stream.
    variables.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    variables.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    variables.setdefault("TORCH_COMPILE_DISABLE", "1")  # compiled kernels round differently, and skip hooks
    return variables


def _wait(processes: Sequence[_RecordedProcess], timeout: float, simulated: bool) -> tuple[int | None, bool]:
    """Wait until all processes have ended or hang. Return the rank that failed first, and whether it hung."""
    sizes = [0] * len(processes)
    moved_at = last_look = time.monotonic()
    failures: dict[int, float] = {}  # rank -> when its script ended
    computed: dict[_RecordedProcess, float] = {}  # seconds of processor time at the last progress
    give_up = math.inf
    while True:
        now = time.monotonic()
        # Computed before the failures: a process that ends in between still counts as open, and is checked again.
        open_ = [process for process in processes if process.is_open()]
        if any(process.said("starts") for process in processes):
            return None, False  # other ranks may never start
        for process in processes:
            if process.rank not in failures and process.failed():
                # When its script ended, by the clock of the machine, if it lived to record that.
                events = process.recorded.events if process.recorded else ()
                ends = (event["at"] for event in events if event["event"] in ("ended", "raised"))
                failures[process.rank] = max(ends, default=last_look)
                give_up = min(give_up, now + _GRACE)
        last_look = now
        # A rank that raises closes its connections, and the others may raise for that, and end, before it has ended.
        failed_rank = min(failures, key=failures.__getitem__, default=None)
        if not open_ or now > give_up:
            return failed_rank, False
        if (grown := [process.size() for process in processes]) != sizes:
            sizes, moved_at = grown, now
            computed = {process: processor_seconds(process.pid()) for process in open_}
        if now > moved_at + timeout:
            import torch

            # A process that waits for a real device keeps its processor busy, too (CUDA's cudaDeviceScheduleSpin).
            spins = not simulated and torch.cuda.is_available()
            for process in open_:
                used = processor_seconds(process.pid()) - computed.get(process, 0.0)
                process.is_slow = not spins and used > _SLOW * timeout
            _look(open_)
            if failed_rank is not None:
                return failed_rank, False
            # The others wait for a rank outside collectives, or for the rank that entered the fewest. On real devices
            # collectives return at once, so every rank may be outside.
            alone = [p for p in open_ if p.location is None or p.location.collective is None]
            return fewest({p.rank: entered(p.entered.fileno()) for p in alone or open_})[0], True
        time.sleep(_INTERVAL)


def _look(processes: Sequence[_RecordedProcess]) -> None:
    # The number of its threads that block the signal is larger while threads write their stacks.
    waiting = {process: held_back(process.pid(), STACKS_SIGNAL) for process in processes}
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid(), STACKS_SIGNAL)
    deadline = time.monotonic() + _STACKS_TIMEOUT
    while waiting and time.monotonic() < deadline:
        time.sleep(_INTERVAL)
        for process, before in list(waiting.items()):
            # Checked before stacks are read: they may be incomplete.
            written = held_back(process.pid(), STACKS_SIGNAL) <= before
            process.location = process.where()
            if written and process.location is not None:
                del waiting[process]


_COPIED = 2**20  # bytes: larger files, such as data sets, are linked, because copies would take long
_ENTRIES = 1000  # a directory with more entries is probably a data set, and is linked
_BESIDE_ENTRIES = 10 * _ENTRIES  # of all directories beside: each run makes them again
_BESIDE_COPIED = 2**24  # bytes of all files beside, for the same reason


@contextmanager
def fresh_directory(source: Path | None = None) -> Iterator[Path]:
    """Make a temporary directory like `source`, and remove it afterwards with everything in it.

    Subdirectories are real directories, so new files stay in the copy. Small files are copied. These are links to the
    originals, so that writing to them changes the originals: links, large files, unreadable files and directories,
    directories with many entries, hidden directories and virtual environments.

    Beside the copy are the entries beside `source`, so that a script finds its ``../data``; nothing is beside the copy
    if the parent of `source` is unreadable or has many entries. Hidden entries are left out. Directories beside are
    real, but their subdirectories are links. Files of mounted directories are links, and so is all that exceeds
    `_BESIDE_ENTRIES` or `_BESIDE_COPIED`.

    `source`: default: the current directory.
    """
    with Scratch.new("compare") as scratch:
        source = (source or Path.cwd()).resolve()  # as the kernel does for ".."
        directory = scratch / (source.name or "root")
        but = str(scratch.resolve())
        _imitate(source, directory, but)
        _imitate_beside(source.parent, scratch, but)
        yield directory


def _imitate(source: Path, target: Path, but: str) -> None:
    target.mkdir()
    for entry in os.scandir(source):
        if entry.name == "__pycache__" or entry.path == but:
            continue
        if _inside(entry) is None:
            _give(entry, target / entry.name, _COPIED)
        else:
            _imitate(Path(entry.path), target / entry.name, but)


def _imitate_beside(parent: Path, scratch: Path, but: str) -> None:
    entries, size = _BESIDE_ENTRIES, _BESIDE_COPIED
    for entry in sorted(_entries(parent) or (), key=lambda entry: entry.name):
        copy = scratch / entry.name
        if entry.name.startswith(".") or entry.path == but or copy.exists():
            continue
        inside = _inside(entry)
        if inside is None or len(inside) > entries:
            size -= _give(entry, copy, min(size, _COPIED))
            continue
        copy.mkdir()
        entries -= len(inside)
        mounted = os.path.ismount(entry.path)  # such as /proc, whose files may not be read
        for own in inside:
            if own.name != "__pycache__" and own.path != but:
                size -= _give(own, copy / own.name, -1 if mounted else min(size, _COPIED))


def _inside(entry: os.DirEntry[str]) -> list[os.DirEntry[str]] | None:
    """Return the entries of a directory that gets a directory of its own; None for what is copied or linked."""
    if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
        return None
    return None if os.path.exists(os.path.join(entry.path, "pyvenv.cfg")) else _entries(entry.path)


def _entries(directory: str | Path) -> list[os.DirEntry[str]] | None:
    try:
        with os.scandir(directory) as scan:
            entries = list(itertools.islice(scan, _ENTRIES + 1))
    except OSError:
        return None
    return entries if len(entries) <= _ENTRIES else None


def _give(entry: os.DirEntry[str], copy: Path, most: int) -> int:
    """Copy a file of at most `most` bytes, and link everything else. Return the number of bytes that were copied."""
    with contextlib.suppress(PermissionError, FileNotFoundError):  # another process may remove it
        if entry.is_file(follow_symlinks=False) and (size := entry.stat().st_size) <= most:
            shutil.copy2(entry.path, copy)
            return size
    copy.symlink_to(entry.path)
    return 0
