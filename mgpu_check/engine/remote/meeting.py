"""Let agents find the driver: the narrowest address for its listener that all processes of the run can reach, and its
announcement in the launcher's store or a store of the agent of rank 0.

torch's store has no authentication: any process that reaches its port can read and write it. So an entry is valid
only with a proof made from the key of the run, which is not in the store.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_check.engine.remote.credentials import Key, Stranger, WrongKey, new_secret
from mgpu_check.engine.remote.launched_process import LaunchedProcess

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_BACKLOG = 1024
_LOOPBACKS = ("127.0.0.1", "::1")
_LOCAL_NAMES = re.compile(r"localhost6?(\.localdomain6?)?|.*\.localhost", re.IGNORECASE)


def words_of_parent() -> list[str]:
    """Return the command line of the parent process; empty if it cannot be read."""
    try:
        text = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in text.removesuffix(b"\0").split(b"\0")]


def rendezvous_of(words: Sequence[str], endpoint: str = "") -> str:
    """Return the host of torchrun's rendezvous, from its command line or else from `endpoint`; may be empty."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--rdzv-endpoint", "--rdzv_endpoint"):
            endpoint = value if equals else "".join(words[index + 1 : index + 2])
    if _number(endpoint) is not None:
        return endpoint
    return endpoint.rpartition(":")[0].strip("[]") or endpoint


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or name. The machine's own name never counts as one."""
    number = _number(host)
    return bool(_LOCAL_NAMES.fullmatch(host)) if number is None else number.is_loopback


def listener_for(launched: LaunchedProcess, rendezvous: str = "") -> tuple[socket.socket, str]:
    """Open a socket for the driver on a free port; return the socket and the address that all agents can reach.
    `rendezvous`: the host of the launcher's own rendezvous; empty if unknown."""
    if launched.alone or is_loopback(launched.address) or is_loopback(rendezvous):
        addresses = [host for host in (launched.address, rendezvous) if _number(host) is not None and is_loopback(host)]
        for host in (*addresses, *_LOOPBACKS):
            with contextlib.suppress(OSError):
                return listen_at(host), host
    for host in (*_numbers_of(launched.address), *_nearest_to(launched.address)):
        with contextlib.suppress(OSError):
            # A scoped IPv6 address means nothing on other hosts, so they get the name that the launcher gave.
            return listen_at(host), launched.address if "%" in host else host
    # The machine's name resolves to a loopback address here, so listen at all addresses: the reachable one is unknown.
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
        ), launched.address
    return socket.create_server(("", 0), backlog=_BACKLOG), launched.address


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def listen_at(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket at this address of the machine."""
    family, socket_type, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket_type)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # reuse a port in TIME_WAIT
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _numbers_of(host: str) -> list[str]:
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return []
    return [host for host in dict.fromkeys(addresses) if not is_loopback(host)]


def _nearest_to(host: str) -> list[str]:
    """Return this machine's address on the route to the remote `host`, in a list; [] if there is no such address."""
    with contextlib.suppress(OSError):
        family, socket_type, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket_type) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
            return [] if is_loopback(own) else [own]
    return []


PREFIX = "mgpu-check"  # prefix of all keys in the store

_DRIVER, _END = "driver", "end"
_LONGEST = 1 << 16  # bytes of an entry: genuine entries have less than one thousand


@dataclass(frozen=True)
class Announced:
    """A driver that was announced in the store."""

    address: str
    port: int
    name: str  # a random name, unique to this driver
    key: Key


@dataclass(frozen=True)
class End:
    """The end of a driver."""

    code: int | None  # exit code of the run, None if the driver ended without a result


class Meeting:
    """The entries of the store that announce the driver and its end. Imports torch.
    Each agent makes one before it has a driver. Rank 0 makes the store, too, if the launcher has none; that store ends
    with its agent."""

    def __init__(self, launched: LaunchedProcess, timeout: float, key: Key | None) -> None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self._key = None if key is None else key.of_run(launched.identity)
        self._identity = launched.identity
        master = not launched.has_store and launched.rank == 0
        own = None
        if master and launched.port and is_loopback(launched.address):
            # The store would listen at all addresses of the machine, whatever its host is (pytorch/pytorch#173909).
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
        entry = self._read(_DRIVER)
        if entry is None:
            return None
        message, proof, opened = entry
        if (opened is None) == (self._key is None):
            raise Stranger(
                "was started without --trust-network, and this process with it"
                if self._key is None
                else "was started with --trust-network, and this process without it"
            )
        key = self._key or self._opened(opened or b"")
        announcement = _told(key, _DRIVER, message, proof)
        return Announced(announcement["address"], announcement["port"], announcement["name"], key)

    def claimed(self) -> tuple[str, int] | None:
        """Return the unauthenticated address of a driver with another key; None if the entry is invalid."""
        try:
            entry = self._read(_DRIVER)
            announcement = json.loads(entry[0]) if entry is not None else {}
            return str(announcement["address"]), int(announcement["port"])
        except (Stranger, ValueError, LookupError, TypeError, RecursionError):
            return None

    def end(self, driver: Announced, code: int | None) -> None:
        """Note in the store that a driver has ended. With a `code` the run has ended, too."""
        self._say(_END, driver.key, {"name": driver.name, "code": code})

    def ended(self, driver: Announced) -> End | None:
        try:
            entry = self._read(_END)
            if entry is None:
                return None
            ending = _told(driver.key, _END, *entry[:2])
        except Stranger:
            return None
        return End(ending["code"]) if ending["name"] == driver.name else None

    def _opened(self, secret: bytes) -> Key:
        return Key(secret, "the store, where everybody can read it").of_run(self._identity)

    def _say(self, name: str, key: Key, content: dict[str, Any], opened: bytes | None = None) -> None:
        message = json.dumps(content)
        value = {"said": message, "proof": key.proof(name.encode(), message.encode()).hex()}
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


def _told(key: Key, name: str, message: str, proof: bytes) -> dict[str, Any]:
    if not key.proves(proof, name.encode(), message.encode()):
        raise WrongKey("was announced with another key")
    return json.loads(message)  # safe: an owner of the key made it
