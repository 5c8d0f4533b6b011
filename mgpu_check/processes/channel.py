"""Messages between the pytest process and a rank: pickled objects in frames, on a stream socket.

The rank's end blocks, because a rank has nothing else to do. The pytest process never blocks on one rank: a stopped one
reads nothing, and may have written half a message.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections import deque

__all__ = ["Channel", "Garbled", "RankEnd", "frame"]

_MAGIC = b"MGPU"
_HEADER = struct.Struct("!4sQ")
_CHUNK = 1 << 20
_AT_ONCE = 64 * _CHUNK  # then whoever waits looks at the clock, and at the others

# A message is in memory twice, as it came and as what it means. What says that it is longer was never one.
_LONGEST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Garbled(Exception):
    """A message that is none: somebody else has written to the socket."""


def frame(message: object) -> bytes:
    """Encode `message` as it is sent."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(_MAGIC, len(body)) + body


def _length(header: bytes | bytearray) -> int:
    magic, length = _HEADER.unpack_from(header)
    if magic != _MAGIC:
        raise Garbled(f"{bytes(header[:16])!r} is no message")
    if length > _LONGEST:
        raise Garbled(f"it is said to have {length} bytes, of which this machine can hold {_LONGEST}")
    return int(length)


class Channel:
    """The end of the pytest process."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setblocking(False)
        self._out: deque[memoryview] = deque()
        self._in = bytearray()

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
        end_of_turn = len(self._in) + _AT_ONCE
        while True:
            if len(self._in) >= _HEADER.size:
                end = _HEADER.size + _length(self._in)
                if len(self._in) >= end:
                    return self._take(end)
            if len(self._in) >= end_of_turn:
                return None
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return None
            if not data:
                raise EOFError("the other end is closed")
            self._in += data

    def _take(self, end: int) -> object:
        with memoryview(self._in) as view, view[_HEADER.size : end] as body:
            try:
                message: object = pickle.loads(body)
            except (Exception, SystemExit) as error:
                raise Garbled(f"it cannot be unpickled: {error}") from error
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
        self._socket.sendall(frame(message))

    def recv(self) -> object:
        """Wait for the next message.

        Raises:
            EOFError: the pytest process has closed its end.
        """
        length = _length(self._read(_HEADER.size))
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
