"""The packaged suite, as the core knows it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mgpu_check.applications import Application

_NOT_OF_RANKS = re.compile(r"test_.*|.*strategies|faults")
"""Names of modules and folders of a property that only the pytest process imports, or only a rank with a fault."""


def modules_of_ranks(tests: Iterable[Path]) -> list[str]:
    """Return the modules that ranks import for these test files: those in the folders of their properties."""
    modules = []
    for folder in sorted({path.parent for path in tests}):
        for file in sorted(folder.rglob("*.py")):
            segments = file.relative_to(folder).with_suffix("").parts
            if not any(map(_NOT_OF_RANKS.fullmatch, segments)) and segments[-1] != "__init__":
                modules.append(".".join((APPLICATION.package, folder.name, *segments)))
    return modules


APPLICATION = Application(
    package="mgpu_check.suite",
    frames="check",
    modules_of_ranks=modules_of_ranks,
    advice={
        True: "the machine below the simulated GPUs; to test real GPUs and links, run mgpu-check accept",
        False: "a GPU or link; to find a faulty part, run mgpu-check accept",
    },
)
