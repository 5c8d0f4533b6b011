"""Messages between the pytest process and a rank: pickled objects in frames, on a stream socket.

The rank's end blocks, because a rank has nothing else to do. The pytest process never blocks on one rank: a stopped one
reads nothing, and may have written half a message.

Large buffers of what a rank sends go before the message that they belong to, each in a frame of its own (pickle's
protocol 5, out of band): they are read from where they are, and written to where they stay.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
from collections import deque

__all__ = ["Channel", "Garbled", "RankEnd", "frame"]

_MAGIC, _BUFFER = b"MGPU", b"MGPB"
_HEADER = struct.Struct("!4sQ")
_CHUNK = 1 << 20
_AT_ONCE = 64 * _CHUNK  # then whoever waits looks at the clock, and at the others

# A message is in memory twice, as it came and as what it means. What says that it is longer was never one.
_LONGEST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Garbled(Exception):
    """A message that is none: somebody else has written to the socket."""


def frame(message: object) -> bytes:
    """Encode `message` as it is sent."""
    return _framed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def _framed(body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, len(body)) + body


def _header(header: bytes | bytearray) -> tuple[bytes, int]:
    """Return whether a message follows or a buffer, and how many bytes it has."""
    magic, length = _HEADER.unpack_from(header)
    if magic not in (_MAGIC, _BUFFER):
        raise Garbled(f"{bytes(header[:16])!r} is no message")
    if length > _LONGEST:
        raise Garbled(f"it is said to have {length} bytes, of which this machine can hold {_LONGEST}")
    return magic, int(length)


class Channel:
    """The end of the pytest process."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setblocking(False)
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._buffers: list[mmap.mmap] = []
        self._missing = memoryview(b"")

    def fileno(self) -> int:
        """Return the descriptor for `select` and its kin; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """True if `flush` is to be called as soon as the socket can be written to."""
        return bool(self._out)

    def send(self, framed: bytes) -> None:
        """Send what `frame` made, as much of it as the socket takes now.

        Raises:
            OSError: the other end is gone.
        """
        self._out.append(memoryview(framed))
        self.flush()

    def flush(self) -> None:
        """Send more, without waiting.

        Raises:
            OSError: the other end is gone.
        """
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
        """Return the next message, None as long as it is not complete, or more of it than a moment's work is there.

        Raises:
            EOFError: the other end is closed, and has left no complete message.
            OSError: the connection broke.
            Garbled: what came is no message.
        """
        left = _AT_ONCE
        while True:
            if not self._missing and len(self._in) >= _HEADER.size:
                kind, length = _header(self._in)
                end = _HEADER.size + length
                if kind == _BUFFER:
                    self._begin_buffer(length)
                    continue
                if len(self._in) >= end:
                    return self._take(end)
            if left <= 0:
                return None
            try:
                received = self._receive_some()
            except BlockingIOError:
                return None
            if not received:
                raise EOFError("the other end is closed")
            left -= received

    def _receive_some(self) -> int:
        if self._missing:
            received = self._socket.recv_into(self._missing)
            self._missing = self._missing[received:]
            return received
        data = self._socket.recv(_CHUNK)
        self._in += data
        return len(data)

    def _begin_buffer(self, length: int) -> None:
        """Make room for a buffer, and move there what of it has come with what was before it."""
        if not length or length + sum(map(len, self._buffers)) > _LONGEST:
            raise Garbled(f"a buffer of {length} bytes beside {len(self._buffers)} others is no part of a message")
        buffer = mmap.mmap(-1, length)  # its pages are made as they are written to
        come = self._in[_HEADER.size : _HEADER.size + length]
        buffer[: len(come)] = come
        del self._in[: _HEADER.size + len(come)]
        self._buffers.append(buffer)
        self._missing = memoryview(buffer)[len(come) :]

    def _take(self, end: int) -> object:
        buffers = iter(self._buffers)
        self._buffers = []
        with memoryview(self._in) as view, view[_HEADER.size : end] as body:
            try:
                message: object = pickle.loads(body, buffers=buffers)
            except (Exception, SystemExit) as error:
                raise Garbled(f"it cannot be unpickled: {error}") from error
        if next(buffers, None) is not None:
            raise Garbled("a buffer came before it that it has no use for")
        del self._in[:end]
        return message

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


class RankEnd:
    """The end of a rank."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)

    def send(self, message: object) -> None:
        """Send `message`, all of it."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        for buffer in buffers:
            with buffer.raw() as content:
                self._socket.sendall(_HEADER.pack(_BUFFER, content.nbytes))
                self._socket.sendall(content)
        self._socket.sendall(_framed(body))

    def recv(self) -> object:
        """Wait for the next message.

        Raises:
            EOFError: the pytest process has closed its end.
        """
        _, length = _header(self._read(_HEADER.size))
        message: object = pickle.loads(self._read(length))
        return message

    def close(self) -> None:
        """Let go of the socket."""
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
