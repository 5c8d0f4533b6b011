"""Lease devices: give a test exclusive use of its devices, among all processes of the machine.

A lease is a lock file per device, locked with `flock`. The kernel releases the lock when the process ends, even by a
signal. A test leases all its devices at once and requests no more while it holds a lease, so there are no deadlocks.

A request that cannot be served at once draws a ticket: a numbered file that its process keeps locked. Numbers are drawn
under one short lock, so no ticket ever enters the queue ahead of an existing one. A request takes devices only when no
earlier ticket wants any of the same devices: the earlier requests were served, or their processes ended. It then keeps
each device that becomes free until it has enough. The order is first come, first served: a test that needs all devices
is not overtaken by small ones. Requests for different devices do not wait for each other.
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

# Seconds between two polls of the locks. A poll costs some 30 microseconds; a wait ends up to one interval late.
_SHORTEST_POLL, _LONGEST_POLL = 0.001, 0.01

_PATIENCE = 3600.0  # far above the time of any test, and below the time limit of a CI job

_FIRST_WORD = 30.0  # seconds: shorter waits are normal and not worth a line

_LONGEST_CONTENT = 64 * 1024

_EVERYBODY = 0o666  # the users of a machine lock the same files; the files hold nothing that needs protection

MACHINE = Path("/tmp/mgpu-check-leases")
"""Not under TMPDIR: users and jobs with different values of TMPDIR share the same devices."""


class LeaseError(RuntimeError):
    """Devices cannot be leased, or are not given back in time."""


def machine_directory() -> Path:
    """Return the directory of the leases of this machine's real devices, shared by all users. Create it if necessary.

    Raises:
        LeaseError: the directory cannot be created, or other users could tamper with it.
    """
    path = MACHINE
    remedy = f"remove {path}, or have its owner do so; the next run creates it again, with mode 1777"
    deadline = time.monotonic() + 2.0
    while True:
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir()
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode):
                raise LeaseError(f"{path} is where devices are leased, but it is not a directory; {remedy}")
            if stat.S_IMODE(status.st_mode) == 0o1777:
                return path
            if status.st_uid == os.geteuid():
                path.chmod(0o1777)
                return path
        except OSError as error:
            raise LeaseError(f"devices cannot be leased: {error}; {remedy}") from error
        if time.monotonic() > deadline:  # before that, another process may have created it and not yet set the mode
            mode = stat.S_IMODE(status.st_mode)
            raise LeaseError(f"{path} is where devices are leased, but its mode is {mode:o}; {remedy}")
        time.sleep(_SHORTEST_POLL)


@dataclass
class Lease:
    """Devices that are held until `give_back`, or until this process ends."""

    indices: tuple[int, ...]  # of the devices among those of the run, ascending
    waited: float  # seconds between the request and the lease
    _locks: contextlib.ExitStack
    _pid: int = field(default_factory=os.getpid)

    def give_back(self) -> None:
        """Free the devices. A second call does nothing, nor does a call in a fork of the process that holds them."""
        if self._pid == os.getpid():
            self._locks.close()


@dataclass
class _Request:
    count: int
    purpose: str
    ahead: list[Path] = field(default_factory=list)
    device_locks: dict[int, FileLock] = field(default_factory=dict)
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    tried: dict[Path, FileLock] = field(default_factory=dict)

    def lock(self, path: Path) -> FileLock:
        """Return the lock of a file, the same one for each poll.

        A poll must not drop a lock: Python ignores a KeyboardInterrupt that reaches `BaseFileLock.__del__`
        (filelock/_api.py, 4.3), and the wait would go on after Ctrl-C.
        """
        if path not in self.tried:
            self.tried[path] = _lock(path)
        return self.tried[path]

    @property
    def served(self) -> bool:
        return len(self.device_locks) == self.count


class DeviceLeases:
    """Lease devices that several processes share.

    `device_leases.Leasing` makes one for the run, and takes a `Lease` for each test. It holds no lock between leases.

    Args:
        keys: a unique key per device, the same in every process that shares the directory.
        directory: where the locks are; None is `machine_directory`, for real devices.
        patience: seconds without any progress in the queue after which `take` fails.
        on_wait: called with a description of the processes that a request waits for: after 30 seconds, then after
            intervals that grow.
        sleep: how to wait between two polls.
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
            raise ValueError(f"keys={list(keys)!r}: every device needs one of its own; give different, non-empty keys")
        self.keys = tuple(keys)
        self._given = directory
        self._patience = patience
        self._on_wait = on_wait
        self._sleep = sleep
        self._last: tuple[int, ...] = ()

    def take(self, count: int, purpose: str = "") -> Lease:
        """Lease `count` devices: those of the last lease first, because warm ranks are there, then the lowest free.

        Args:
            purpose: the reason for the lease, such as the test's id, for the messages of processes that wait.

        Raises:
            ValueError: there are fewer devices than `count`.
            LeaseError: the directory cannot be used, or the queue has not moved for `patience` seconds.
        """
        if not 1 <= count <= len(self.keys):
            raise ValueError(f"count={count!r} devices cannot be leased; choose 1 to {len(self.keys)}")
        begun = time.monotonic()
        request = _Request(count, purpose)
        # An interruption, such as Ctrl-C, must leave nothing locked.
        with request.locks, self._usable() as directory, contextlib.ExitStack() as in_queue:
            with self._numbering(directory):
                if not self._join(request, directory):
                    in_queue.enter_context(self._ticket(request, directory))
            if not request.served:
                self._wait(request, directory)
            self._last = tuple(sorted(request.device_locks))
            return Lease(self._last, time.monotonic() - begun, request.locks.pop_all())

    def check(self) -> None:
        """Check that devices can be leased."""
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
        """Hold the short lock that protects the queue while it grows."""
        lock = _lock(directory / "numbers.lock")
        try:
            lock.acquire(timeout=self._patience, poll_interval=_SHORTEST_POLL)
        except Timeout:
            text = f"{lock.lock_file} is held by a process that does not release it; end that process"
            raise LeaseError(text) from None
        try:
            yield
        finally:
            lock.release()

    def _join(self, request: _Request, directory: Path) -> bool:
        """Enqueue the request behind all waiting ones. Return whether it is served at once."""
        request.ahead = [ticket for ticket in _tickets(directory).values() if self._wants_ours(ticket)]
        self._advance(request, directory)
        return request.served

    def _wants_ours(self, ticket: Path) -> bool:
        content = _read(ticket)
        keys = None if content is None else content.get("keys")
        return not isinstance(keys, list) or not set(self.keys).isdisjoint(map(str, keys))

    @contextlib.contextmanager
    def _ticket(self, request: _Request, directory: Path) -> Iterator[None]:
        # A ticket of `ahead` may be gone by now. Reusing its number would make this request wait for itself.
        numbers = [*_tickets(directory), *(int(ticket.name.partition("-")[2]) for ticket in request.ahead)]
        path = directory / f"ticket-{max(numbers, default=0) + 1:08}"
        lock = _lock(path)
        try:
            lock.acquire()  # inside `try`, because Ctrl-C may come after it has created the file
            _write(path, {**_who(request.purpose), "count": request.count, "keys": self.keys})
            yield
        finally:
            path.unlink(missing_ok=True)  # before the unlock: an unlocked ticket counts as that of a dead process
            lock.release()

    def _advance(self, request: _Request, directory: Path) -> bool:
        before = len(request.ahead), len(request.device_locks)
        request.ahead = [ticket for ticket in request.ahead if not _is_done(ticket, request.lock(ticket))]
        if not request.ahead:
            for index in (*self._last, *range(len(self.keys))):
                if request.served:
                    break
                if index not in request.device_locks and (lock := self._lock_device(request, index, directory)):
                    request.device_locks[index] = lock
                    request.locks.callback(lock.release)
                    _write(self._path(index, directory), _who(request.purpose))
        return before != (len(request.ahead), len(request.device_locks))

    def _path(self, index: int, directory: Path) -> Path:
        return directory / f"device-{re.sub(r'[^A-Za-z0-9-]', '_', self.keys[index])}"

    def _lock_device(self, request: _Request, index: int, directory: Path) -> FileLock | None:
        lock = request.lock(self._path(index, directory))
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
                state = self._state(request, directory, now - begun)
                raise LeaseError(f"nothing has moved for {now - moved:.0f} s while {state}")
            if now - begun > word:
                self._on_wait(self._state(request, directory, now - begun))
                word *= 4

    def _state(self, request: _Request, directory: Path, waited: float) -> str:
        lines = [f"waiting {waited:.0f} s for {request.count} of {len(self.keys)} devices"]
        for index in range(len(self.keys)):
            if index in request.device_locks:
                lines.append(f"device {index} is kept already")
            elif (who := _read(self._path(index, directory))) and not _is_free(self._path(index, directory)):
                lines.append(f"device {index} is held by {_describe(who)}")
        lines += [f"before it in the queue: {_describe(who)}" for ticket in request.ahead if (who := _read(ticket))]
        return "\n  ".join(lines)


def _tickets(directory: Path) -> dict[int, Path]:
    named = ((re.fullmatch(r"ticket-(\d+)", path.name), path) for path in directory.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def _lock(path: Path) -> FileLock:
    return FileLock(path, mode=_EVERYBODY, thread_local=False)


def _try(lock: FileLock) -> bool:
    try:
        lock.acquire(blocking=False)
        return True
    except (Timeout, PermissionError):  # or another user has just created the file, and not yet made it accessible
        return False


def _is_done(ticket: Path, lock: FileLock) -> bool:
    """Return whether no process holds `ticket` any more. Remove the ticket of a process that was killed."""
    if not ticket.exists():
        return True
    if not _try(lock):
        return False
    try:
        ticket.unlink(missing_ok=True)
    except OSError:
        pass  # another user's ticket: it stays, and does no harm
    finally:
        lock.release()
    return True


def _is_free(device: Path) -> bool:
    lock = _lock(device)
    free = _try(lock)
    lock.release()
    return free


def _who(purpose: str) -> dict[str, Any]:
    return {"pid": os.getpid(), "command": " ".join(sys.argv)[:200], "purpose": purpose, "since": time.time()}


def _describe(who: dict[str, Any]) -> str:
    since = who.get("since")
    clock = time.strftime("%H:%M:%S", time.localtime(since)) if isinstance(since, float) and 0 < since < 1e11 else "?"
    text = f"process {who.get('pid')} since {clock}: {who.get('command')}: {who.get('purpose')}"
    return "".join(letter if letter.isprintable() else "?" for letter in text)  # another user may have written it


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write into the locked file `path` who holds it. Only people read this, except for the keys of a ticket."""
    with contextlib.suppress(OSError):
        # Without O_CREAT, which the kernel refuses for another user's file in a sticky, world-writable directory.
        # A special file, or one with a second hard link, was planted: leave it alone.
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "wb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                # Overwrite the old content with blanks: truncating makes file systems flush, for a millisecond each.
                file.write(json.dumps(content).encode().ljust(min(status.st_size, _LONGEST_CONTENT)))


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content that `_write` wrote; None if it is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            content = json.loads(file.read(_LONGEST_CONTENT))
        if isinstance(content, dict):
            return content
    return None
