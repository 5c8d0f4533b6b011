"""Make a working directory for one run: a copy of the current directory, and of the directories beside it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu_check.processes.scratch import Scratch

_COPIED = 2**20  # bytes: larger files, such as data sets, are linked, because copies would take long
_ENTRIES = 1000  # a directory with more entries is probably a data set, and is linked
_BESIDE_ENTRIES = 10 * _ENTRIES  # of all directories beside: each run makes them again
_BESIDE_COPIED = 2**24  # bytes of all files beside, for the same reason


@contextmanager
def fresh_directory(source: Path | None = None) -> Iterator[Path]:
    """Make a temporary directory like `source`, and remove it afterwards with everything in it.

    Subdirectories are real directories, so new files stay in the copy. Small files are copied. These are links to the
    originals, so that writing to them changes the originals: links, large files, unreadable files and directories,
    directories with many entries, hidden directories and virtual environments.

    Beside the copy are the entries beside `source`, so that a script finds its ``../data``; nothing is beside the copy
    if the parent of `source` is unreadable or has many entries. Hidden entries are left out. Directories beside are
    real, but their subdirectories are links. Files of mounted directories are links, and so is all that exceeds
    `_BESIDE_ENTRIES` or `_BESIDE_COPIED`.

    Args:
        source: default: the current directory.
    """
    with Scratch.new("compare") as made:
        source = (source or Path.cwd()).resolve()  # as the kernel does for ".."
        directory = made / (source.name or "root")
        but = str(made.resolve())
        _imitate(source, directory, but)
        _imitate_beside(source.parent, made, but)
        yield directory


def _imitate(source: Path, target: Path, but: str) -> None:
    target.mkdir()
    for entry in os.scandir(source):
        if entry.name == "__pycache__" or entry.path == but:
            continue
        if _inside(entry) is None:
            _give(entry, target / entry.name, _COPIED)
        else:
            _imitate(Path(entry.path), target / entry.name, but)


def _imitate_beside(parent: Path, made: Path, but: str) -> None:
    entries, size = _BESIDE_ENTRIES, _BESIDE_COPIED
    for entry in sorted(_entries(parent) or (), key=lambda entry: entry.name):
        copy = made / entry.name
        if entry.name.startswith(".") or entry.path == but or copy.exists():
            continue
        inside = _inside(entry)
        if inside is None or len(inside) > entries:
            size -= _give(entry, copy, min(size, _COPIED))
            continue
        copy.mkdir()
        entries -= len(inside)
        mounted = os.path.ismount(entry.path)  # such as /proc, whose files may not be read
        for own in inside:
            if own.name != "__pycache__" and own.path != but:
                size -= _give(own, copy / own.name, -1 if mounted else min(size, _COPIED))


def _inside(entry: os.DirEntry[str]) -> list[os.DirEntry[str]] | None:
    """Return the entries of a directory that gets a directory of its own; None for what is copied or linked."""
    if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
        return None
    return None if os.path.exists(os.path.join(entry.path, "pyvenv.cfg")) else _entries(entry.path)


def _entries(directory: str | Path) -> list[os.DirEntry[str]] | None:
    """Return the entries of a directory; None if it is unreadable or has many."""
    try:
        with os.scandir(directory) as found:
            entries = list(itertools.islice(found, _ENTRIES + 1))
    except OSError:
        return None
    return entries if len(entries) <= _ENTRIES else None


def _give(entry: os.DirEntry[str], copy: Path, most: int) -> int:
    """Copy a file of at most `most` bytes, and link everything else. Return the number of bytes that were copied."""
    with contextlib.suppress(PermissionError, FileNotFoundError):  # another process may remove it
        if entry.is_file(follow_symlinks=False) and (size := entry.stat().st_size) <= most:
            shutil.copy2(entry.path, copy)
            return size
    copy.symlink_to(entry.path)
    return 0
