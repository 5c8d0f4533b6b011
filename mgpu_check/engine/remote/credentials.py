"""Authenticate two processes of a run to each other, before either believes a word: both prove that they have its key.

Everything here has a fixed size and is compared as bytes; nothing that a stranger sends is parsed. The key itself is never
sent. What is shown holds for one connection only: it covers fresh random numbers of both sides, the run, and the address
at which the driver listens, so that who stands in between and hands on what both say is no further.

The challenge of `multiprocessing.connection` would not do: its listener waits for each stranger in turn, without a deadline,
so that one who says nothing keeps all agents out. Its proofs cover neither the run nor the address, and are HMAC-MD5 up to
Python 3.11.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass, field

__all__ = ["Key", "Stranger", "WrongKey", "endpoint", "new_secret", "present", "verify"]

_GREETING = b"mgpu-check/2\n"
_NONCE = 32
_PROOF = hashlib.sha256().digest_size


class Stranger(Exception):
    """The other end does not have the key of this run, or is no process of ours at all."""


class WrongKey(Stranger):
    """The peer follows our protocol, but has another key."""


@dataclass(frozen=True)
class Key:
    """The secret that all processes of a run know, and nobody else.

    Attributes:
        source: where it comes from, in words.
    """

    secret: bytes = field(repr=False)
    source: str

    def of_run(self, run: str) -> Key:
        """Return the key for one run only: a proof by it means nothing in another run of the same user."""
        return Key(self.proof(b"run", run.encode()), self.source)

    def proof(self, what: bytes, *parts: bytes) -> bytes:
        """Prove that who has the key says `parts`, and means `what`."""
        said = b"".join(len(part).to_bytes(8, "big") + part for part in (what, *parts))
        return hmac.digest(self.secret, said, "sha256")

    def proves(self, proof: bytes, what: bytes, *parts: bytes) -> bool:
        """Return whether `proof` is that of one who has the key."""
        return hmac.compare_digest(proof, self.proof(what, *parts))


def new_secret() -> bytes:
    """Make a key that nobody has yet."""
    return secrets.token_bytes(32)


def endpoint(address: object) -> bytes:
    """Return a socket's own address, or that of its peer, in one spelling for both ends."""
    if not isinstance(address, tuple):
        return b""  # of a socket that has none
    number = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None:
        number = number.ipv4_mapped
    return f"{number} {address[1]}".encode()


def verify(key: Key, listens_at: bytes) -> Generator[tuple[bytes, int], bytes, bytes]:
    """Prove on the side that listens, as a generator, so that one thread can listen to many.

    Yields what is to be sent, and how many bytes the answer has; returns what is to be sent in the end.

    Args:
        listens_at: `endpoint` of the connection's own address.

    Raises:
        WrongKey: the other end does not have the key.
    """
    mine = secrets.token_bytes(_NONCE)
    answer = yield _GREETING + mine, _NONCE + _PROOF
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not key.proves(proof, b"connects", listens_at, mine, theirs):
        raise WrongKey("it has another key")
    return key.proof(b"listens", listens_at, theirs, mine)


def present(connection: socket.socket, key: Key, timeout: float) -> None:
    """Prove on the side that connects.

    Raises:
        Stranger: the other end does not have the key.
        OSError: it does not answer in time, or has closed the connection.
    """
    deadline = time.monotonic() + timeout
    listens_at = endpoint(connection.getpeername())
    greeting = _read(connection, len(_GREETING) + _NONCE, deadline)
    if greeting[: len(_GREETING)] != _GREETING:
        raise Stranger("it is no driver of this version of mgpu-check")
    theirs = greeting[len(_GREETING) :]
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(mine + key.proof(b"connects", listens_at, theirs, mine))
    if not key.proves(_read(connection, _PROOF, deadline), b"listens", listens_at, mine, theirs):
        raise WrongKey("it has another key")


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Read exactly `count` bytes: what follows is for somebody else."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(count - len(data))
        if not received:
            raise ConnectionResetError("the driver has closed the connection")
        data += received
    return data
