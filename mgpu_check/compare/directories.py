"""Make a working directory for one run: a copy of the current directory that other runs do not write to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu_check.processes.scratch import Scratch

_COPIED = 2**20  # bytes: larger files, such as data sets, are linked, because copies would take long
_ENTRIES = 1000  # a directory with more entries is probably a data set, and is linked


@contextmanager
def fresh_directory(source: Path | None = None) -> Iterator[Path]:
    """Make a temporary directory like `source`, and remove it afterwards with everything in it.

    Beside the copy are links to the entries beside `source`, so that a script finds its ``../data``.
    Subdirectories are real directories, so new files stay in the copy. Small files are copied. Large files, directories
    with many entries, hidden directories and virtual environments are linked to the originals.

    Args:
        source: default: the current directory.
    """
    with Scratch.new("compare") as made:
        source = source or Path.cwd()
        directory = made / (source.name or "root")
        _imitate(source, directory, made)
        _link_beside(source, made)
        yield directory


def _link_beside(source: Path, made: Path) -> None:
    if os.access(source.parent, os.R_OK) and len(os.listdir(source.parent)) <= _ENTRIES:
        for path in source.parent.iterdir():
            if path not in (source, made) and not path.name.startswith("."):
                (made / path.name).symlink_to(path)


def _imitate(source: Path, target: Path, but: Path) -> None:
    target.mkdir()
    for entry in os.scandir(source):
        copy = target / entry.name
        if entry.name == "__pycache__" or Path(entry.path) == but:
            continue
        if entry.is_symlink():
            copy.symlink_to(Path(entry.path).resolve())
        elif entry.is_dir():
            path = Path(entry.path)
            if entry.name.startswith(".") or (path / "pyvenv.cfg").exists() or len(os.listdir(path)) > _ENTRIES:
                copy.symlink_to(path)
            else:
                _imitate(path, copy, but)
        elif entry.is_file() and entry.stat().st_size <= _COPIED:
            shutil.copy2(entry.path, copy)
        else:
            copy.symlink_to(entry.path)
