"""The main loop of a rank, and of the node process. It must not import pytest or Hypothesis.

A call may pause until all ranks have done the same part of it, to compare their collectives. A rank reports the part
to the pytest process over its connection and waits for the answer. Such a message cannot pair with a collective of
the code under test. The pytest process waits as for any answer, so it also reports a rank that hangs or dies.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import datetime
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import torch
import torch.distributed as dist

from mgpu_check.engine.rank_side import devices, python_hooks
from mgpu_check.engine.rank_side.python_hooks import note_names
from mgpu_check.engine.rank_side.rank import Rank, become, current_rank
from mgpu_check.engine.rank_side.state import FreshState, Steps, backends_of, groups_made, number_of
from mgpu_check.processes import channel, pickling
from mgpu_check.processes.channel import RankEnd
from mgpu_check.processes.child_processes import CONNECTION_LOST, MARK, STACKS_SIGNAL
from mgpu_check.processes.heap import keep_freed_memory
from mgpu_check.processes.rank_pickling import EXPLAIN, clipped, failure_of, give_by_value, shortened
from mgpu_check.torch_hooks.collectives import group_of, recorder

_BACKENDS = "cpu:gloo,cuda:nccl"

_FATAL = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
_SIGNALS = tuple(sorted(map(int, signal.valid_signals() - _FATAL)))
"""Signals that a test may register with `faulthandler`."""

_getpid = os.getpid  # a test may replace the name

_messages: list[tuple[str, Any]] = []
_at_rest: list[Callable[[], None]] = []
log_files: list[TextIO] = []  # the file for the log of this rank; empty in other processes


def tell(message: tuple[str, Any]) -> None:
    """Add a message of plain values to the outcome of this call."""
    _messages.append(message)


def at_rest(callback: Callable[[], None]) -> None:
    _at_rest.append(callback)


def main(connection_fd: int, log_fd: int, stacks_fd: int, record_fd: int, directory: str) -> int:
    """Run the rank that the first message describes until the connection closes, and return the exit code."""
    connection = RankEnd(connection_fd)
    log_files.append(os.fdopen(log_fd, "a", buffering=1, encoding="utf-8", errors="backslashreplace"))
    _write_stacks_to(stacks_fd)
    recorder.attach(record_fd)
    python_hooks.listen()
    give_by_value()
    keep_freed_memory()
    # Temporary files of `multiprocessing` go to the run's directory, because a killed rank cannot remove them. It has
    # no public setting for that (multiprocessing/util.py, get_temp_dir, Python 3.11).
    multiprocessing.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]
    note_names(directory)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # text files here
    try:
        spec = connection.recv()
        assert isinstance(spec, channel.RankSpec)
        worker = Worker(connection, spec, stacks_fd, directory)
        connection.send(channel.Ready())
    except EOFError:
        return 0
    except BaseException as error:
        connection.send(channel.Ready(failure_of(error)))
        return 1
    try:
        worker.loop()
    except OSError as error:
        print(f"mgpu-check: the connection to the pytest process is broken: {error}", file=sys.stderr)
        return CONNECTION_LOST
    return 0


def _write_stacks_to(fd: int) -> None:
    """Write the stacks of all threads to `fd` on `STACKS_SIGNAL`, and when a fatal signal ends the process.
    The handlers are C functions, because a Python handler does not run while the main thread waits in a collective.
    They replace handlers of a test."""
    faulthandler.cancel_dump_traceback_later()
    faulthandler.disable()
    faulthandler.enable(file=fd, all_threads=True)
    for number in _SIGNALS:
        faulthandler.unregister(number)
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


class Worker:
    """The state and the message loop of one process of the pool.
    `main` makes one from the first message, and it joins the process group. `loop` answers the pytest process: calls,
    and a request at the end of each test. It ends when the connection closes."""

    def __init__(self, connection: RankEnd, spec: channel.RankSpec, stacks_fd: int, directory: str) -> None:
        self.connection, self.stacks_fd = connection, stacks_fd
        self.pid = _getpid()
        os.register_at_fork(after_in_child=connection.close)  # a process that a test forks must not act as this rank
        self.spec = spec
        self.functions: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.fresh = False  # True while no call has run since the state was restored
        self.entered = 0  # number of collectives, sends and receives when the last call returned
        self.outcome: channel.Outcome | None = None
        self.devices = devices.devices_behind(spec.simulate)
        self.nccl = False
        self.own = channel.CallContext(tuple(sys.path), os.getcwd(), dict(os.environ))
        self.own_environment = {**spec.own_environment, MARK: directory}
        call_context = spec.call_context.over(self.own)
        os.environ.clear()
        os.environ.update({**call_context.environment, **self.own_environment})
        os.chdir(call_context.directory)
        sys.path[:] = call_context.path
        torch.set_num_threads(spec.threads)
        if spec.simulate is not None:
            from mgpu_check.simulated import simulated_node

            self.node = simulated_node(spec.devices, spec.simulate)  # a reference, because the simulation ends with it
            self.node.__enter__()
            torch.cuda.init()  # as on real devices, `CUDA_VISIBLE_DEVICES` has no effect from here on
        devices.check_visible(spec.uuids)
        if spec.index is not None:
            if not spec.bare:
                self.make_group(spec.index)
            device = torch.device("cuda", spec.device)
            become(Rank(spec.index, spec.size, spec.local_index, spec.node_index, device))
        self.baseline = FreshState(spec.device, simulated=spec.simulate is not None)
        self.variables = contextvars.copy_context()  # of one test
        global _wait
        _wait = self.pause

    def make_group(self, index: int) -> None:
        spec = self.spec
        if spec.simulate is None:
            devices.take(spec.device)
        else:
            torch.cuda.set_device(spec.device)
        devices.share_gloo_device()
        dist.init_process_group(
            # Named explicitly: since torch 2.6 the default is the accelerator's backend only, with none for CPU
            # tensors (pytorch/pytorch#142216).
            backend=spec.backend or _BACKENDS,
            store=devices.open_store(spec.store, spec.size),
            rank=index,
            world_size=spec.size,
            timeout=datetime.timedelta(seconds=spec.group_timeout),
        )
        self.nccl = spec.simulate is None and spec.size > 1 and devices.has_nccl()
        if self.nccl:
            # NCCL creates its communicator in the first collective, which takes seconds and needs all ranks.
            dist.barrier(device_ids=[spec.device])

    def loop(self) -> None:
        answers: dict[object, Callable[[], object]] = {
            channel.RankRequest.SETTLE: self.settle,
            channel.RankRequest.MEET: self.meet,
            channel.RankRequest.EXPLAIN: self.explain,
            channel.RankRequest.END_TEST: self.end_test,
        }
        while True:
            try:
                message = self.connection.recv()
            except EOFError:
                return
            except OSError:
                if _getpid() != self.pid:
                    os._exit(0)
                raise
            if isinstance(message, channel.Call):
                self.send_result(self.call(message))
            elif message in answers:
                self.connection.send(answers[message]())
            else:
                return

    def call(self, call: channel.Call) -> channel.Outcome:
        self.error = None
        value: pickling.Pickled | None = None
        failure: channel.RaisedInRank | None = None
        steps = Steps()
        settled = reusable = True
        _messages.clear()
        recorder.begin()
        _operations_before.clear()
        _operations_before.update((str(group.group_name), _operations(group)) for group in _groups())
        try:
            if call.call_context is not None:
                self.move(call.call_context)
            if not self.fresh and not self.spec.bare:
                self.restore()
            self.fresh = False
            function = self.functions[call.key] if call.function is None else pickling.loads(call.function)
            if call.keep:
                self.functions[call.key] = function
            args, kwargs = pickling.loads(call.arguments)
            args, kwargs = [*map(self.resolve, args)], {name: self.resolve(arg) for name, arg in kwargs.items()}
            try:
                result = self.variables.run(function, *args, **kwargs)
            finally:
                self.baseline.replaceable.put_back_what_messages_need()
            value = self.pickle_result(result)
            settled = self.devices.idle()
        except BaseException as error:
            value = None
            try:
                failure = failure_of(error)
            except MemoryError:
                traceback.clear_frames(error.__traceback__)  # free the test's memory, to have enough for the report
                failure = failure_of(error)
            self.error = error
            reusable = self.devices.usable()
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            with contextlib.suppress(BaseException):  # the test may have closed, replaced or deleted them
                getattr(sys, name).flush()
        if _getpid() != self.pid:
            os._exit(0)  # the test has forked, and both processes have returned: only the parent is the rank
        self.entered = recorder.total
        self.outcome = channel.Outcome(
            call.number,
            value,
            failure,
            (*steps.taken(), groups_made()),
            recorder.agreement(),
            tuple(_messages),
            recorder.flows(),
            settled,
            reusable,
        )
        return self.outcome

    # A large result takes long in these two functions, and stacks name them: see `stacks.RETURNING`.

    def pickle_result(self, result: object) -> pickling.Pickled:
        try:
            return pickling.dumps_apart(result)
        except Exception as error:
            raise TypeError(
                f"the result, of type {type(result).__name__}, cannot be sent to the pytest process: {error}"
            ) from None

    def send_result(self, outcome: channel.Outcome) -> None:
        self.connection.send(outcome)

    def pause(self, message: channel.Paused) -> None:
        """Report a finished part of the call, and wait until the other ranks have finished it, too."""
        if _getpid() == self.pid:
            self.connection.send(message)
            self.connection.recv()

    def settle(self) -> channel.Outcome:
        """Wait for the devices, so that a kernel's error or an endless collective is reported for its own call."""
        assert self.outcome is not None
        try:
            self.devices.wait()
        except BaseException as error:
            self.error = error
            failure = failure_of(error)
            return dataclasses.replace(self.outcome, value=None, failure=failure, settled=True, reusable=False)
        return dataclasses.replace(self.outcome, settled=True)

    def restore(self) -> None:
        """Restore the state of a fresh rank, as far as a call may have changed it."""
        self.devices.restore()
        self.baseline.restore()

    def move(self, call_context: channel.CallContext) -> None:
        """Adopt the context of the pytest process, which a fixture may have changed."""
        call_context = call_context.over(self.own)
        sys.path[:] = call_context.path
        self.baseline.process.path = call_context.path
        self.baseline.environment = {**call_context.environment, **self.own_environment}
        self.baseline.directory = call_context.directory
        self.baseline.restore_context()

    def resolve(self, argument: object) -> object:
        if not isinstance(argument, channel.Placeholder):
            return argument
        if argument.name == "rank":
            return current_rank()
        return tuple(torch.device("cuda", i) for i in range(argument.count or self.spec.devices))

    def meet(self) -> channel.Rested:
        try:
            recorder.aside(dist.barrier)
            if self.nccl:
                # Each backend has its own order of operations, so each needs its own barrier.
                recorder.aside(lambda: dist.barrier(device_ids=[self.spec.device]))
        except Exception as error:
            return channel.Rested((f"an error in a barrier: {error}",))
        return channel.Rested(())

    def explain(self) -> str:
        if self.error is None:
            return ""
        try:
            with shortened(self.error):
                return clipped(str(getattr(self.error, EXPLAIN, lambda: "")()))
        except BaseException:
            return ""  # keep the plain traceback

    def end_test(self) -> channel.Rested:
        self.error = self.outcome = None
        self.functions.clear()
        try:
            gc.collect(1)  # so that warnings of finalizers belong to this test; older objects rarely have any
            for callback in _at_rest:
                callback()
            self.devices.give_back()
            self.baseline.restore_process()
            _write_stacks_to(self.stacks_fd)
            self.restore()
            self.variables = contextvars.copy_context()
            self.fresh = True
            left_behind = self.baseline.left_behind()
        except BaseException as error:  # a test may have replaced functions that this calls
            left_behind = (f"a state that cannot be put back: {_headline(error)}",)
        if recorder.total != self.entered:
            left_behind += ("operations of a process group that were begun after the function had returned",)
        return channel.Rested(left_behind, tuple(("stray", stray.plain) for stray in python_hooks.take()))


def _headline(error: BaseException) -> str:
    try:
        return failure_of(error).headline
    except BaseException:  # a test may have replaced functions that format errors
        return type(error).__name__


_UNDESCRIBED = ("", "undefined", "default_pg")
_wait: Callable[[channel.Paused], None] | None = None  # sends a `Paused` and waits for the answer
_operations_before: dict[str, int] = {}  # name of a group -> number of its operations at the start of the call


def pause(done: str, *, last: bool = False, slices: Iterable[tuple[str, tuple[int, ...]]] = ()) -> None:
    """Wait until all ranks of the world have done a part of the call and entered the same collectives.

    If the collectives differ, this does not return: the pytest process kills the ranks and reports the difference.
    `done`: the part, such as "step 1". `last`: whether this is the last part, so that every message must have been
    received.
    """
    if _wait is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    operations, described = [], []
    for group in _groups():
        named = group_of(group)
        if named is None:
            continue
        if recorder.alike(named):
            operations.append((named, _operations(group) - _operations_before.get(str(group.group_name), 0)))
        if (text := str(getattr(group, "group_desc", ""))) not in _UNDESCRIBED:
            described.append((named.name, text))
    _wait(
        channel.Paused(
            done, recorder.agreement(), recorder.flows(), last, tuple(operations), tuple(described), tuple(slices)
        )
    )


def _groups() -> list[Any]:
    if not dist.is_initialized():
        return []
    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]


def _operations(group: Any) -> int:
    return sum(map(number_of, backends_of(group)))
