"""How agents find the driver: through the store of the launcher, or one that the agent of rank 0 has."""

from __future__ import annotations

import datetime
import json
import socket
from typing import TYPE_CHECKING, Any

from mgpu_check.ranks.agents.variables import Place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["PREFIX", "Meeting", "listener_for"]

PREFIX = "mgpu-check"
"""Of all keys in the store."""

_DRIVER, _CODE = "driver", "exit code"


class Meeting:
    """The place in the store where the driver is announced, and how the run has ended. Imports torch."""

    def __init__(self, place: Place, timeout: float) -> None:
        """Connect to the store; rank 0 makes it where the launcher has none.

        Raises:
            RuntimeError: it cannot be reached, or its port is taken.
        """
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self._store: Store = PrefixStore(
            PREFIX,
            TCPStore(
                place.address,
                place.port,
                is_master=not place.has_store and place.rank == 0,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=timeout),
            ),
        )

    def announce(self, port: int, key: bytes) -> None:
        """Say on which port of this host the driver listens, and by what key it knows its agents."""
        self._store.set(_DRIVER, json.dumps({"port": port, "key": key.hex()}))

    def driver(self) -> tuple[int, bytes] | None:
        """The port of the driver that was announced last, and its key; None if none was."""
        if not self._store.check([_DRIVER]):
            return None
        told: dict[str, Any] = json.loads(self._store.get(_DRIVER))
        return told["port"], bytes.fromhex(told["key"])

    def end(self, code: int) -> None:
        """Note that the run is over."""
        self._store.set(_CODE, str(code))

    def ended(self) -> int | None:
        """The exit code of the run, None as long as it is not over."""
        return int(self._store.get(_CODE)) if self._store.check([_CODE]) else None


def listener_for(address: str) -> socket.socket:
    """A socket that agents can connect to as they do to `address`, on a port that is free."""
    try:
        # Of a name it is not known by which interface the others reach it; of a number it is.
        family, _, _, _, numeric = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[
            0
        ]
        return socket.create_server(numeric[:2], family=family, backlog=1024)
    except OSError:
        pass
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)
