"""Let agents find the driver: through the store of the launcher, or one that the agent of rank 0 has.

Whoever reaches the port of that store can read and write it: torch guards it with nothing. So what stands there is
believed only if it was made with the key of the run, which does not stand there.
"""

from __future__ import annotations

import datetime
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu_check.engine.remote.addresses import is_loopback, listen_at
from mgpu_check.engine.remote.credentials import Key, Stranger, WrongKey, new_secret
from mgpu_check.engine.remote.variables import LaunchedProcess

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["PREFIX", "Announced", "End", "Meeting"]

PREFIX = "mgpu-check"
"""Of all keys in the store."""

_DRIVER, _END = "driver", "end"
_LONGEST = 1 << 16


@dataclass(frozen=True)
class Announced:
    """A driver.

    Attributes:
        name: tells it from all others.
        key: that of the run.
    """

    address: str
    port: int
    name: str
    key: Key


@dataclass(frozen=True)
class End:
    """The way in which a driver has ended.

    Attributes:
        code: exit code of the run, None where the driver has ended without a word.
    """

    code: int | None


class Meeting:
    """The place in the store where the driver is announced, and how it has ended. Imports torch."""

    def __init__(self, launched: LaunchedProcess, timeout: float, key: Key | None) -> None:
        """Connect to the store; rank 0 makes it where the launcher has none.

        Args:
            key: of the user; None where the network is trusted, and the key stands in the store.

        Raises:
            RuntimeError, OSError: it cannot be reached, or its port is taken.
        """
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self._key = None if key is None else key.of_run(launched.identity)
        self._identity = launched.identity
        master = not launched.has_store and launched.rank == 0
        own = None
        if master and launched.port and is_loopback(launched.address):
            # By itself the store listens at all addresses of the machine.
            own = listen_at(launched.address, launched.port).detach()
        self._store: Store = PrefixStore(
            PREFIX,
            TCPStore(
                launched.address,
                launched.port,
                is_master=master,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=timeout),
                master_listen_fd=own,
            ),
        )

    def announce(self, address: str, port: int) -> Announced:
        """Say where the driver listens."""
        opened = None if self._key is not None else new_secret()
        key = self._key if opened is None else self._opened(opened)
        assert key is not None
        name = secrets.token_hex(16)
        self._say(_DRIVER, key, {"address": address, "port": port, "name": name}, opened)
        return Announced(address, port, name, key)

    def driver(self) -> Announced | None:
        """Return the driver that was announced last, None if none was.

        Raises:
            WrongKey: it was announced by one who has another key.
            Stranger: by no process of this version of mgpu-check, or by one that has, or wants, no key file.
        """
        found = self._read(_DRIVER)
        if found is None:
            return None
        said, proof, opened = found
        if (opened is None) == (self._key is None):
            raise Stranger(
                "is of a run without --trust-network, which this process was started with"
                if self._key is None
                else "is of a run with --trust-network, which this process was started without"
            )
        key = self._key or self._opened(opened or b"")
        told = _told(key, _DRIVER, said, proof)
        return Announced(told["address"], told["port"], told["name"], key)

    def claimed(self) -> tuple[str, int] | None:
        """Return the address that a driver with another key claims. Nobody has proven it."""
        try:
            found = self._read(_DRIVER)
            told = json.loads(found[0]) if found is not None else {}
            return str(told["address"]), int(told["port"])
        except (Stranger, ValueError, LookupError, TypeError, RecursionError):
            return None

    def end(self, driver: Announced, code: int | None) -> None:
        """Note that a driver has ended, and with it, if there is a code, the run."""
        self._say(_END, driver.key, {"name": driver.name, "code": code})

    def ended(self, driver: Announced) -> End | None:
        """Return how `driver` has ended, None as long as it has not."""
        try:
            found = self._read(_END)
            if found is None:
                return None
            told = _told(driver.key, _END, *found[:2])
        except Stranger:
            return None
        return End(told["code"]) if told["name"] == driver.name else None

    def _opened(self, secret: bytes) -> Key:
        return Key(secret, "the store, where everybody can read it").of_run(self._identity)

    def _say(self, name: str, key: Key, told: dict[str, Any], opened: bytes | None = None) -> None:
        said = json.dumps(told)
        value = {"said": said, "proof": key.proof(name.encode(), said.encode()).hex()}
        self._store.set(name, json.dumps(value if opened is None else {**value, "key": opened.hex()}))

    def _read(self, name: str) -> tuple[str, bytes, bytes | None] | None:
        """Read what stands in the store, its proof, and the key if that stands there, too."""
        if not self._store.check([name]):
            return None
        text = self._store.get(name)
        try:
            if len(text) > _LONGEST:
                raise ValueError(f"{len(text)} bytes")
            value = json.loads(text)
            opened = value.get("key")
            return str(value["said"]), bytes.fromhex(value["proof"]), None if opened is None else bytes.fromhex(opened)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Stranger("was announced by no process of this version of mgpu-check") from error


def _told(key: Key, name: str, said: str, proof: bytes) -> dict[str, Any]:
    if not key.proves(proof, name.encode(), said.encode()):
        raise WrongKey("was announced by one who has another key")
    told: dict[str, Any] = json.loads(said)  # made by one who has the key
    return told
