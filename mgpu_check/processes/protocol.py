"""Messages between the pytest process and a rank.

Each message is one pickled object on a stream socket. Functions, arguments and results of users are pickled separately
and travel inside it as bytes. So a payload that cannot be loaded is an error of its call, never of the connection.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mgpu_check.processes.pickling import Pickled

SEED = 0
"""The random seed of every call on every rank, so that failures repeat and no example depends on earlier ones."""


@dataclass(frozen=True)
class CallContext:
    """The context of a call in the pytest process: `sys.path`, directory, environment.

    Attributes:
        environment: the variables; on several hosts only those that changed since the start.
        removed: the variables removed since the start, on several hosts; None if `environment` is complete.
    """

    path: tuple[str, ...]
    directory: str
    environment: dict[str, str] = field(repr=False)
    removed: frozenset[str] | None = None

    def over(self, own: CallContext) -> CallContext:
        """Return the context for a process that had the context `own` when it started."""
        if self.removed is None:
            return self
        kept = {name: value for name, value in own.environment.items() if name not in self.removed}
        return CallContext(
            (*self.path, *(entry for entry in own.path if entry not in self.path)),
            self.directory if os.path.isdir(self.directory) else own.directory,
            {**kept, **self.environment},
        )


@dataclass(frozen=True)
class RankSpec:
    """The parameters of a new process that becomes a rank, or the node process.

    Attributes:
        index: rank; None for the node process, which sees all devices of its host and is in no process group.
        local_index: index of the rank on its host.
        node_index: index of its host in the world.
        device: index of the rank's own device among those that the process sees.
        devices: number of devices that the process sees.
        simulate: backing device of the simulated node, None on real devices.
        backend: of the default group, None for the default of `init_process_group()`.
        store: address of the rendezvous: ``file:///path``, or ``tcp://host:port/prefix``.
        group_timeout: seconds until a collective times out by itself; longer than any deadline of the parent.
        threads: number of threads of torch's CPU operators.
        own_environment: variables of this process that override those of the pytest process.
        uuids: of the real devices that the process must see, in this order; empty to skip the check.
        bare: whether the code under test makes the process group and chooses the device, and nothing is restored
            between its calls.
    """

    index: int | None
    size: int
    local_index: int
    node_index: int
    device: int
    devices: int
    simulate: str | None
    backend: str | None
    store: str
    group_timeout: float
    threads: int
    call_context: CallContext
    own_environment: dict[str, str]
    uuids: tuple[str, ...] = ()
    bare: bool = False


@dataclass(frozen=True)
class Placeholder:
    """Represents, among the arguments of a call, a value that exists only in the process that runs the call.

    Attributes:
        name: the value: the `Rank`, or a list of GPUs.
        count: number of GPUs, None for all.
    """

    name: Literal["rank", "gpus"]
    count: int | None = None


@dataclass(frozen=True)
class Call:
    """A request to run a function, answered by `Outcome`.

    Attributes:
        number: identifies the call in its answer.
        key: identifies the function among those of a test.
        function: the pickled function; None if the process has it already under `key`.
        arguments: the pickled ``(args, kwargs)``.
        keep: whether to keep the function, because it will be called again before the test ends.
        call_context: None if it is that of the last call.
    """

    number: int
    key: str
    function: bytes | None
    arguments: bytes
    keep: bool
    call_context: CallContext | None


@dataclass(frozen=True)
class RaisedInRank:
    """An exception in a rank, in a form that the parent can show.

    Attributes:
        kind: "error", or how pytest or Hypothesis abandons a test ("skip", "xfail") or an example ("reject").
        message: the first line of its message, may be empty.
        text: the rendered traceback.
        pickled: the exception itself, None if it cannot be pickled.
    """

    kind: Literal["error", "skip", "xfail", "reject"]
    type: str
    message: str
    text: str
    filename: str
    lineno: int
    pickled: bytes | None

    @property
    def headline(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class Group(NamedTuple):
    """A process group.

    Attributes:
        name: its name on all its ranks, which distinguishes groups of the same ranks; empty for the default group.
        ranks: its global ranks in the order of the group, not necessarily ascending.
    """

    name: str
    ranks: tuple[int, ...]


ANY = -1
"""In place of a peer: a receive from any source."""

COLLECTIVE = -1
"""In place of a tag: the part of a collective."""

MANY = "many"
"""In place of dtype and size: only the number of tensors is known."""


@dataclass(frozen=True)
class TensorRun:
    """Consecutive tensors of the same kind.

    Attributes:
        content: dtype and number of elements, such as "float32[8]"; or "objects"; or `MANY`.
        name: of the function of ``torch.distributed``.
        file, line: where the code under test called it.
    """

    count: int
    content: str
    name: str
    file: str
    line: int


@dataclass(frozen=True)
class PeerTransfers:
    """The tensors that a rank has sent to one peer, or received from it, in one group and with one tag.

    Attributes:
        sent: True if sent, False if received.
        peer: rank of the peer; `ANY` for receives from any source.
        tag: of sends and receives; `COLLECTIVE` for the parts of collectives, which are counted separately.
        runs: the tensors in their order.
    """

    group: Group
    sent: bool
    peer: int
    tag: int
    runs: tuple[TensorRun, ...]


@dataclass(frozen=True)
class Outcome:
    """The end of a call on one rank.

    Attributes:
        value: the pickled result, None after a failure.
        failure: the exception, None after a result.
        lockstep: the increases of the sequence numbers of the default group's backends during the call, and the number
            of groups made. They are equal on all ranks if the ranks entered the same collectives, and equally many
            sends and receives.
        agreement: for each group whose collectives it has entered: their number, and a checksum of their names, dtypes,
            sizes, operations and roots.
        messages: the messages that the function reported besides its result; see `worker.tell`.
        flows: the tensors that it has sent to other ranks and received from them; see `lockstep`.
        settled: whether its devices have finished all queued work. If not, `Settle` asks for a new `Outcome`.
        reusable: whether another call can use its devices: no device has a sticky error, or work that may never end.
    """

    number: int
    value: Pickled | None
    failure: RaisedInRank | None
    lockstep: tuple[int, ...]
    agreement: tuple[tuple[Group, int, int], ...]
    messages: tuple[tuple[str, Any], ...] = ()
    flows: tuple[PeerTransfers, ...] = ()
    settled: bool = True
    reusable: bool = True


@dataclass(frozen=True)
class Paused:
    """Sent during a call by a rank that has done a part of it and waits for the other ranks. Answered by `Resume`.

    Attributes:
        done: the part, such as "step 1".
        agreement, flows: as in `Outcome`, since the start of the call.
        last: whether it is the last part. Then no message may be in transit between ranks.
        operations: for each group whose backends count equally on all ranks: the operations counted since the start of
            the call, including those called from C++.
        described: name of a group -> the description that its maker gave.
        slices: each tensor with a part on this rank, such as "gradient of 0.weight", with all ranks that must hold a
            part.
    """

    done: str
    agreement: tuple[tuple[Group, int, int], ...]
    flows: tuple[PeerTransfers, ...]
    last: bool
    operations: tuple[tuple[Group, int], ...] = ()
    described: tuple[tuple[str, str], ...] = ()
    slices: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Resume:
    """A request to continue after `Paused`, because all ranks have made the same calls."""


@dataclass(frozen=True)
class Settle:
    """A request to wait until the devices have done the last call's work; answered by the call's new `Outcome`."""


@dataclass(frozen=True)
class Explain:
    """A request for the fullest text of the last failure; answered by the text.

    It is not part of the failure, because it takes long to make, and Hypothesis shows one of a hundred failures.
    """


@dataclass(frozen=True)
class Meet:
    """A request to enter a barrier with all other ranks; answered by `Rested`."""


@dataclass(frozen=True)
class EndTest:
    """A request to forget the functions of the test and undo its changes; answered by `Rested`."""


@dataclass(frozen=True)
class Rested:
    """Answer to `EndTest` and `Meet`.

    Attributes:
        left_behind: the changes that cannot be undone, in words. A rank with any must be replaced.
        messages: the messages since the last call.
    """

    left_behind: tuple[str, ...]
    messages: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Ready:
    """Sent by a new process once it is ready, or with the `failure` that kept it from starting."""

    failure: RaisedInRank | None = None
