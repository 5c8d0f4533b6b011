"""The main loop of a rank, and of the node process. Depends on nothing of pytest or Hypothesis."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.ranks import protocol, stray, transport
from mgpu_check.ranks.channel import RankEnd
from mgpu_check.ranks.collectives import recorder
from mgpu_check.ranks.devices import RealDevices, check_visible, has_nccl, take
from mgpu_check.ranks.frames import is_engine
from mgpu_check.ranks.rank import Rank, become, current_rank
from mgpu_check.ranks.rendezvous import open_store
from mgpu_check.ranks.state import Baseline, Steps, groups_made
from mgpu_check.ranks.worker_signal import CONNECTION_LOST, STACKS_SIGNAL

__all__ = ["EXPLAIN", "at_rest", "main", "tell", "without_engine"]

EXPLAIN = "_mgpu_check_explain"
"""Attribute by which a wrapper around a call gives an exception a function that makes a better text of its traceback."""

_BACKENDS = "cpu:gloo,cuda:nccl"

_MOST_CHAINED = 20  # exceptions that a traceback shows
_MOST_TEXT = 100_000  # characters at its beginning, and at its end

_told: list[tuple[str, Any]] = []
_at_rest: list[Callable[[], None]] = []


def tell(what: tuple[str, Any]) -> None:
    """Have plain values handed to the pytest process with the outcome of this call."""
    _told.append(what)


def at_rest(callback: Callable[[], None]) -> None:
    """Have `callback` called at the end of every test from now on."""
    _at_rest.append(callback)


def main(connection_fd: int, stacks_fd: int, record_fd: int) -> int:
    """Be the rank that the first message describes, until told to stop. Returns the exit code."""
    connection = RankEnd(connection_fd)
    _write_stacks_to(stacks_fd)
    recorder.attach(record_fd)
    stray.listen()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # they are text files here
    try:
        spec = connection.recv()
        assert isinstance(spec, protocol.RankSpec)
        worker = Worker(connection, spec, stacks_fd)
        connection.send(protocol.Ready())
    except EOFError:
        return 0
    except BaseException as error:
        connection.send(protocol.Ready(_failure(error)))
        return 1
    try:
        worker.loop()
    except OSError as error:
        print(f"mgpu-check: the connection to the pytest process is broken: {error}", file=sys.stderr)
        return CONNECTION_LOST
    return 0


def _write_stacks_to(fd: int) -> None:
    """Write the stacks of all threads to `fd` when asked for them, and when a signal ends the process.

    By handlers in C: one in Python does not run while the main thread waits in a collective. Those that a test has put in
    their place, by whatever means, go.
    """
    faulthandler.cancel_dump_traceback_later()
    faulthandler.disable()
    faulthandler.enable(file=fd, all_threads=True)
    faulthandler.unregister(STACKS_SIGNAL)
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


class Worker:
    """One process of the pool."""

    def __init__(self, connection: RankEnd, spec: protocol.RankSpec, stacks_fd: int) -> None:
        self.connection = connection
        self.stacks_fd = stacks_fd
        self.pid = os.getpid()
        os.register_at_fork(after_in_child=connection.close)  # what the test forks is no rank
        self.spec = spec
        self.functions: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.entered = 0  # collectives, sends and receives, when the last call returned
        self.outcome: protocol.Outcome | None = None
        self.devices = RealDevices() if spec.simulate is None else None
        self.nccl = False
        self.own = protocol.Surroundings(tuple(sys.path), os.getcwd(), dict(os.environ))
        surroundings = spec.surroundings.over(self.own)
        os.environ.clear()
        os.environ.update({**surroundings.environment, **spec.own_environment})
        os.chdir(surroundings.directory)
        sys.path[:] = surroundings.path
        torch.set_num_threads(spec.threads)
        if spec.simulate is not None:
            from mgpu_check.node.simulated import simulated_node

            self.node = simulated_node(spec.devices, spec.simulate)  # kept, because its end would end the simulation
            self.node.__enter__()
        check_visible(spec.uuids)
        if spec.index is not None:
            self.join(spec.index)
        self.baseline = Baseline.take(spec.device)

    def join(self, index: int) -> None:
        spec = self.spec
        if self.devices is None:
            torch.cuda.set_device(spec.device)
        else:
            take(spec.device)
        dist.init_process_group(
            # By name: without, it is the accelerator's only since torch 2.6, and CPU tensors have none.
            backend=spec.backend or _BACKENDS,
            store=open_store(spec.store, spec.size),
            rank=index,
            world_size=spec.size,
            timeout=datetime.timedelta(seconds=spec.group_timeout),
        )
        self.nccl = self.devices is not None and spec.size > 1 and has_nccl()
        if self.nccl:
            # NCCL makes its communicator with the first collective: all ranks have to be in it, and it takes seconds.
            dist.barrier(device_ids=[spec.device])
        become(Rank(index, spec.size, spec.local_index, spec.node_index, torch.device("cuda", spec.device)))

    def loop(self) -> None:
        while True:
            try:
                message = self.connection.recv()
            except EOFError:
                return
            except OSError:
                if os.getpid() != self.pid:
                    os._exit(0)
                raise
            if isinstance(message, protocol.Call):
                self.connection.send(self.call(message))
            elif isinstance(message, protocol.Settle):
                self.connection.send(self.settle())
            elif isinstance(message, protocol.Meet):
                self.connection.send(self.meet())
            elif isinstance(message, protocol.Explain):
                self.connection.send(self.explain())
            elif isinstance(message, protocol.EndTest):
                self.connection.send(self.end_test())
            else:
                return

    def call(self, call: protocol.Call) -> protocol.Outcome:
        self.error = None
        value: bytes | None = None
        failure: protocol.Failure | None = None
        steps = Steps()
        settled = reusable = True
        _told.clear()
        recorder.begin()
        try:
            if call.surroundings is not None:
                self.move(call.surroundings)
            self.restore()
            function = self.functions[call.key] if call.function is None else transport.loads(call.function)
            if call.keep:
                self.functions[call.key] = function
            args, kwargs = transport.loads(call.arguments)
            result = function(
                *(self.resolve(arg) for arg in args), **{name: self.resolve(arg) for name, arg in kwargs.items()}
            )
            try:
                value = transport.dumps(result)
            except Exception as error:
                raise TypeError(
                    f"the result, of type {type(result).__name__}, cannot be sent to the pytest process: {error}"
                ) from None
            settled = self.devices is None or self.devices.idle()
        except BaseException as error:
            value = None
            try:
                failure = _failure(error)
            except MemoryError:
                traceback.clear_frames(error.__traceback__)  # what the test holds leaves nothing to tell of it with
                failure = _failure(error)
            self.error = error
            reusable = self.devices is None or self.devices.usable()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(BaseException):  # the test has closed them, or put something else there
                stream.flush()  # type: ignore[union-attr]
        if os.getpid() != self.pid:
            os._exit(0)  # the test has forked, and both have returned: only one of them is the rank
        self.entered = recorder.total
        self.outcome = protocol.Outcome(
            call.number,
            value,
            failure,
            (*steps.taken(), groups_made()),
            recorder.agreement(),
            tuple(_told),
            recorder.flows(),
            settled,
            reusable,
        )
        return self.outcome

    def settle(self) -> protocol.Outcome:
        """Wait for the devices: an error of a kernel, or a collective that never ends, belongs to the call that it is of."""
        assert self.outcome is not None
        try:
            if self.devices is not None:
                self.devices.wait()
        except BaseException as error:
            self.error = error
            return dataclasses.replace(self.outcome, value=None, failure=_failure(error), settled=True, reusable=False)
        return dataclasses.replace(self.outcome, settled=True)

    def restore(self) -> None:
        """Have the state of a fresh rank, as far as any call may have changed it."""
        if self.devices is not None:
            self.devices.restore()
        self.baseline.restore()

    def move(self, surroundings: protocol.Surroundings) -> None:
        """Take over what has changed around the pytest process: a fixture may have set a variable."""
        surroundings = surroundings.over(self.own)
        sys.path[:] = surroundings.path
        self.baseline.process.path = surroundings.path
        self.baseline.environment = {**surroundings.environment, **self.spec.own_environment}
        self.baseline.directory = surroundings.directory
        self.baseline.restore_surroundings()

    def resolve(self, argument: object) -> object:
        if not isinstance(argument, protocol.Placeholder):
            return argument
        if argument.name == "rank":
            return current_rank()
        return tuple(torch.device("cuda", i) for i in range(argument.count or self.spec.devices))

    def meet(self) -> protocol.Rested:
        try:
            recorder.aside(dist.barrier)
            if self.nccl:
                # Of the two backends each has its own order, and a barrier of one proves nothing of the other.
                recorder.aside(lambda: dist.barrier(device_ids=[self.spec.device]))
        except Exception as error:
            return protocol.Rested((f"an error in a barrier: {error}",))
        return protocol.Rested(())

    def explain(self) -> str:
        if self.error is None:
            return ""
        try:
            with shortened(self.error):
                return clipped(str(getattr(self.error, EXPLAIN, lambda: "")()))
        except BaseException:
            return ""  # the plain traceback stands

    def end_test(self) -> protocol.Rested:
        self.error = self.outcome = None
        self.functions.clear()
        gc.collect()  # what finalizers have to say is of this test
        for callback in _at_rest:
            callback()
        stray.listen()
        try:
            if self.devices is not None:
                self.devices.give_back()
            self.baseline.restore_process()
            _write_stacks_to(self.stacks_fd)
            self.restore()
        except Exception as error:
            return protocol.Rested((f"a state that cannot be put back: {_failure(error).headline}",))
        late = ["operations of a process group that were begun after the function had returned"]
        dirt = self.baseline.dirt()
        told = tuple(("stray", one.plain) for one in stray.take())
        return protocol.Rested((*(late if recorder.total != self.entered else ()), *dirt), told)


# By module and name, because neither pytest nor Hypothesis is imported here unless the test did. Of pytest's own some
# say that they are builtins.
_KINDS: dict[tuple[str, str], Any] = {
    ("builtins", "Skipped"): "skip",
    ("unittest.case", "SkipTest"): "skip",
    ("_pytest.outcomes", "Skipped"): "skip",
    ("_pytest.outcomes", "XFailed"): "xfail",
    ("hypothesis.errors", "UnsatisfiedAssumption"): "reject",
}


def _kind(error: BaseException) -> Any:
    for one in type(error).__mro__:
        if kind := _KINDS.get((one.__module__, one.__qualname__)):
            return kind
    return "error"


def _message(error: BaseException) -> str:
    try:
        return str(error).strip()
    except BaseException as broken:  # whatever it is, the error to be told is another
        return f"<str() of it raised {type(broken).__name__}>"


def _failure(error: BaseException) -> protocol.Failure:
    origin = traceback.extract_tb(error.__traceback__)
    # A wrapper around a method in C++ is no place: Hypothesis takes what is raised in one place for one failure.
    others = [frame for frame in origin if not is_engine(frame.filename)] or origin
    last = others[-1] if others else None
    message = _message(error)
    return protocol.Failure(
        kind=_kind(error),
        headline=f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__,
        text=clipped(_render(error)),
        filename=last.filename if last else "",
        lineno=(last.lineno or 1) if last else 1,
        pickled=_pickled(error),
    )


def _render(error: BaseException) -> str:
    """The traceback without the frames of the engine."""
    with shortened(error):
        rendered = traceback.TracebackException.from_exception(error)
    todo = [rendered]
    while todo:
        one = todo.pop()
        kept = [frame for frame in one.stack if not is_engine(frame.filename)]
        one.stack = traceback.StackSummary.from_list(kept or list(one.stack))
        todo += [other for other in (one.__cause__, one.__context__, *(one.exceptions or ())) if other is not None]
    return "".join(rendered.format()).rstrip()


@contextlib.contextmanager
def shortened(error: BaseException) -> Iterator[None]:
    """Have at most a few exceptions behind `error`: Python's own rendering of thousands fails by recursion."""
    last = error
    for _ in range(_MOST_CHAINED):
        behind = last.__cause__ if last.__cause__ is not None or last.__suppress_context__ else last.__context__
        if behind is None:
            yield
            return
        last = behind
    cut = last.__cause__, last.__context__, last.__suppress_context__
    last.__cause__ = last.__context__ = None
    last.add_note("[the exceptions before this one are left out]")
    try:
        yield
    finally:
        last.__cause__, last.__context__, last.__suppress_context__ = cut
        last.__notes__.pop()


def clipped(text: str) -> str:
    """`text` without its middle, where it is longer than anyone reads."""
    if len(text) <= 2 * _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]}\n[{len(text) - 2 * _MOST_TEXT} characters are left out]\n{text[-_MOST_TEXT:]}"


def without_engine(tb: types.TracebackType | None) -> types.TracebackType | None:
    """`tb` from the first frame on that is not of the engine, or of what is put around a function that is sent."""
    while tb is not None and tb.tb_next is not None and is_engine(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def _pickled(error: BaseException) -> bytes | None:
    explanation = getattr(error, "__dict__", {}).pop(EXPLAIN, None)
    try:
        return transport.dumps(error)
    except BaseException:  # code of the exception's own runs here
        return None
    finally:
        if explanation is not None:
            setattr(error, EXPLAIN, explanation)
