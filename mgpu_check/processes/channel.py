"""The channel between the pytest process and a rank: pickled objects in frames, on a stream socket, and the clock of
its deadlines.

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
import mmap
import os
import pickle
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

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
    """The pytest process's end of a connection, which never blocks."""

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
    """The rank's end of a connection, which blocks."""

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
        """Wait for the next message."""
        _, length = _header(self._read(_HEADER.size))
        message: object = pickle.loads(self._read(length))
        return message

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
    """Return the descriptor of a new memfd with the contents."""
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
