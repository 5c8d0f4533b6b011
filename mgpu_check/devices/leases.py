"""Leases: a test has its devices for itself, among all processes of the machine.

A lease is a lock file per device, locked with `flock`, which the kernel takes back when a process ends, however it ends.
A test leases all that it needs at once, and asks for nothing while it holds a lease; so nobody waits in a circle.

Who cannot be served at once draws a ticket: a numbered file that its process keeps locked. Numbers are drawn under one
short lock, so the tickets that stand before another one when it is drawn are all that ever will. Only who has none left
before it that wants any of the same devices, because they were served or their processes ended, takes devices, and keeps
each that becomes free until it has enough. So the order is strictly first come, first served: a test for all devices
waits for those before it, and no small one slips past. Queues for different devices do not wait for each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

__all__ = ["DeviceLeases", "Lease", "LeaseError", "machine_directory"]

# Between two looks at locks, each of which costs some 30 microseconds: a wait ends that much later than it could.
_SHORTEST_POLL, _LONGEST_POLL = 0.001, 0.01

_PATIENCE = 3600.0  # far above what any test should take, and below what a job is given

_FIRST_WORD = 30.0

_LONGEST_CONTENT = 64 * 1024

_EVERYBODY = 0o666  # two users of a machine lock the same files; there is nothing in them to protect

MACHINE = Path("/tmp/mgpu-check-leases")
"""Not under TMPDIR: users, and jobs, that have directories of their own for that have the same devices."""


class LeaseError(RuntimeError):
    """Devices cannot be leased, or nobody gives them back."""


def machine_directory() -> Path:
    """Return the directory of the leases of this machine's real devices, for all of its users; make it if it is not
    there.

    Raises:
        LeaseError: it cannot be made, or others could play tricks with it.
    """
    path = MACHINE
    remedy = f"remove {path}, or have its owner do so; every user makes it anew, with mode 1777"
    deadline = time.monotonic() + 2.0
    while True:
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir()
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise LeaseError(f"{path} is where devices are leased, but it is no directory; {remedy}")
            if stat.S_IMODE(found.st_mode) == 0o1777:
                return path
            if found.st_uid == os.geteuid():
                path.chmod(0o1777)
                return path
        except OSError as error:
            raise LeaseError(f"devices cannot be leased: {error}; {remedy}") from error
        if time.monotonic() > deadline:  # until then, who has just made it may be about to set the mode
            mode = stat.S_IMODE(found.st_mode)
            raise LeaseError(f"{path} is where devices are leased, but its mode is {mode:o}; {remedy}")
        time.sleep(_SHORTEST_POLL)


@dataclass
class Lease:
    """Devices that are held until `give_back`, or until this process ends.

    Attributes:
        indices: of the devices among those of the run, ascending.
        waited: seconds that it took to get them.
    """

    indices: tuple[int, ...]
    waited: float
    _locks: contextlib.ExitStack
    _pid: int = field(default_factory=os.getpid)

    def give_back(self) -> None:
        """Free the devices. A second time, or in a process that was forked from the one that has them: nothing."""
        if self._pid == os.getpid():
            self._locks.close()


@dataclass
class _Request:
    count: int
    purpose: str
    ahead: list[Path] = field(default_factory=list)
    held: dict[int, FileLock] = field(default_factory=dict)
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def served(self) -> bool:
        return len(self.held) == self.count


class DeviceLeases:
    """Leases of some devices, for one process of those that share them.

    Args:
        keys: what tells each device from all others, the same in every process that shares the directory.
        directory: where the locks are; None is `machine_directory`, for real devices.
        patience: seconds in which somebody must get or give back something that this process waits for.
        on_wait: told, after half a minute and then ever more seldom, whom a request waits for.
        sleep: how to wait between two looks.
    """

    def __init__(
        self,
        keys: Sequence[str],
        directory: Path | None = None,
        *,
        patience: float = _PATIENCE,
        on_wait: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if len(set(keys)) < len(keys) or not all(keys):
            raise ValueError(f"keys={list(keys)!r}: every device needs one of its own")
        self.keys = tuple(keys)
        self._given = directory
        self._patience = patience
        self._on_wait = on_wait
        self._sleep = sleep
        self._last: tuple[int, ...] = ()

    def take(self, count: int, purpose: str = "") -> Lease:
        """Lease `count` devices: those of the last lease first, because warm ranks are there, then the lowest free.

        Args:
            purpose: for whom, in words for those who wait.

        Raises:
            ValueError: there are not as many.
            LeaseError: the directory cannot be used, or nothing has moved for all the patience there is.
        """
        if not 1 <= count <= len(self.keys):
            raise ValueError(f"count={count!r} devices cannot be leased; choose 1 to {len(self.keys)}")
        begun = time.monotonic()
        request = _Request(count, purpose)
        # Whatever interrupts this, Ctrl-C included, leaves nothing locked.
        with request.locks, self._usable() as directory, contextlib.ExitStack() as in_queue:
            with self._numbering(directory):
                if not self._join(request, directory):
                    in_queue.enter_context(self._ticket(request, directory))
            if not request.served:
                self._wait(request, directory)
            self._last = tuple(sorted(request.held))
            return Lease(self._last, time.monotonic() - begun, request.locks.pop_all())

    def check(self) -> None:
        """See that leases are possible.

        Raises:
            LeaseError: they are not.
        """
        with self._usable() as directory, self._numbering(directory):
            pass

    @contextlib.contextmanager
    def _usable(self) -> Iterator[Path]:
        directory = self._given or machine_directory()
        try:
            yield directory
        except OSError as error:
            raise LeaseError(f"devices cannot be leased in {directory}: {error}") from error

    @contextlib.contextmanager
    def _numbering(self, directory: Path) -> Iterator[None]:
        """Hold the short lock under which the queue grows."""
        lock = _lock(directory / "numbers.lock")
        try:
            lock.acquire(timeout=self._patience, poll_interval=_SHORTEST_POLL)
        except Timeout:
            raise LeaseError(f"{lock.lock_file} is held by a process that does not go on") from None
        try:
            yield
        finally:
            lock.release()

    def _join(self, request: _Request, directory: Path) -> bool:
        """Stand behind all that are waiting now; whether the request could be served at once."""
        request.ahead = [ticket for ticket in _tickets(directory).values() if self._wants_ours(ticket)]
        self._advance(request, directory)
        return request.served

    def _wants_ours(self, ticket: Path) -> bool:
        content = _read(ticket)
        keys = None if content is None else content.get("keys")
        return not isinstance(keys, list) or not set(self.keys).isdisjoint(map(str, keys))

    @contextlib.contextmanager
    def _ticket(self, request: _Request, directory: Path) -> Iterator[None]:
        # Those of `ahead` may be gone by now, but to get the number of one of them would be to wait for oneself.
        numbers = [*_tickets(directory), *(int(ticket.name.partition("-")[2]) for ticket in request.ahead)]
        path = directory / f"ticket-{max(numbers, default=0) + 1:08}"
        lock = _lock(path)
        try:
            lock.acquire()  # here, because Ctrl-C may come when it has made the file
            _write(path, {**_who(request.purpose), "count": request.count, "keys": self.keys})
            yield
        finally:
            path.unlink(missing_ok=True)  # before it is unlocked, so that nobody takes it for one of the dead
            lock.release()

    def _advance(self, request: _Request, directory: Path) -> bool:
        """Take what can be had now; whether anything has changed for the better."""
        before = len(request.ahead), len(request.held)
        request.ahead = [ticket for ticket in request.ahead if not _is_done(ticket)]
        if not request.ahead:
            for index in (*self._last, *range(len(self.keys))):
                if request.served:
                    break
                if index not in request.held and (lock := self._lock_device(index, directory)) is not None:
                    request.held[index] = lock
                    request.locks.callback(lock.release)
                    _write(self._path(index, directory), _who(request.purpose))
        return before != (len(request.ahead), len(request.held))

    def _path(self, index: int, directory: Path) -> Path:
        return directory / f"device-{re.sub(r'[^A-Za-z0-9-]', '_', self.keys[index])}"

    def _lock_device(self, index: int, directory: Path) -> FileLock | None:
        lock = _lock(self._path(index, directory))
        return lock if _try(lock) else None

    def _wait(self, request: _Request, directory: Path) -> None:
        begun = moved = time.monotonic()
        word, pause = _FIRST_WORD, _SHORTEST_POLL
        while True:
            self._sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
            progress = self._advance(request, directory)
            if request.served:
                return
            now = time.monotonic()
            if progress:
                moved, pause = now, _SHORTEST_POLL
            elif now - moved > self._patience:
                raise LeaseError(
                    f"nothing has moved for {now - moved:.0f} s while {self._state(request, directory, now - begun)}"
                )
            if now - begun > word:
                self._on_wait(self._state(request, directory, now - begun))
                word *= 4

    def _state(self, request: _Request, directory: Path, waited: float) -> str:
        """Describe whom a request waits for."""
        parts = [f"waiting {waited:.0f} s for {request.count} of {len(self.keys)} devices"]
        for index in range(len(self.keys)):
            if index in request.held:
                parts.append(f"device {index} is kept already")
            elif (who := _read(self._path(index, directory))) and not _is_free(self._path(index, directory)):
                parts.append(f"device {index} is held by {_describe(who)}")
        parts += [f"before it in the queue: {_describe(who)}" for ticket in request.ahead if (who := _read(ticket))]
        return "\n  ".join(parts)


def _tickets(directory: Path) -> dict[int, Path]:
    """Return the tickets that exist, by number, in order."""
    found = {int(match[1]): path for path in directory.iterdir() if (match := re.fullmatch(r"ticket-(\d+)", path.name))}
    return dict(sorted(found.items()))


def _lock(path: Path) -> FileLock:
    return FileLock(path, mode=_EVERYBODY, thread_local=False)


def _try(lock: FileLock) -> bool:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    except PermissionError:
        return False  # another user has this moment created the file, and not yet opened it to all
    return True


def _is_done(ticket: Path) -> bool:
    """Return whether nobody waits with `ticket` any more. Remove the ticket of a process that was killed."""
    if not ticket.exists():
        return True
    lock = _lock(ticket)
    if not _try(lock):
        return False
    try:
        ticket.unlink(missing_ok=True)
    except OSError:
        pass  # another user's: it stays, and does no harm
    finally:
        lock.release()
    return True


def _is_free(device: Path) -> bool:
    lock = _lock(device)
    if not _try(lock):
        return False
    lock.release()
    return True


def _who(purpose: str) -> dict[str, Any]:
    return {"pid": os.getpid(), "command": " ".join(sys.argv)[:200], "purpose": purpose, "since": time.time()}


def _describe(who: dict[str, Any]) -> str:
    since = who.get("since")
    clock = time.strftime("%H:%M:%S", time.localtime(since)) if isinstance(since, float) and 0 < since < 1e11 else "?"
    text = f"process {who.get('pid')} since {clock}: {who.get('command')}: {who.get('purpose')}"
    return "".join(letter if letter.isprintable() else "?" for letter in text)  # another user may have written it


def _write(path: Path, content: dict[str, Any]) -> None:
    """Say who has locked `path`, in the file. It matters to people only, except for the keys of a ticket."""
    with contextlib.suppress(OSError):
        # Without O_CREAT, which the kernel refuses for another user's file in a directory like this one. What is no
        # plain file, or has a second name, is a trick.
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "wb") as file:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                # Blanks over what was there: file systems flush a file that was truncated, for a millisecond each.
                file.write(json.dumps(content).encode().ljust(min(found.st_size, _LONGEST_CONTENT)))


def _read(path: Path) -> dict[str, Any] | None:
    """Read what `_write` has written; None if nothing was written, or only a part."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            content = json.loads(file.read(_LONGEST_CONTENT))
        if isinstance(content, dict):
            return content
    return None
