"""How two processes of a run make sure of each other, before either believes a word: both show that they have its key.

Everything here has a fixed size and is compared as bytes; nothing that a stranger sends is parsed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Generator

__all__ = ["Stranger", "new_key", "present", "verify"]

_GREETING = b"mgpu-check/1\n"
_NONCE = 32
_PROOF = hashlib.sha256().digest_size


class Stranger(Exception):
    """The other end does not have the key of this run, or is no process of ours at all."""


def new_key() -> bytes:
    """A key for one run."""
    return secrets.token_bytes(32)


def _proof(key: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, who + b"\0" + b"".join(nonces), "sha256")


def verify(key: bytes) -> Generator[tuple[bytes, int], bytes, bytes]:
    """The side that listens, as a generator, so that one thread can listen to many.

    Yields what is to be sent, and how many bytes the answer has; returns what is to be sent in the end.

    Raises:
        Stranger: the other end does not have the key.
    """
    mine = secrets.token_bytes(_NONCE)
    answer = yield _GREETING + mine, _NONCE + _PROOF
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(key, b"connects", mine, theirs)):
        raise Stranger("a wrong key")
    return _proof(key, b"listens", theirs, mine)


def present(connection: socket.socket, key: bytes, timeout: float) -> None:
    """The side that connects.

    Raises:
        Stranger: the other end does not have the key.
        OSError: it does not answer in time, or has closed the connection.
    """
    deadline = time.monotonic() + timeout
    greeting = _read(connection, len(_GREETING) + _NONCE, deadline)
    if greeting[: len(_GREETING)] != _GREETING:
        raise Stranger("it is no driver of this version of mgpu-check")
    theirs = greeting[len(_GREETING) :]
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(mine + _proof(key, b"connects", theirs, mine))
    if not hmac.compare_digest(_read(connection, _PROOF, deadline), _proof(key, b"listens", mine, theirs)):
        raise Stranger("a wrong key")


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes: what follows is for somebody else."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(count - len(data))
        if not received:
            raise ConnectionResetError("the driver has closed the connection")
        data += received
    return data
