"""Authenticate two processes of a run to each other: both prove that they have the key before they exchange messages.

All messages have a fixed size and are compared as bytes. No data of an unauthenticated peer is parsed. The key itself
is never sent. A proof holds for one connection only: it covers fresh random numbers of both sides, the run, and the
driver's address. An attacker in the middle who relays the messages therefore gains nothing.

The challenge of `multiprocessing.connection` is not enough: its listener waits for each peer in turn, without a
deadline, so a silent peer keeps all agents out. Its proofs cover neither the run nor the address, and use HMAC-MD5 up
to Python 3.11.
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

_GREETING = b"mgpu-check/2\n"
_NONCE = 32  # random bytes, enough to never repeat
_PROOF = hashlib.sha256().digest_size


class Stranger(Exception):
    """The peer does not have the key of this run, or does not follow the protocol."""


class WrongKey(Stranger):
    """The peer follows the protocol, but has another key."""


@dataclass(frozen=True)
class Key:
    """The secret that only the processes of a run know.

    Attributes:
        source: where the secret was found, in words.
    """

    secret: bytes = field(repr=False)
    source: str

    def of_run(self, run: str) -> Key:
        """Derive the key of one run. Its proofs are not valid in other runs of the same user."""
        return Key(self.proof(b"run", run.encode()), self.source)

    def proof(self, what: bytes, *parts: bytes) -> bytes:
        """Return the proof that an owner of the key sent `parts` for the purpose `what`."""
        said = b"".join(len(part).to_bytes(8, "big") + part for part in (what, *parts))
        return hmac.digest(self.secret, said, "sha256")

    def proves(self, proof: bytes, what: bytes, *parts: bytes) -> bool:
        """Return whether an owner of the key made `proof`."""
        return hmac.compare_digest(proof, self.proof(what, *parts))


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def endpoint(address: object) -> bytes:
    """Return the address of a socket, or of its peer, in a form that is equal on both ends."""
    if not isinstance(address, tuple):
        return b""  # the socket has no address
    number = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None:
        number = number.ipv4_mapped
    return f"{number} {address[1]}".encode()


def verify(key: Key, listens_at: bytes) -> Generator[tuple[bytes, int], bytes, bytes]:
    """Authenticate on the listening side, as a generator, so that one thread can serve many connections.

    Yields the bytes to send and the size of the expected answer; returns the last bytes to send.

    Args:
        key: of the run.
        listens_at: `endpoint` of the connection's own address.

    Raises:
        WrongKey: the peer does not have the key.
    """
    mine = secrets.token_bytes(_NONCE)
    answer = yield _GREETING + mine, _NONCE + _PROOF
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not key.proves(proof, b"connects", listens_at, mine, theirs):
        raise WrongKey("it has another key")
    return key.proof(b"listens", listens_at, theirs, mine)


def present(connection: socket.socket, key: Key, timeout: float) -> None:
    """Authenticate on the connecting side."""
    deadline = time.monotonic() + timeout
    listens_at = endpoint(connection.getpeername())
    greeting = _read(connection, len(_GREETING) + _NONCE, deadline)
    if greeting[: len(_GREETING)] != _GREETING:
        raise Stranger("it is not a driver of this version of mgpu-check")
    theirs = greeting[len(_GREETING) :]
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(mine + key.proof(b"connects", listens_at, theirs, mine))
    if not key.proves(_read(connection, _PROOF, deadline), b"listens", listens_at, mine, theirs):
        raise WrongKey("it has another key")


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Read exactly `count` bytes, and leave later data for the next reader."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(count - len(data))
        if not received:
            raise ConnectionResetError("the driver has closed the connection")
        data += received
    return data
