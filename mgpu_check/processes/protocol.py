"""Messages between the pytest process and a rank.

Each message is one pickled object on a stream socket. What users wrote (functions, arguments, results) travels inside as
bytes that only the receiving user code needs to be able to load, so that a bad payload is an error of that call and
never of the connection.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mgpu_check.processes.pickling import Pickled

__all__ = [
    "ANY",
    "COLLECTIVE",
    "MANY",
    "SEED",
    "Call",
    "CallContext",
    "EndTest",
    "Explain",
    "Failure",
    "Flow",
    "Group",
    "Meet",
    "Outcome",
    "Paused",
    "Placeholder",
    "RankSpec",
    "Ready",
    "Rested",
    "Resume",
    "Run",
    "Settle",
]

SEED = 0
"""Every call starts from this seed, on every rank: a failure repeats, and an example does not depend on those before."""


@dataclass(frozen=True)
class CallContext:
    """The context of a call in the pytest process: `sys.path`, directory, environment.

    Attributes:
        removed: None where `environment` is all of it. Beyond one machine, a process keeps what it has from its own
            host, but for these variables, and those in `environment`.
    """

    path: tuple[str, ...]
    directory: str
    environment: dict[str, str] = field(repr=False)
    removed: frozenset[str] | None = None

    def over(self, own: CallContext) -> CallContext:
        """Return these surroundings, in a process that had its `own` when it started."""
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
    """All that a new process needs to become a rank, or the node process.

    Attributes:
        index: rank; None for the node process, which sees all devices of its host and is in no process group.
        local_index: rank among those of this host.
        node_index: index of this host among those of the world.
        device: index of the rank's own device, as the process sees it.
        devices: how many devices the process sees.
        simulate: backing device of the simulated node, None on real devices.
        backend: of the default group, None for what `init_process_group()` takes by itself.
        store: address of the rendezvous: ``file:///path``, or ``tcp://host:port/prefix``.
        own_environment: variables that this process has, whatever those of the pytest process are.
        uuids: of the real devices that the process must see, in this order; empty where that is not looked at.
        group_timeout: seconds until a collective gives up by itself; above any deadline of the parent.
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


@dataclass(frozen=True)
class Placeholder:
    """Stands, among the arguments of a call, for a value that exists only in the process that runs it.

    Attributes:
        count: of GPUs, None for all.
        order: the GPUs themselves, by index, where they are not the first ones in order.
    """

    name: Literal["rank", "gpus"]
    count: int | None = None
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """Run a function.

    Attributes:
        function: None where the process was sent it before under the same key.
        keep: it will be called again before the test ends.
        call_context: None where they are those of the last call.
    """

    number: int
    key: str
    function: bytes | None
    arguments: bytes
    keep: bool
    call_context: CallContext | None


@dataclass(frozen=True)
class Failure:
    """An exception in a rank, as the parent can show it.

    Attributes:
        kind: all but "error" are the outcomes by which pytest and Hypothesis abandon a test or an example.
        type: name of its class.
        message: the first line of what it says; empty where it says nothing.
        text: the rendered traceback.
        filename, lineno: where it was raised.
        pickled: the exception itself, None where it cannot be pickled.
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
        """Type and message, in one line."""
        return f"{self.type}: {self.message}" if self.message else self.type


class Group(NamedTuple):
    """A process group.

    Attributes:
        name: what it is called on all its ranks, because there may be several of the same ranks; empty for the default one.
        ranks: ascending or not, as it was made.
    """

    name: str
    ranks: tuple[int, ...]


ANY = -1
"""In place of a peer: a receive from whoever sends."""

COLLECTIVE = -1
"""In place of a tag: the part of a collective."""

MANY = "many"
"""In place of dtype and size: tensors of which only the number is known."""


@dataclass(frozen=True)
class Run:
    """Tensors that followed each other, all alike.

    Attributes:
        what: dtype and number of elements, such as "float32[8]"; or "objects"; or `MANY`.
        name: of the function of ``torch.distributed``.
        file, line: where the code under test called it.
    """

    count: int
    what: str
    name: str
    file: str
    line: int


@dataclass(frozen=True)
class Flow:
    """Data that a rank has given one peer, or taken from it, in one group and under one tag.

    Attributes:
        given: else taken.
        peer: its rank; `ANY` for receives from whoever sends.
        tag: of sends and receives; those of collectives are counted apart, under `COLLECTIVE`.
    """

    group: Group
    given: bool
    peer: int
    tag: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Outcome:
    """The end of a call on one rank.

    Attributes:
        value: the pickled result.
        lockstep: what the call added to the sequence numbers of the default group's backends, and groups made. Equal on
            all ranks, if they entered the same collectives and as many sends and receives.
        agreement: for each group in which it has entered collectives: how many, and a checksum
            of their names, dtypes, sizes, operations and roots.
        told: what the function said besides its result; see `worker.tell`.
        flows: what it has given other ranks, and taken from them; see `balance`.
        settled: its devices have done all that was queued; else `Settle` is to be sent, and answered by the same again.
        reusable: its devices can be used by another call: none has an error that sticks, or work that may never end.
    """

    number: int
    value: Pickled | None
    failure: Failure | None
    lockstep: tuple[int, ...]
    agreement: tuple[tuple[Group, int, int], ...]
    told: tuple[tuple[str, Any], ...] = ()
    flows: tuple[Flow, ...] = ()
    settled: bool = True
    reusable: bool = True


@dataclass(frozen=True)
class Paused:
    """In the middle of a call: this rank has done a part of it, and waits until all ranks have. Answered by `Resume`.

    Attributes:
        done: the part, such as "step 1".
        agreement, flows: as in `Outcome`, since the call began.
        last: it is the last part, so that nothing may be on its way between ranks.
        operations: for each group whose backends count alike on all ranks: what they have counted since the call began,
            which includes what C++ has called.
        described: by name of a group, what its maker has called it.
        held: what this rank holds, such as "gradient of 0.weight", with the ranks that must all hold it.
    """

    done: str
    agreement: tuple[tuple[Group, int, int], ...]
    flows: tuple[Flow, ...]
    last: bool
    operations: tuple[tuple[Group, int], ...] = ()
    described: tuple[tuple[str, str], ...] = ()
    held: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Resume:
    """Go on after `Paused`: all ranks have made the same calls."""


@dataclass(frozen=True)
class Settle:
    """Wait until the devices have done what the last call queued; answered by its `Outcome` anew."""


@dataclass(frozen=True)
class Explain:
    """Give the last failure a text as good as can be; answered by that text.

    Apart from the failure itself, because good texts take long, and Hypothesis looks at one of a hundred failures.
    """


@dataclass(frozen=True)
class Meet:
    """Enter a barrier with all other ranks; answered by `Rested`."""


@dataclass(frozen=True)
class EndTest:
    """Forget the functions of the test and undo what it left behind."""


@dataclass(frozen=True)
class Rested:
    """Answer to `EndTest` and `Meet`.

    Attributes:
        left_behind: names what cannot be undone; who has any is to be replaced.
        told: what there was to say since the last call.
    """

    left_behind: tuple[str, ...]
    told: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Ready:
    """The process is up; or `failure` says why not."""

    failure: Failure | None = None
