"""The channel between the pytest process and a rank: its messages, pickled in frames on a stream socket, and the clock
of its deadlines.

Each message is one pickled object. Functions, arguments and results of users are pickled separately and travel inside
it as bytes. So a payload that cannot be loaded is an error of its call, never of the connection.

The rank's end blocks, because a rank has nothing else to do. The pytest process never blocks on one rank, because
a halted rank reads nothing, and may have written half a message.

A rank sends the large buffers of a message before the message, each in its own frame (pickle protocol 5, out of
band), which avoids copies at both ends. Buffers of many megabytes from a rank on this machine travel as one memfd,
which the pytest process maps, which takes half the time.

The clock is one that tests cannot stop: freezegun and time-machine replace functions such as `time.monotonic` in
every module that holds them. This clock is held by a class, and reads CLOCK_MONOTONIC through
`time.clock_gettime`, which these tools do not replace for that clock.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import pickle
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
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


_LONGEST = 1e6  # seconds: poll takes its milliseconds as a 32-bit integer


class Clock:
    _get: Callable[[int], float] = staticmethod(time.clock_gettime)
    _sleep: Callable[[float], None] = staticmethod(time.sleep)
    _which = time.CLOCK_MONOTONIC

    @classmethod
    def now(cls) -> float:
        return cls._get(cls._which)

    @classmethod
    def until(cls, deadline: float) -> float:
        """Return the seconds until `deadline`, a time of `now`; 0 if it has passed, and at most `_LONGEST`."""
        return min(_LONGEST, max(0.0, deadline - cls.now()))

    @classmethod
    def sleep(cls, seconds: float) -> None:
        cls._sleep(seconds)


def ready(files: Sequence[int], deadline: float) -> list[int]:
    """Wait until `deadline` for a file that is readable or closed at its other end, and return all such files."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(Clock.until(deadline) * 1000)]


_MAGIC, _BUFFER, _FILE = b"MGPU", b"MGPB", b"MGPF"
_HEADER = struct.Struct("!4sQ")
_LENGTH = struct.Struct("!Q")  # of each buffer in a file
_ALIGNED = 64  # bytes: alignment of each buffer in a file, sufficient for every dtype
_LEAST_FILE = 16 << 20  # bytes: for smaller messages a file is not worth a descriptor for the life of its contents
_CHUNK = 1 << 20  # bytes per recv
_AT_ONCE = 64 * _CHUNK  # bytes per `receive`, so that its caller can check the deadline and serve other ranks

# A message is in memory twice, pickled and unpickled, so a longer one cannot be genuine.
_LONGEST_FRAME = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Garbled(Exception):
    """The received bytes are not a valid message: other code has written to the socket."""


def frame(message: object) -> bytes:
    return _framed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def _framed(body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, len(body)) + body


def _header(header: bytes | bytearray) -> tuple[bytes, int]:
    """Return the kind of a frame (message, buffer, or lengths of the buffers in a file), and its number of bytes."""
    magic, length = _HEADER.unpack_from(header)
    if magic not in (_MAGIC, _BUFFER, _FILE):
        raise Garbled(f"{bytes(header[:16])!r} is not a message")
    if length > _LONGEST_FRAME:
        raise Garbled(f"its header announces {length} bytes, but this machine can hold at most {_LONGEST_FRAME}")
    return magic, int(length)


class Channel:
    """The pytest process's end of a connection, which never blocks.

    A launcher makes one for each process, and `Process.close` closes it. The world sends and receives through it.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setblocking(False)
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._files: deque[int] = deque()
        self._buffers: list[mmap.mmap | memoryview] = []
        self._missing = memoryview(b"")

    def fileno(self) -> int:
        """Return the file descriptor for selectors; -1 once the channel is closed."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """True if `flush` must be called once the socket is writable."""
        return bool(self._out)

    def send(self, framed: bytes) -> None:
        """Send bytes from `frame`, as far as the socket accepts them now."""
        self._out.append(memoryview(framed))
        self.flush()

    def flush(self) -> None:
        """Send more of the unsent bytes without blocking."""
        while self._out:
            head = self._out[0]
            try:
                sent = self._socket.send(head)
            except BlockingIOError:
                return
            if sent == len(head):
                self._out.popleft()
            else:
                self._out[0] = head[sent:]

    def receive(self) -> object | None:
        """Return the next message; None until it is complete, or after a large part, so that the caller may work."""
        remaining = _AT_ONCE
        while True:
            if not self._missing and len(self._in) >= _HEADER.size:
                frame_type, length = _header(self._in)
                end = _HEADER.size + length
                if frame_type == _BUFFER:
                    self._begin_buffer(length)
                    continue
                if len(self._in) >= end and frame_type == _FILE:
                    self._map_file(end)
                    continue
                if len(self._in) >= end:
                    return self._take(end)
            if remaining <= 0:
                return None
            try:
                received = self._receive_some()
            except BlockingIOError:
                return None
            if not received:
                raise EOFError("the other end is closed")
            remaining -= received

    def _receive_some(self) -> int:
        if self._missing:
            received = self._socket.recv_into(self._missing)
            self._missing = self._missing[received:]
            return received
        data, files, flags, _ = socket.recv_fds(self._socket, _CHUNK, 1)
        self._in += data
        self._files += files
        if flags & socket.MSG_CTRUNC:
            raise Garbled(
                "it came with a file, but this process can open no more files; raise its limit with ulimit -n"
            )
        return len(data)

    def _begin_buffer(self, length: int) -> None:
        """Allocate a buffer, and move the bytes of it that have already arrived there."""
        if not length or length + sum(map(len, self._buffers)) > _LONGEST_FRAME:
            raise Garbled(f"a buffer of {length} bytes beside {len(self._buffers)} others is not part of a message")
        buffer = mmap.mmap(-1, length)  # memory is committed only as data arrives
        come = self._in[_HEADER.size : _HEADER.size + length]
        buffer[: len(come)] = come
        del self._in[: _HEADER.size + len(come)]
        self._buffers.append(buffer)
        self._missing = memoryview(buffer)[len(come) :]

    def _map_file(self, end: int) -> None:
        """Map the file that came with a frame of lengths, and add its buffers."""
        lengths = bytes(self._in[_HEADER.size : end])
        if not self._files or not lengths or len(lengths) % _LENGTH.size:
            raise Garbled(f"{len(lengths)} bytes of lengths and {len(self._files)} files are not part of a message")
        places, total = _places([length for (length,) in _LENGTH.iter_unpack(lengths)])
        file = self._files.popleft()
        try:
            if os.fstat(file).st_size != total or not 0 < total <= _LONGEST_FRAME:
                raise Garbled(f"a file has {os.fstat(file).st_size} bytes, and its buffers {total}")
            content = memoryview(mmap.mmap(file, total, flags=mmap.MAP_SHARED))
        except OSError as error:  # out of descriptors or address space
            raise Garbled(f"a file of {total} bytes cannot be mapped: {error}") from error
        finally:
            os.close(file)
        self._buffers += [content[span] for span in places]
        del self._in[:end]

    def _take(self, end: int) -> object:
        buffers = iter(self._buffers)
        self._buffers = []
        with memoryview(self._in) as view, view[_HEADER.size : end] as body:
            try:
                message: object = pickle.loads(body, buffers=buffers)
            except (Exception, SystemExit) as error:
                raise Garbled(f"it cannot be unpickled: {error}") from error
        if next(buffers, None) is not None:
            raise Garbled("it came with a buffer that it does not use")
        del self._in[:end]
        return message

    def close(self) -> None:
        self._socket.close()
        while self._files:
            os.close(self._files.pop())


class RankEnd:
    """The rank's end of a connection, which blocks: `worker.main` makes it, and it lives as long as the rank."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)

    def send(self, message: object) -> None:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        with contextlib.ExitStack() as released:
            contents = [released.enter_context(buffer.raw()) for buffer in buffers]
            if contents and not self._send_file(contents):
                for content in contents:
                    self._socket.sendall(_HEADER.pack(_BUFFER, content.nbytes))
                    self._socket.sendall(content)
        self._socket.sendall(_framed(body))

    def _send_file(self, contents: Sequence[memoryview]) -> bool:
        """Send buffers as one memfd; return False if they are too small for it, or the file cannot be made or sent."""
        size = sum(content.nbytes for content in contents)
        if size < _LEAST_FILE or self._socket.family != socket.AF_UNIX:
            return False
        if not hasattr(os, "memfd_create"):  # a Python built for glibc before 2.27, as conda's and uv's may be
            return False
        try:
            file = _file_of(contents)
        except OSError:  # a limit on the size of files, or a sandbox
            return False
        lengths = b"".join(_LENGTH.pack(content.nbytes) for content in contents)
        framed = _HEADER.pack(_FILE, len(lengths)) + lengths
        try:
            sent = socket.send_fds(self._socket, [framed], [file])
        except OSError:  # a sandbox blocks files; or the peer is gone, which the next send reports
            return False
        finally:
            os.close(file)
        self._socket.sendall(framed[sent:])
        return True

    def recv(self) -> object:
        _, length = _header(self._read(_HEADER.size))
        return pickle.loads(self._read(length))

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise EOFError("the other end is closed")
            view = view[received:]
        return data


def _places(lengths: Sequence[int]) -> tuple[list[slice], int]:
    """Return the places of buffers of these lengths in a file, and the size of the file."""
    places, total = [], 0
    for length in lengths:
        places.append(slice(total, total + length))
        total += -(-length // _ALIGNED) * _ALIGNED
    return places, total


def _file_of(contents: Sequence[memoryview]) -> int:
    places, total = _places([content.nbytes for content in contents])
    file = os.memfd_create("mgpu-check")
    try:
        os.ftruncate(file, total)
        for content, span in zip(contents, places, strict=True):
            written = 0
            while written < content.nbytes:
                written += os.pwrite(file, content[written:], span.start + written)
    except BaseException:
        os.close(file)
        raise
    return file
