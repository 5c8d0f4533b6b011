"""Choose the narrowest address for the driver's listener that all processes of the run can reach."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from mgpu_check.engine.remote.variables import LaunchedProcess

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

    Args:
        rendezvous: the host of the launcher's own rendezvous; empty if unknown.
    """
    if launched.alone or is_loopback(launched.address) or is_loopback(rendezvous):
        given = [host for host in (launched.address, rendezvous) if _number(host) is not None and is_loopback(host)]
        for host in (*given, *_LOOPBACKS):
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
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
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
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return []
    return [host for host in dict.fromkeys(found) if not is_loopback(host)]


def _nearest_to(host: str) -> list[str]:
    """Return this machine's address on the route to the remote `host`, in a list; [] if there is no such address."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
            return [] if is_loopback(own) else [own]
    return []
