"""Temporary directories that go with the last process that uses them, however it ends.

Who uses a directory keeps a shared lock on it (`flock`), which the kernel takes back. Who can lock it alone removes it: a
process that leaves it, the fork server of one that was killed, or whoever makes such a directory next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Literal, get_args

from mgpu_check.processes.leftovers import clear

__all__ = ["Scratch", "sweep"]

_NAME = "mgpu-check-{kind}-{machine}-"
Kind = Literal["compare", "evaluate", "leases", "ranks", "resume", "suite"]
_LOCKED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_live: weakref.WeakSet[Scratch] = weakref.WeakSet()


def _close_all() -> None:
    """Close the locks in a process that was forked from this one: a copy would hold as long as the lock itself."""
    for scratch in list(_live):
        scratch._close()


os.register_at_fork(after_in_child=_close_all)


class Scratch:
    """A directory that this process uses, until `leave` or `remove`, or until it ends.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        """Use the directory `path`, and make it if it is not there.

        Raises:
            OSError: it cannot be made, or is no directory.
        """
        self.path = path
        descriptor = None
        while descriptor is None:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            descriptor = _locked(path)
        self._descriptor: int | None = descriptor
        _live.add(self)

    @classmethod
    def new(cls, kind: Kind) -> Scratch:
        """Make a new directory. Remove what was left behind by others."""
        directory = Path(tempfile.gettempdir())
        sweep(directory)
        return cls(Path(tempfile.mkdtemp(prefix=_prefix(kind), dir=directory)))

    @classmethod
    def named(cls, kind: Kind, name: str) -> Scratch:
        """Return the directory that all who give the same name use."""
        return cls(Path(tempfile.gettempdir()) / f"{_prefix(kind)}{name}")

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def leave(self) -> bool:
        """Use it no more, and remove it if nobody else uses it; whether it is gone. To be called again if it is not."""
        if self._descriptor is None:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # or there are no locks, and nobody can know
            return False
        # To lock it for oneself gives up the lock that is shared: others may have removed it meanwhile, and made a new one.
        if _stands_at(self._descriptor, self.path):
            self.remove()
        self._close()
        return True

    def remove(self) -> None:
        """Remove it, whoever uses it. A second time, or in a process that was forked from this one: nothing."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def sweep(directory: Path) -> None:
    """Remove the directories of this user in `directory` that no process of this machine uses any more."""
    pattern = re.compile("|".join(re.escape(_prefix(kind)) for kind in get_args(Kind)))
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if pattern.match(name):
                with contextlib.suppress(OSError):
                    _remove_unused(directory / name)


def _locked(path: Path) -> int | None:
    """Return a descriptor by which a directory is locked; None if it was removed before that."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, _LOCKED)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nobody else can lock it either
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
            if _stands_at(descriptor, path):  # and not a new one, which others have made before the lock was had
                clear(os.fspath(path))  # where the fork server of ranks was killed, too
                shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _stands_at(descriptor: int, path: Path) -> bool:
    """Return whether an open directory is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _prefix(kind: str) -> str:
    """Return what names begin with.

    They tell machines apart, because these locks are unknown to others that share a disk.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    except OSError:
        machine = os.uname().nodename
    return _NAME.format(kind=kind, machine=machine)
