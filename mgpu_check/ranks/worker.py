"""The main loop of a rank, and of the node process. Depends on nothing of pytest or Hypothesis."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import sys
import traceback
import types
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.ranks import protocol, transport
from mgpu_check.ranks.rank import Rank, become, current_rank
from mgpu_check.ranks.state import Baseline, groups_made, sequence_number
from mgpu_check.ranks.worker_signal import STACKS_SIGNAL

__all__ = ["EXPLAIN", "main", "without_engine"]

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_ENGINE = {__file__, os.path.join(_PACKAGE, "in_rank.py"), os.path.join(_PACKAGE, "shipping.py")}

EXPLAIN = "_mgpu_check_explain"
"""Attribute by which a wrapper around a call gives an exception a function that makes a better text of its traceback."""


def main(connection_fd: int, stacks_fd: int) -> int:
    """Be the rank that the first message describes, until told to stop. Returns the exit code."""
    connection = Connection(connection_fd)
    # A signal handler in C writes the stacks: a Python one does not run while the main thread waits in a collective.
    faulthandler.enable(file=stacks_fd, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True, chain=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # they are text files here
    try:
        spec: protocol.RankSpec = connection.recv()
        worker = Worker(connection, spec)
        connection.send(protocol.Ready())
    except EOFError:
        return 0
    except BaseException as error:
        connection.send(protocol.Ready(_failure(error)))
        return 1
    worker.loop()
    return 0


class Worker:
    """One process of the pool."""

    def __init__(self, connection: Connection, spec: protocol.RankSpec) -> None:
        self.connection = connection
        self.spec = spec
        self.functions: dict[str, Any] = {}
        self.error: BaseException | None = None
        surroundings = spec.surroundings
        os.environ.clear()
        os.environ.update({**surroundings.environment, **spec.own_environment})
        os.chdir(surroundings.directory)
        sys.path[:] = surroundings.path
        torch.set_num_threads(spec.threads)
        if spec.simulate is not None:
            from mgpu_check.node.simulated import simulated_node

            self.node = simulated_node(spec.devices, spec.simulate)  # kept, because its end would end the simulation
            self.node.__enter__()
        if spec.index is not None:
            self.join(spec.index)
        self.baseline = Baseline.take(spec.index)

    def join(self, index: int) -> None:
        spec = self.spec
        torch.cuda.set_device(index)
        dist.init_process_group(
            backend=spec.backend,
            store=dist.FileStore(spec.store, spec.size),  # type: ignore[attr-defined]  # not in its __all__
            rank=index,
            world_size=spec.size,
            timeout=datetime.timedelta(seconds=spec.group_timeout),
        )
        become(Rank(index, spec.size, index, 0, torch.device("cuda", index)))

    def loop(self) -> None:
        while True:
            try:
                message = self.connection.recv()
            except EOFError:
                return
            if isinstance(message, protocol.Call):
                self.connection.send(self.call(message))
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
        before = sequence_number()
        try:
            if call.surroundings is not None:
                self.move(call.surroundings)
            self.baseline.restore()
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
        except BaseException as error:
            failure = _failure(error)
            self.error = error
        with contextlib.suppress(ValueError):  # the test has closed them
            sys.stdout.flush()
            sys.stderr.flush()
        return protocol.Outcome(call.number, value, failure, (sequence_number() - before, groups_made()))

    def move(self, surroundings: protocol.Surroundings) -> None:
        """Take over what has changed around the pytest process: a fixture may have set a variable."""
        sys.path[:] = surroundings.path
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
            dist.barrier()
        except Exception as error:
            return protocol.Rested((f"an error in a barrier: {error}",))
        return protocol.Rested(())

    def explain(self) -> str:
        if self.error is None:
            return ""
        try:
            return str(getattr(self.error, EXPLAIN, lambda: "")())
        except Exception:
            return ""  # the plain traceback stands

    def end_test(self) -> protocol.Rested:
        self.error = None
        self.functions.clear()
        self.baseline.restore_process()
        self.baseline.restore()
        return protocol.Rested(self.baseline.dirt(groups=int(self.spec.index is not None)))


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
    except Exception as broken:
        return f"<str() of it raised {type(broken).__name__}>"


def _failure(error: BaseException) -> protocol.Failure:
    origin = traceback.extract_tb(error.__traceback__)
    last = origin[-1] if origin else None
    message = _message(error)
    return protocol.Failure(
        kind=_kind(error),
        headline=f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__,
        text=_render(error),
        filename=last.filename if last else "",
        lineno=(last.lineno or 1) if last else 1,
        pickled=_pickled(error),
    )


def _render(error: BaseException) -> str:
    """The traceback from the first frame that is not the engine's."""
    tb = without_engine(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, tb)).rstrip()


def without_engine(tb: types.TracebackType | None) -> types.TracebackType | None:
    """`tb` from the first frame on that is not of the engine, or of what is put around a function that is sent."""
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename in _ENGINE:
        tb = tb.tb_next
    return tb


def _pickled(error: BaseException) -> bytes | None:
    explanation = getattr(error, "__dict__", {}).pop(EXPLAIN, None)
    try:
        return transport.dumps(error)
    except Exception:
        return None
    finally:
        if explanation is not None:
            setattr(error, EXPLAIN, explanation)
