"""Framed messages on a socket: nothing blocks the pytest process, and nothing but messages is unpickled."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from mgpu_check.processes.channel import Channel, Garbled, RankEnd, frame


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        yield channel, theirs
    channel.close()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_large_buffers_go_as_a_file(ends):
    channel, theirs = ends
    rank = RankEnd(theirs.detach())
    before = _open_files()
    content = [bytearray(os.urandom(300_000)), bytearray(os.urandom(1)), bytearray(bytes(16 << 20) + b"last")]
    rank.send([*map(pickle.PickleBuffer, content), 7])
    rank.send("next")
    *got, seven = channel.receive()
    assert [bytes(one) for one in got] == content and seven == 7 and channel.receive() == "next"
    got[0][0] ^= 1  # it is writable, as what was sent
    assert bytes(got[0]) != content[0] and bytes(got[1]) == content[1]
    assert _open_files() == before + 1
    del got
    assert _open_files() == before, "nothing is kept of what nobody uses"
    rank.close()


def _refuses(*args: object) -> int:
    raise OSError("no files here")


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [(os, "memfd_create", _refuses), (os, "memfd_create", None), (socket, "send_fds", _refuses)],
    ids=["refused", "unknown to this Python", "not let through"],
)
def test_buffers_go_through_the_socket_where_no_file_can_be_sent(ends, monkeypatch, owner, name, instead):
    channel, theirs = ends
    rank = RankEnd(theirs.detach())
    before = _open_files()
    if instead is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, instead)
    large = bytes(16 << 20)
    sender = threading.Thread(target=rank.send, args=([pickle.PickleBuffer(large), 7],))
    sender.start()
    while (message := channel.receive()) is None:
        select.select([channel], [], [])
    sender.join()
    assert bytes(message[0]) == large and message[1] == 7
    assert _open_files() == before
    rank.close()


@contextlib.contextmanager
def _room_for_files(count: int) -> Iterator[None]:
    """Let this process open the given number of files more."""
    free = [os.dup(0) for _ in range(count + 1)]
    for file in free:
        os.close(file)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("room", "words"), [(0, "ulimit -n"), (1, "cannot be mapped: .*Too many open files")])
def test_a_file_for_which_there_is_no_descriptor_is_told_of(ends, room, words):
    channel, theirs = ends
    rank = RankEnd(theirs.detach())
    rank.send([pickle.PickleBuffer(bytes(16 << 20))])
    before = _open_files()
    with _room_for_files(room), pytest.raises(Garbled, match=words):
        channel.receive()
    assert _open_files() == before
    rank.close()


@pytest.mark.parametrize(
    ("lengths", "size"),
    [((4,), None), ((), 64), ((1 << 62,), 64), ((4,), 63), ((0,), 0)],
    ids=["no file", "no lengths", "beyond all memory", "cut off", "empty"],
)
def test_files_that_are_not_what_is_said_are_no_message(ends, lengths, size):
    channel, theirs = ends
    body = b"".join(length.to_bytes(8, "big") for length in lengths)
    files = [] if size is None else [os.memfd_create("planted")]
    before = _open_files() - len(files)
    for file in files:
        os.ftruncate(file, size)
    socket.send_fds(theirs, [b"MGPF" + len(body).to_bytes(8, "big") + body], files)
    for file in files:
        os.close(file)
    with pytest.raises(Garbled):
        channel.receive()
    channel.close()
    assert _open_files() == before - 1  # the end of the channel itself


@pytest.mark.parametrize("at_once", [7, 100_000])
def test_large_buffers_go_apart(ends, at_once):
    channel, theirs = ends
    source, other = socket.socketpair()
    content = [bytearray(os.urandom(300_000)), bytearray(os.urandom(1))]
    rank = RankEnd(source.detach())

    def send():
        rank.send((pickle.PickleBuffer(content[0]), 7, pickle.PickleBuffer(content[1])))
        rank.send("next")

    sender = threading.Thread(target=send)
    sender.start()
    raw = bytearray()
    other.settimeout(60)
    while not raw.endswith(frame("next")):
        raw += other.recv(1 << 20)
    sender.join()
    rank.close()
    other.close()
    assert content[0] in raw and raw.count(content[0]) == 1
    got: list[Any] = []
    while raw:
        theirs.sendall(raw[:at_once])
        del raw[:at_once]
        while (message := channel.receive()) is not None:
            got.append(message)
    (first, seven, last), following = got
    assert [bytes(first), seven, bytes(last), following] == [content[0], 7, content[1], "next"]
    first[0] = 1  # it is writable, as what was sent


def test_arrays_and_gates_tensors_arrive_as_they_were(pool):
    def body(rank):
        from mgpu_check.diagnosis.observations import Parcel

        large = torch.arange(1_000_000, dtype=torch.float32).reshape(1000, 1000) + rank.index
        array = numpy.arange(500_000).reshape(2, -1)
        return (
            Parcel({"large": large.t(), "small": torch.ones(3), "again": large}),
            array,
            array.T,
            array[:, ::2],
            b"x" * 300_000,
        )

    for index, (tensors, array, turned, gaps, data) in enumerate(pool.run(body)):
        large = torch.arange(1_000_000, dtype=torch.float32).reshape(1000, 1000) + index
        assert torch.equal(tensors["large"], large.t()) and torch.equal(tensors["again"], large)
        assert torch.equal(tensors["small"], torch.ones(3)) and data == b"x" * 300_000
        assert array.flat[-1] == 499_999 and (turned == array.T).all() and (gaps == array[:, ::2]).all()
        tensors["large"].add_(1)
        array += 1  # what arrives can be written to


def test_a_length_beyond_all_memory_is_no_message_for_a_rank(ends):
    channel, theirs = ends
    other = RankEnd(theirs.detach())
    channel.send(b"MGPU" + (1 << 60).to_bytes(8, "big"))
    with pytest.raises(Garbled):  # before room is made for it
        other.recv()
    other.close()


class Flood:
    """A socket with endless data."""

    def __init__(self, first: bytes) -> None:
        self.next = first
        self.given = 0

    def setblocking(self, flag: bool) -> None:
        pass

    def recvmsg(self, count: int, ancillary: int) -> tuple[bytes, list[object], int, None]:
        data, self.next = (self.next + bytes(count))[:count], b""
        self.given += count
        return data, [], 0, None


def test_a_message_without_end_lets_the_clock_be_looked_at():
    flood = Flood(b"MGPU" + (1 << 28).to_bytes(8, "big"))
    channel = Channel(flood)  # type: ignore[arg-type]
    assert channel.receive() is None and 0 < flood.given < 1 << 27
    first = flood.given
    assert channel.receive() is None and flood.given <= 2 * first + (1 << 20)


def test_the_end_of_the_other_side(ends):
    channel, theirs = ends
    theirs.sendall(frame("last"))
    theirs.close()
    assert channel.receive() == "last"
    with pytest.raises(EOFError):
        channel.receive()


def header(kind: bytes, length: int) -> bytes:
    return kind + length.to_bytes(8, "big")


WANTS_A_BUFFER = pickle.dumps(pickle.PickleBuffer(b"x"), protocol=5, buffer_callback=lambda buffer: None)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"hello, I am no message", None),
        (header(b"MGPU", 3) + b"abc", None),
        (header(b"MGPU", 1 << 60), "its header announces 1152921504606846976 bytes"),
        (header(b"MGPU", len(WANTS_A_BUFFER)) + WANTS_A_BUFFER, "it cannot be unpickled"),
        (header(b"MGPB", 4) + b"abcd" + frame("message"), "a buffer that it does not use"),
        (header(b"MGPB", 0), None),
        (header(b"MGPB", 1 << 60), None),
        (header(b"MGPB", (1 << 62) // 1000) * 2, None),  # beyond all memory together
    ],
)
def test_what_is_no_message(ends, data, words):
    channel, theirs = ends
    theirs.sendall(data)
    with pytest.raises(Garbled, match=words):
        channel.receive()


def test_sending_more_than_the_socket_takes(ends):
    channel, theirs = ends
    big = b"x" * 10_000_000
    channel.send(frame(big))
    assert channel.unsent
    theirs.setblocking(False)
    received = bytearray()
    while channel.unsent:
        channel.flush()
        try:
            while data := theirs.recv(1 << 20):
                received += data
        except BlockingIOError:
            pass
    assert bytes(received) == frame(big)


def test_the_end_of_a_rank_takes_what_was_sent():
    ours, theirs = socket.socketpair()
    rank, channel = RankEnd(theirs.detach()), Channel(ours)
    channel.send(frame({"a": 1}))
    assert rank.recv() == {"a": 1}
    rank.send("answer")
    assert channel.receive() == "answer"
    channel.close()
    with pytest.raises(EOFError):
        rank.recv()
    rank._socket.close()
