"""The file with a user's key. The first process of a run makes it, and all processes of the run read it.

As in OpenSSH, a file that other users could have read or replaced is refused, with an error that names the remedy.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pwd
import secrets
import stat
from collections.abc import Mapping
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
    """Return the 32-byte key from the file at `path`, and make the file if it does not exist.

    Args:
        make_directory: whether to make its directory, too.
    """
    try:
        if make_directory:
            _make_directory(path.parent)
        # Use the real path from here on: no other user can change a part of it.
        real = _safe(path.parent) / path.name
        for _ in range(_ATTEMPTS):
            try:
                return _read(real)
            except FileNotFoundError:
                _make(real)
    except OSError as error:
        raise UnusableKey(f"the key file {path} cannot be read or made: {error}; {REMEDY}") from error
    raise UnusableKey(f"the key file {path} cannot be made: it disappears again; {REMEDY}")


def _make_directory(directory: Path) -> None:
    for one in (*reversed(directory.parents), directory):
        if not one.exists():
            with contextlib.suppress(FileExistsError):
                one.mkdir(mode=0o700)


def _safe(directory: Path) -> Path:
    """Return the real path of `directory`, after a check that no other user can replace files there."""
    real = Path(os.path.realpath(directory, strict=True))
    trusted = {0, os.geteuid(), _unmapped()}
    for one in (real, *real.parents):
        found = one.lstat()
        if found.st_uid not in trusted:
            raise UnusableKey(
                f"the key in {directory} could be replaced: {one} belongs to user {found.st_uid}, and this process "
                f"runs as user {os.geteuid()}; {REMEDY}"
            )
        if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
            raise UnusableKey(
                f"the key in {directory} could be replaced: others can write to {one} (mode {_mode(found)}); take that "
                f"from them by: chmod go-w {one}. Or {REMEDY}"
            )
    return real


def _unmapped() -> int | None:
    """Return the id that represents all host users, root included, that this process's user namespace does not map.

    Return None in the host's own namespace.
    """
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def _mode(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):o}"


def _read(path: Path) -> bytes:
    try:
        # Do not block on a FIFO, and do not follow a link.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnusableKey(f"the key file {path} is a symbolic link; name the file that it leads to") from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnusableKey(f"the key file {path} is not a regular file; {REMEDY}")
        if found.st_uid != os.geteuid():
            raise UnusableKey(
                f"the key file {path} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}; "
                f"{REMEDY}"
            )
        if found.st_mode & _OTHERS:
            raise UnusableKey(
                f"the key file {path} is open to others (mode {_mode(found)}), who may know it; remove it, and the "
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
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
                raise UnusableKey(
                    f"a file that this process, of user {os.geteuid()}, makes in {path.parent} belongs to user "
                    f"{found.st_uid} and has mode {_mode(found)}: this file system does not keep it private (a share "
                    f"that maps root to another user, or a file system without modes); {REMEDY}"
                )
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
