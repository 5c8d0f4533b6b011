"""Messages between the pytest process and a rank: pickled objects in frames, on a stream socket.

The rank's end blocks, because a rank has nothing else to do. The pytest process never blocks on one rank: a stopped one
reads nothing, and may have written half a message.

Large buffers of what a rank sends go before the message that they belong to, each in a frame of its own (pickle's
protocol 5, out of band): they are read from where they are, and written to where they stay. Where they are many megabytes,
and the rank is on this machine, they go as one file in memory, which the pytest process maps: that takes half the time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence

__all__ = ["Channel", "Garbled", "RankEnd", "frame"]

_MAGIC, _BUFFER, _FILE = b"MGPU", b"MGPB", b"MGPF"
_HEADER = struct.Struct("!4sQ")
_LENGTH = struct.Struct("!Q")  # of each buffer in a file
_ALIGNED = 64  # bytes, where each of them begins: more than any dtype asks for
_LEAST_FILE = 16 << 20  # bytes, because each takes a descriptor as long as what came in it is in use
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
    """Return what follows, a message, a buffer, or the lengths of those in a file, and how many bytes it has."""
    magic, length = _HEADER.unpack_from(header)
    if magic not in (_MAGIC, _BUFFER, _FILE):
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
        self._files: deque[int] = deque()
        self._buffers: list[mmap.mmap | memoryview] = []
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
                if len(self._in) >= end and kind == _FILE:
                    self._map_file(end)
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
        data, files, flags, _ = socket.recv_fds(self._socket, _CHUNK, 1)
        self._in += data
        self._files += files
        if flags & socket.MSG_CTRUNC:
            raise Garbled("a file came with it, and this process can open no more; raise its limit with ulimit -n")
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

    def _map_file(self, end: int) -> None:
        """Have the buffers of the file that came with their lengths."""
        lengths = bytes(self._in[_HEADER.size : end])
        if not self._files or not lengths or len(lengths) % _LENGTH.size:
            raise Garbled(f"{len(lengths)} bytes of lengths and {len(self._files)} files are no part of a message")
        places, total = _places([length for (length,) in _LENGTH.iter_unpack(lengths)])
        file = self._files.popleft()
        try:
            if os.fstat(file).st_size != total or not 0 < total <= _LONGEST:
                raise Garbled(f"a file has {os.fstat(file).st_size} bytes, and its buffers {total}")
            content = memoryview(mmap.mmap(file, total, flags=mmap.MAP_SHARED))
        except OSError as error:  # no descriptor, or no address space, is left
            raise Garbled(f"a file of {total} bytes cannot be mapped: {error}") from error
        finally:
            os.close(file)
        self._buffers += [content[place] for place in places]
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
            raise Garbled("a buffer came before it that it has no use for")
        del self._in[:end]
        return message

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()
        while self._files:
            os.close(self._files.pop())


class RankEnd:
    """The end of a rank."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)

    def send(self, message: object) -> None:
        """Send `message`, all of it."""
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
        """Send buffers as one file in memory; False where that is not worth while, or none can be made or sent."""
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
        except OSError:  # a sandbox lets no files through; or nobody receives, as the next to send will find
            return False
        finally:
            os.close(file)
        self._socket.sendall(framed[sent:])
        return True

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


def _places(lengths: Sequence[int]) -> tuple[list[slice], int]:
    """Return where buffers of these lengths are in a file, and the bytes of the file."""
    places, total = [], 0
    for length in lengths:
        places.append(slice(total, total + length))
        total += -(-length // _ALIGNED) * _ALIGNED
    return places, total


def _file_of(contents: Sequence[memoryview]) -> int:
    """Return the descriptor of a new file in memory that holds them."""
    places, total = _places([content.nbytes for content in contents])
    file = os.memfd_create("mgpu-check")
    try:
        os.ftruncate(file, total)
        for content, place in zip(contents, places, strict=True):
            written = 0
            while written < content.nbytes:
                written += os.pwrite(file, content[written:], place.start + written)
    except BaseException:
        os.close(file)
        raise
    return file
