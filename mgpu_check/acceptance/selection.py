"""The options that select checks, for a command that repeats the run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Selection:
    """The selection of checks by the command line.

    Attributes:
        keyword: expression of ``-k``; "" selects all.
        mark: expression of ``-m``.
        left_out: prefixes of ``--deselect``.
        files: files of the acceptance, or checks in them: "test_memory.py", "test_links.py::test_speed".
    """

    keyword: str = ""
    mark: str = ""
    left_out: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: pytest.Config, package: Path) -> Selection:
        """Return the selection of this run; `package` is the directory of the acceptance."""
        files = []
        for word in config.getoption("file_or_dir", None) or ():
            path, separator, names = os.fspath(word).partition("::")
            if path.endswith(".py") and package in Path(path).absolute().parents:
                files.append(Path(path).name + separator + names)
        return cls(
            config.getoption("keyword", None) or "",
            config.getoption("markexpr", None) or "",
            tuple(config.getoption("deselect", None) or ()),
            tuple(files),
        )

    def narrowed(self, checks: Iterable[str]) -> Selection:
        wanted = " or ".join(checks)
        return replace(self, keyword=f"({self.keyword}) and ({wanted})" if self.keyword not in ("", wanted) else wanted)

    def added_to(self, command: str) -> str:
        words = [*(("-k", self.keyword) if self.keyword else ()), *(("-m", self.mark) if self.mark else ())]
        words += [f"--deselect={one}" for one in self.left_out]
        return shlex.join([*shlex.split(command), *words, *self.files])
