"""Exchange messages between authenticated agents and the driver: lines of JSON, never pickles, which could run code.

An agent first sends ``{"agent": {…}}``, then ``launched``, ``failed``, ``exit``, ``answer``, ``interrupt`` and
``leaving``. The driver sends ``launch``, ``call`` and ``end``. Each further connection of an agent sends ``{"launch":
id}``, and belongs to the new rank from then on.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

LONGEST = 4 << 20
"""Maximum bytes of a line. The stacks and the kept output of a rank are shorter."""

_IDLE, _INTERVAL, _PROBES = 15, 5, 4  # seconds, seconds, count: a lost host is detected after 35 s
_UNANSWERED_MS = 35_000  # the same time for unacknowledged data


def tune(connection: socket.socket, control: bool) -> None:
    """Disable send delays, and detect when the other host has disappeared without closing the connection.

    Args:
        control: whether the peer reads at once, so that unacknowledged data means a lost host, too. A rank may be
            stopped for longer than that timeout.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    if control:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Lines:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._data += data
        if len(self._data) > LONGEST and b"\n" not in self._data:
            raise ValueError(f"a line of more than {LONGEST} bytes")

    def next(self) -> dict[str, Any] | None:
        end = self._data.find(b"\n")
        if end < 0:
            return None
        try:
            message = json.loads(self._data[:end])
        except RecursionError:
            raise ValueError("a line with too deeply nested brackets") from None
        del self._data[: end + 1]
        if not isinstance(message, dict):
            raise ValueError("a line that is not a JSON object")
        return message


def shut(connection: socket.socket) -> None:
    """Shut down a connection in both directions, even if other processes hold it, too."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
