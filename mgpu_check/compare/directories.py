"""A working directory for one run: what stands in the current one, without what other runs write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu_check.processes.scratch import Scratch

__all__ = ["fresh_directory"]

_COPIED = 2**20  # bytes up to which a file is copied; larger ones are links
_ENTRIES = 1000  # above which a directory is a data set, and a link


@contextmanager
def fresh_directory() -> Iterator[Path]:
    """Make a temporary directory like the current one, and remove it with all that was written into it.

    Directories are directories of their own, so that new files stay here. Small files are copies. Large files, directories
    of many entries, hidden ones and virtual environments are links to what is there.
    """
    with Scratch.new("compare") as made:
        directory = made / (Path.cwd().name or "root")
        _imitate(Path.cwd(), directory, made)
        yield directory


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
