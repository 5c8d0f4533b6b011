"""The key of a user, in a file, and the proof of two processes of a run to each other that they have it, before they
exchange messages.

The first process of a run makes the file, and all processes of the run read it. As in OpenSSH, a file that other
users could have read or replaced is refused, with an error that names the remedy.

All messages have a fixed size and are compared as bytes. No data of an unauthenticated peer is parsed. The key
itself is never sent. A proof holds for one connection only: it covers fresh random numbers of both sides, the run,
and the driver's address. An attacker in the middle who relays the messages therefore gains nothing.

The challenge of `multiprocessing.connection` is not enough: its listener waits for each peer in turn, without a
deadline, so a silent peer keeps all agents out. Its proofs cover neither the run nor the address, and use HMAC-MD5
up to Python 3.11.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import pwd
import secrets
import socket
import stat
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

REMEDY = (
    "give all processes of the run one file that only their user can read, the same on all hosts, by "
    "--agent-key-file=FILE or MGPU_CHECK_AGENT_KEY_FILE; make it by: (umask 077; openssl rand -hex 32 > FILE). Or, if "
    "you trust every user and every program of the network, use --trust-network"
)

_NAME = Path("mgpu-check", "agent-key")
_SHORTEST, _LONGEST = 32, 4096  # bytes
_FEWEST = 8  # different bytes: a full disk or a sparse copy leaves a file of zeros
_ATTEMPTS = 20  # in case another program keeps removing the file
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnusableKey(Exception):
    """There is no key that only this user knows. The text says why, and what to do."""


def default_path(environment: Mapping[str, str]) -> Path:
    """Return the default path of the key file. Hosts with a shared home directory share it."""
    configuration = environment.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(configuration):
        return configuration / _NAME
    home = environment.get("HOME", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(home) and os.stat(home).st_uid == os.geteuid():
            return Path(home, ".config", _NAME)
    # HOME is unset, or is that of another user, as after sudo.
    with contextlib.suppress(KeyError):
        return Path(pwd.getpwuid(os.geteuid()).pw_dir, ".config", _NAME)
    raise UnusableKey(f"user {os.geteuid()} has no home directory for a key file; {REMEDY}")


def secret_in(path: Path, make_directory: bool) -> bytes:
    """Return the 32-byte key from the file at `path`; make it, and with `make_directory` its directory, if missing."""
    try:
        if make_directory:
            for ancestor in (*reversed(path.parent.parents), path.parent):
                if not ancestor.exists():
                    with contextlib.suppress(FileExistsError):
                        ancestor.mkdir(mode=0o700)
        # Use the real path from here on: no other user can change a part of it.
        real = _safe(path.parent) / path.name
        for _ in range(_ATTEMPTS):
            try:
                return _secret_of_file(real)
            except FileNotFoundError:
                _make(real)
    except OSError as error:
        raise UnusableKey(f"the key file {path} cannot be read or made: {error}; {REMEDY}") from error
    raise UnusableKey(f"the key file {path} cannot be made: it disappears again; {REMEDY}")


def _safe(directory: Path) -> Path:
    """Return the real path of `directory`, after a check that no other user can replace files there."""
    real = Path(os.path.realpath(directory, strict=True))
    trusted = {0, os.geteuid(), _unmapped()}
    for ancestor in (real, *real.parents):
        status = ancestor.lstat()
        if status.st_uid not in trusted:
            raise UnusableKey(
                f"the key in {directory} could be replaced: {ancestor} belongs to user {status.st_uid}, and this "
                f"process runs as user {os.geteuid()}; {REMEDY}"
            )
        if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            raise UnusableKey(
                f"the key in {directory} could be replaced: others can write to {ancestor} (mode {_mode(status)}); "
                f"take that from them by: chmod go-w {ancestor}. Or {REMEDY}"
            )
    return real


def _unmapped() -> int | None:
    """Return the id of all host users that this process's user namespace does not map; None in the host's own one."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):o}"


def _secret_of_file(path: Path) -> bytes:
    try:
        # Do not block on a FIFO, and do not follow a link.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnusableKey(f"the key file {path} is a symbolic link; name the file that it leads to") from None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnusableKey(f"the key file {path} is not a regular file; {REMEDY}")
        if status.st_uid != os.geteuid():
            raise UnusableKey(
                f"the key file {path} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}; "
                f"{REMEDY}"
            )
        if status.st_mode & _OTHERS:
            raise UnusableKey(
                f"the key file {path} is open to others (mode {_mode(status)}), who may know it; remove it, and the "
                "next run makes another, or copy a new one to all hosts, with mode 600"
            )
        raw = os.read(fd, _LONGEST + 2)  # one byte for a newline, and one to detect a longer file
    finally:
        os.close(fd)
    content = raw.strip()
    if len(raw) > _LONGEST + 1 or not _SHORTEST <= len(content) <= _LONGEST or len(set(content)) < _FEWEST:
        raise UnusableKey(
            f"the key file {path} holds no key: it needs {_SHORTEST} to {_LONGEST} random bytes, or as many "
            "characters; remove it, and the next run makes another, or make it by: (umask 077; openssl rand -hex 32 "
            "> FILE)"
        )
    return hashlib.sha256(b"mgpu-check agent key\0" + content).digest()


def _make(path: Path) -> None:
    """Make the file atomically, unless another process was faster."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o600)
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
                raise UnusableKey(
                    f"a file that this process, of user {os.geteuid()}, makes in {path.parent} belongs to user "
                    f"{status.st_uid} and has mode {_mode(status)}: this file system does not keep it private (a share "
                    f"that maps root to another user, or a file system without modes); {REMEDY}"
                )
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


_GREETING = b"mgpu-check/2\n"
_NONCE = 32  # random bytes, enough to never repeat
_PROOF = hashlib.sha256().digest_size


class Stranger(Exception):
    """The peer does not have the key of this run, or does not follow the protocol."""


class WrongKey(Stranger):
    """The peer follows the protocol, but has another key."""


@dataclass(frozen=True)
class Key:
    """The secret that only the processes of a run know."""

    secret: bytes = field(repr=False)
    source: str  # where the secret was found, in words

    def of_run(self, run: str) -> Key:
        """Derive the key of one run. Its proofs are not valid in other runs of the same user."""
        return Key(self.proof(b"run", run.encode()), self.source)

    def proof(self, purpose: bytes, *fields: bytes) -> bytes:
        """Return the proof that an owner of the key sent `fields` for the purpose `purpose`."""
        message = b"".join(len(field).to_bytes(8, "big") + field for field in (purpose, *fields))
        return hmac.digest(self.secret, message, "sha256")

    def proves(self, proof: bytes, purpose: bytes, *fields: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof(purpose, *fields))


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
    Yields the bytes to send and the size of the expected answer; returns the last bytes to send. `key`: of the run.
    `listens_at`: `endpoint` of the connection's own address. Raises `WrongKey`: the peer does not have the key."""
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
