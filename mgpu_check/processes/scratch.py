"""Temporary directories that are removed after the last process that uses them has ended, even if it was killed, and
a limit for the output of ranks in them.

Each user of a directory holds a shared lock on it (`flock`), which the kernel releases at the end of the process.
A process that gets an exclusive lock removes the directory: the last user, the fork server of a killed one, or the
next process that makes such a directory.

Of a rank's output, the beginning and the end are kept. The middle of a large file becomes a hole, which frees its
disk space. The size of the file does not change, so processes may read and write it at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Literal, get_args

from mgpu_check.processes.child_processes import clear
from mgpu_check.processes.machine import boot_id

MOST_OUTPUT = 64 * 1024  # maximum bytes of each stream of a rank in a report
LOOK = 0.25  # seconds between two checks of the sizes of running ranks' files

_HEAD = MOST_OUTPUT // 4
_TAIL = MOST_OUTPUT - _HEAD
_MOST_ON_DISK = 16 * 1024 * 1024
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


def kept(file: int) -> str:
    """Return the text of a file; of a long file, the beginning and the end."""
    size = os.fstat(file).st_size
    if size <= MOST_OUTPUT:
        return os.pread(file, size, 0).decode(errors="replace")
    head, tail = os.pread(file, _HEAD, 0), os.pread(file, _TAIL, size - _TAIL)
    left_out = f"\n[{size - MOST_OUTPUT} bytes are left out here]\n"
    return head.decode(errors="replace") + left_out + tail.decode(errors="replace")


def thin_out(file: int) -> None:
    """Free the disk space of the part that `kept` omits, if the file is large and the file system supports holes."""
    status = os.fstat(file)
    if sys.platform == "linux" and status.st_blocks * 512 > _MOST_ON_DISK:
        hole = ctypes.c_int64(_HEAD), ctypes.c_int64(status.st_size - MOST_OUTPUT)
        ctypes.CDLL(None).fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, *hole)


_NAME = "mgpu-check-{kind}-{machine}-"
Kind = Literal["compare", "engines", "evaluate", "leases", "ranks", "resume", "suite"]
_LOCKED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_live: weakref.WeakSet[Scratch] = weakref.WeakSet()


def _close_all() -> None:
    """Close the locks in a forked copy of this process, which would keep them locked."""
    for scratch in list(_live):
        scratch._close()


os.register_at_fork(after_in_child=_close_all)


class Scratch:
    """A directory that this process uses until `leave`, `remove`, or its end."""

    def __init__(self, path: Path) -> None:
        """Use the directory `path`, and make it if it does not exist."""
        self.path = path
        descriptor = None
        while descriptor is None:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            descriptor = _locked(path)
        self._descriptor: int | None = descriptor
        _live.add(self)

    @classmethod
    def new(cls, purpose: Kind) -> Scratch:
        """Make a new directory, and remove unused directories of other runs."""
        directory = Path(tempfile.gettempdir())
        sweep(directory)
        return cls(Path(tempfile.mkdtemp(prefix=_prefix(purpose), dir=directory)))

    @classmethod
    def named(cls, purpose: Kind, name: str) -> Scratch:
        """Use the directory that all processes of this machine with the same `name` share."""
        return cls(Path(tempfile.gettempdir()) / f"{_prefix(purpose)}{name}")

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def leave(self) -> bool:
        """Stop using the directory if this process is its last user, and remove it.

        Returns False if other processes use it, or the file system has no locks; then call this again later.
        """
        if self._descriptor is None:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # other processes use it, or the file system has no locks
            return False
        # An upgrade of the lock is not atomic: another process may have removed the directory meanwhile, and made a new
        # one.
        if _stands_at(self._descriptor, self.path):
            self.remove()
        self._close()
        return True

    def remove(self) -> None:
        """Remove the directory even if others use it. Do nothing on a second call or in a forked process."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def sweep(directory: Path) -> None:
    """Remove this user's directories in `directory` that no process of this machine uses."""
    pattern = re.compile("|".join(re.escape(_prefix(purpose)) for purpose in get_args(Kind)))
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if pattern.match(name):
                with contextlib.suppress(OSError):
                    _remove_unused(directory / name)


def _locked(path: Path) -> int | None:
    """Return a descriptor that holds a shared lock on a directory; None if the directory was removed before that."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, _LOCKED)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: no other process can lock it either
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _stands_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def _remove_unused(path: Path) -> None:
    descriptor = os.open(path, _LOCKED)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _stands_at(descriptor, path):  # not a new directory of the same name
                clear(os.fspath(path))  # the fork server of its ranks may have been killed, too
                shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _stands_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _prefix(purpose: str) -> str:
    """Return the prefix of names, which contains the machine, because machines that share a disk do not share locks."""
    return _NAME.format(kind=purpose, machine=boot_id()[:8] or os.uname().nodename)
