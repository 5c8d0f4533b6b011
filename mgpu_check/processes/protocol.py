"""Messages between the pytest process and a rank.

Each message is one pickled object on a stream socket. Functions, arguments and results of users are pickled separately
and travel inside it as bytes. So a payload that cannot be loaded is an error of its call, never of the connection.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mgpu_check.processes.pickling import Pickled

SEED = 0  # the random seed of every call on every rank, so that failures repeat and no example depends on earlier ones


@dataclass(frozen=True)
class CallContext:
    """The context of a call in the pytest process: `sys.path`, directory, environment."""

    path: tuple[str, ...]
    directory: str
    # the variables; on several hosts only those that changed since the start
    environment: dict[str, str] = field(repr=False)
    # the variables removed since the start, on several hosts; None if `environment` is complete
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
    """The parameters of a new process that becomes a rank, or the node process."""

    index: int | None  # rank; None for the node process, which sees all devices of its host and is in no process group
    size: int
    local_index: int  # index of the rank on its host
    node_index: int  # index of its host in the world
    device: int  # index of the rank's own device among those that the process sees
    devices: int  # number of devices that the process sees
    simulate: str | None  # backing device of the simulated node, None on real devices
    backend: str | None  # of the default group, None for the default of `init_process_group()`
    store: str  # address of the rendezvous: ``file:///path``, or ``tcp://host:port/prefix``
    group_timeout: float  # seconds until a collective times out by itself; longer than any deadline of the parent
    threads: int  # number of threads of torch's CPU operators
    call_context: CallContext
    own_environment: dict[str, str]  # variables of this process that override those of the pytest process
    uuids: tuple[str, ...] = ()  # of the real devices that the process must see, in this order; empty to skip the check
    # whether the code under test makes the process group and chooses the device, and nothing is restored between its
    # calls
    bare: bool = False


@dataclass(frozen=True)
class Placeholder:
    """Represents, among the arguments of a call, a value that exists only in the process that runs the call."""

    name: Literal["rank", "gpus"]  # the value: the `Rank`, or a list of GPUs
    count: int | None = None  # number of GPUs, None for all


@dataclass(frozen=True)
class Call:
    """A request to run a function, answered by `Outcome`."""

    number: int  # identifies the call in its answer
    key: str  # identifies the function among those of a test
    function: bytes | None  # the pickled function; None if the process has it already under `key`
    arguments: bytes  # the pickled ``(args, kwargs)``
    keep: bool  # whether to keep the function, because it will be called again before the test ends
    call_context: CallContext | None  # None if it is that of the last call


@dataclass(frozen=True)
class RaisedInRank:
    """An exception in a rank, in a form that the parent can show."""

    # "error", or how pytest or Hypothesis abandons a test ("skip", "xfail") or an example ("reject")
    kind: Literal["error", "skip", "xfail", "reject"]
    type: str
    message: str  # the first line of its message, may be empty
    text: str  # the rendered traceback
    filename: str
    lineno: int
    pickled: bytes | None  # the exception itself, None if it cannot be pickled

    @property
    def headline(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class Group(NamedTuple):
    """A process group."""

    name: str  # its name on all its ranks, which distinguishes groups of the same ranks; empty for the default group
    ranks: tuple[int, ...]  # its global ranks in the order of the group, not necessarily ascending


ANY = -1  # in place of a peer: a receive from any source
COLLECTIVE = -1  # in place of a tag: the part of a collective
MANY = "many"  # in place of dtype and size: only the number of tensors is known


@dataclass(frozen=True)
class TensorRun:
    """Consecutive tensors of the same kind."""

    count: int
    content: str  # dtype and number of elements, such as "float32[8]"; or "objects"; or `MANY`
    name: str  # of the function of ``torch.distributed``
    # file, line: where the code under test called it
    file: str
    line: int


@dataclass(frozen=True)
class PeerTransfers:
    """The tensors that a rank has sent to one peer, or received from it, in one group and with one tag."""

    group: Group
    sent: bool  # True if sent, False if received
    peer: int  # rank of the peer; `ANY` for receives from any source
    tag: int  # of sends and receives; `COLLECTIVE` for the parts of collectives, which are counted separately
    runs: tuple[TensorRun, ...]  # the tensors in their order


@dataclass(frozen=True)
class Outcome:
    """The end of a call on one rank."""

    number: int
    value: Pickled | None  # the pickled result, None after a failure
    failure: RaisedInRank | None  # the exception, None after a result
    # the increases of the sequence numbers of the default group's backends during the call, and the number of groups
    # made. They are equal on all ranks if the ranks entered the same collectives, and equally many sends and receives.
    lockstep: tuple[int, ...]
    # for each group whose collectives it has entered: their number, and a checksum of their names, dtypes, sizes,
    # operations and roots
    agreement: tuple[tuple[Group, int, int], ...]
    # the messages that the function reported besides its result; see `worker.tell`
    messages: tuple[tuple[str, Any], ...] = ()
    # the tensors that it has sent to other ranks and received from them; see `lockstep`
    flows: tuple[PeerTransfers, ...] = ()
    # whether its devices have finished all queued work. If not, `RankRequest.SETTLE` asks for a new `Outcome`.
    settled: bool = True
    # whether another call can use its devices: no device has a sticky error, or work that may never end
    reusable: bool = True


@dataclass(frozen=True)
class Paused:
    """Sent during a call by a rank that has done a part of it and waits for the other ranks. Answered by `RESUME`."""

    done: str  # the part, such as "step 1"
    # agreement, flows: as in `Outcome`, since the start of the call
    agreement: tuple[tuple[Group, int, int], ...]
    flows: tuple[PeerTransfers, ...]
    last: bool  # whether it is the last part. Then no message may be in transit between ranks.
    # for each group whose backends count equally on all ranks: the operations counted since the start of the call,
    # including those called from C++
    operations: tuple[tuple[Group, int], ...] = ()
    described: tuple[tuple[str, str], ...] = ()  # name of a group -> the description that its maker gave
    # each tensor with a part on this rank, such as "gradient of 0.weight", with all ranks that must hold a part
    slices: tuple[tuple[str, tuple[int, ...]], ...] = ()


class RankRequest(enum.Enum):
    """What the pytest process asks of a rank, besides a `Call`."""

    RESUME = enum.auto()  # continue after `Paused`, because all ranks have made the same calls
    SETTLE = enum.auto()  # wait until the devices have done the last call's work; answered by the call's new `Outcome`
    # Return the fullest text of the last failure. It is not part of the failure, because it takes long to make, and
    # Hypothesis shows one of a hundred failures.
    EXPLAIN = enum.auto()
    MEET = enum.auto()  # enter a barrier with all other ranks; answered by `Rested`
    END_TEST = enum.auto()  # forget the functions of the test, and undo its changes; answered by `Rested`


@dataclass(frozen=True)
class Rested:
    """Answer to the requests `END_TEST` and `MEET`."""

    left_behind: tuple[str, ...]  # the changes that cannot be undone, in words. A rank with any must be replaced.
    messages: tuple[tuple[str, Any], ...] = ()  # the messages since the last call


@dataclass(frozen=True)
class Ready:
    """Sent by a new process once it is ready, or with the `failure` that kept it from starting."""

    failure: RaisedInRank | None = None
