"""Accept connections, and admit only processes that prove that they have the key of this run."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from mgpu_check.engine.remote.credentials import Key, Stranger, WrongKey, endpoint, verify
from mgpu_check.engine.remote.lines import LONGEST, Lines

_MOST = 64  # pending connections, so that strangers cannot use up the file descriptors
_TIMEOUT = 20.0  # seconds to authenticate
_TIMEOUT_IF_FULL = 2.0  # while others wait: an agent answers at once, and a stranger must not keep agents out


@dataclass
class _Guest:
    """A connection that is not admitted yet.

    Attributes:
        proof: the pending authentication, None once it has succeeded.
        wanted: bytes of the peer's proof.
        came: when it was accepted.
        data: the bytes received so far.
    """

    connection: socket.socket
    address: str
    proof: Generator[tuple[bytes, int], bytes, bytes] | None
    wanted: int
    came: float
    data: bytes = b""


class Listener:
    """Accepts and authenticates connections, and hands over the authenticated ones with their first line.

    Nothing here blocks. From an unauthenticated peer it reads no more bytes than a proof has.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        selector: selectors.BaseSelector,
        admit: Callable[[socket.socket, dict[str, Any]], None],
        refuse: Callable[[str], None],
    ) -> None:
        """Register with `selector`, whose owner must call the data of each ready key.

        Args:
            admit: takes over a connection and its first message; raises `LookupError`, `TypeError` or `ValueError` if
                the message is invalid.
            refuse: receives the address of a peer with another key.
        """
        listener.setblocking(False)
        self._listener = listener
        self._key = key
        self._selector = selector
        self._admit = admit
        self._refuse = refuse
        self._guests: list[_Guest] = []
        self._accepting = False
        self._accept_or_wait()

    def _accept_or_wait(self) -> None:
        """Let further peers wait in the queue of the socket while as many as there may be are examined."""
        if self._accepting != (len(self._guests) < _MOST):
            self._accepting = not self._accepting
            if self._accepting:
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            else:
                self._selector.unregister(self._listener)

    def send_away_the_late(self) -> None:
        """Close the connections that were not admitted in time."""
        latest = time.monotonic() - (_TIMEOUT if self._accepting else _TIMEOUT_IF_FULL)
        for guest in [one for one in self._guests if one.came < latest]:
            self._send_away(guest)

    def close(self) -> None:
        for guest in list(self._guests):
            self._send_away(guest)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        proof = verify(self._key, endpoint(connection.getsockname()))
        greeting, wanted = next(proof)
        guest = _Guest(connection, str(peer[0]), proof, wanted, time.monotonic())
        self._guests.append(guest)
        self._accept_or_wait()
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._examine(guest))
        with contextlib.suppress(OSError):
            connection.send(greeting)

    def _release(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.connection)
        self._accept_or_wait()

    def _send_away(self, guest: _Guest) -> None:
        self._release(guest)
        guest.connection.close()

    def _examine(self, guest: _Guest) -> None:
        """Read from a guest: exactly its proof, then one line."""
        if guest not in self._guests:
            return  # an earlier event of the same round has closed it
        try:
            data = guest.connection.recv(guest.wanted - len(guest.data) if guest.proof else LONGEST)
            if not data:
                raise Stranger("it has closed the connection")
            guest.data += data
            if guest.proof is None:
                lines = Lines()
                lines.feed(guest.data)
                message = lines.next()
            elif len(guest.data) == guest.wanted:
                try:
                    guest.proof.send(guest.data)
                except StopIteration as proven:
                    guest.connection.send(proven.value)
                guest.proof, guest.data, message = None, b"", None
            else:
                return
        except BlockingIOError:
            return
        except (Stranger, OSError, ValueError) as error:
            if isinstance(error, WrongKey):
                self._refuse(guest.address)
            self._send_away(guest)
            return
        if message is not None:
            self._release(guest)
            try:
                self._admit(guest.connection, message)
            except (LookupError, TypeError, ValueError):
                guest.connection.close()
