"""Let agents find the driver, through the launcher's store or a store of the agent of rank 0.

torch's store has no authentication: any process that reaches its port can read and write it. So an entry is valid only
with a proof made from the key of the run, which is not in the store.
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

PREFIX = "mgpu-check"
"""Prefix of all keys in the store."""

_DRIVER, _END = "driver", "end"
_LONGEST = 1 << 16  # bytes of an entry: genuine entries have less than one thousand


@dataclass(frozen=True)
class Announced:
    """A driver that was announced in the store.

    Attributes:
        name: a random name, unique to this driver.
    """

    address: str
    port: int
    name: str
    key: Key


@dataclass(frozen=True)
class End:
    """The end of a driver.

    Attributes:
        code: exit code of the run, None if the driver ended without a result.
    """

    code: int | None


class Meeting:
    """The entries of the store that announce the driver and its end. Imports torch."""

    def __init__(self, launched: LaunchedProcess, timeout: float, key: Key | None) -> None:
        """Connect to the store. Rank 0 makes the store if the launcher has no store."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self._key = None if key is None else key.of_run(launched.identity)
        self._identity = launched.identity
        master = not launched.has_store and launched.rank == 0
        own = None
        if master and launched.port and is_loopback(launched.address):
            # By default the store would listen at all addresses of the machine.
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
        opened = None if self._key is not None else new_secret()
        key = self._key if opened is None else self._opened(opened)
        assert key is not None
        name = secrets.token_hex(16)
        self._say(_DRIVER, key, {"address": address, "port": port, "name": name}, opened)
        return Announced(address, port, name, key)

    def driver(self) -> Announced | None:
        """Return the driver that was announced last, None without an announcement."""
        found = self._read(_DRIVER)
        if found is None:
            return None
        said, proof, opened = found
        if (opened is None) == (self._key is None):
            raise Stranger(
                "was started without --trust-network, and this process with it"
                if self._key is None
                else "was started with --trust-network, and this process without it"
            )
        key = self._key or self._opened(opened or b"")
        told = _told(key, _DRIVER, said, proof)
        return Announced(told["address"], told["port"], told["name"], key)

    def claimed(self) -> tuple[str, int] | None:
        """Return the unauthenticated address of a driver with another key; None if the entry is invalid."""
        try:
            found = self._read(_DRIVER)
            told = json.loads(found[0]) if found is not None else {}
            return str(told["address"]), int(told["port"])
        except (Stranger, ValueError, LookupError, TypeError, RecursionError):
            return None

    def end(self, driver: Announced, code: int | None) -> None:
        """Note in the store that a driver has ended. With a `code` the run has ended, too."""
        self._say(_END, driver.key, {"name": driver.name, "code": code})

    def ended(self, driver: Announced) -> End | None:
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
        """Read an entry of the store: its text, its proof, and with --trust-network its key; None without an entry."""
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
            raise Stranger("was not announced by this version of mgpu-check") from error


def _told(key: Key, name: str, said: str, proof: bytes) -> dict[str, Any]:
    if not key.proves(proof, name.encode(), said.encode()):
        raise WrongKey("was announced with another key")
    told: dict[str, Any] = json.loads(said)  # safe: an owner of the key made it
    return told
