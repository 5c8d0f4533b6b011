"""Accept connections from anybody, and let in only agents of this run."""

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

__all__ = ["Listener"]

_MOST = 64
_TIMEOUT = 20.0


@dataclass
class _Guest:
    """A connection of which it is not known yet who it is.

    Attributes:
        address: from which it comes.
        proof: what it still has to show, None once it has.
        wanted: bytes that the proof has.
    """

    connection: socket.socket
    address: str
    proof: Generator[tuple[bytes, int], bytes, bytes] | None
    wanted: int
    deadline: float
    data: bytes = b""


class Listener:
    """Accepts connections, has them show the key, and hands over those that have it, with the first line they say.

    Nothing here blocks, and nothing that comes without the key is read further than a proof is long.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        selector: selectors.BaseSelector,
        admit: Callable[[socket.socket, dict[str, Any]], None],
        refuse: Callable[[str], None],
    ) -> None:
        """Listen as soon as somebody waits with `selector`, and call the data of what is ready.

        Args:
            admit: takes over a connection; raises `LookupError`, `TypeError` or `ValueError` if what it says makes no
                sense.
            refuse: told the address of one that has another key.
        """
        listener.setblocking(False)
        self._listener = listener
        self._key = key
        self._selector = selector
        self._admit = admit
        self._refuse = refuse
        self._guests: list[_Guest] = []
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def send_away_the_late(self) -> None:
        """Let go of those that have not shown the key in time."""
        now = time.monotonic()
        for guest in [one for one in self._guests if one.deadline < now]:
            self._send_away(guest)

    def close(self) -> None:
        """Let nobody in any more."""
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
        if len(self._guests) >= _MOST:
            self._send_away(self._guests[0])
        proof = verify(self._key, endpoint(connection.getsockname()))
        greeting, wanted = next(proof)
        guest = _Guest(connection, str(peer[0]), proof, wanted, time.monotonic() + _TIMEOUT)
        self._guests.append(guest)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._examine(guest))
        with contextlib.suppress(OSError):
            connection.send(greeting)

    def _release(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.connection)

    def _send_away(self, guest: _Guest) -> None:
        self._release(guest)
        guest.connection.close()

    def _examine(self, guest: _Guest) -> None:
        """Take what a guest says: exactly its proof, then one line."""
        if guest not in self._guests:
            return  # sent away by what was ready before it
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
