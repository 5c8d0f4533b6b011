"""Exchange messages between agents and driver once they know each other: lines of JSON, never anything that can run.

From an agent: ``{"agent": {…}}`` first; then ``launched``, ``failed``, ``exit``, ``answer``, ``interrupt`` and
``leaving``. From the driver: ``launch``, ``call`` and ``end``. A further connection of an agent says ``{"launch": id}``
and belongs to the rank from then on.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

__all__ = ["LONGEST", "Lines", "line", "shut", "tune"]

LONGEST = 4 << 20
"""Bytes of a line at most: no stacks or output of a rank are longer."""

_IDLE, _INTERVAL, _PROBES = 15, 5, 4
_UNANSWERED_MS = 35_000


def tune(connection: socket.socket, control: bool) -> None:
    """Send at once, and notice when the other host is gone, though it cannot say so.

    Args:
        control: what is sent is short and read at once, so that data which nobody takes means the same. A rank may
            well be stopped for longer than that.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    if control:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def line(message: dict[str, Any]) -> bytes:
    """Encode `message` as it is sent."""
    return json.dumps(message).encode() + b"\n"


class Lines:
    """Messages out of what arrives in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what has arrived.

        Raises:
            ValueError: a line is too long.
        """
        self._data += data
        if len(self._data) > LONGEST and b"\n" not in self._data:
            raise ValueError(f"a line of more than {LONGEST} bytes")

    def next(self) -> dict[str, Any] | None:
        """Return the next message, None as long as there is none.

        Raises:
            ValueError: it is no JSON object.
        """
        end = self._data.find(b"\n")
        if end < 0:
            return None
        try:
            message = json.loads(self._data[:end])
        except RecursionError:
            raise ValueError("a line of brackets in brackets without end") from None
        del self._data[: end + 1]
        if not isinstance(message, dict):
            raise ValueError("a line that is no JSON object")
        return message


def shut(connection: socket.socket) -> None:
    """End a connection in both directions, whoever else holds it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
