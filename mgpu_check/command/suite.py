"""`mgpu-check [--gpus=N] [--simulate] [pytest's arguments]`: run the packaged suite."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import mgpu_check.suite
from mgpu_check.report.progress import Progress
from mgpu_check.settings import OPTIONS

_HYPOTHESIS_HOME = "HYPOTHESIS_STORAGE_DIRECTORY"

__all__ = ["asks_for_gpus", "main", "run"]


def main(argv: Sequence[str]) -> int:
    """Run every check of the suite; pytest's exit code."""
    arguments = list(argv)
    if not asks_for_gpus(arguments):
        arguments.insert(0, "--gpus=all")
    return run(arguments, [Progress()])


def asks_for_gpus(arguments: Sequence[str]) -> bool:
    """Whether the command line, or the environment, says how many devices to use."""
    also = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    given = any(argument.partition("=")[0] == "--gpus" for argument in [*arguments, *also])
    return given or OPTIONS["gpus"].variable in os.environ


def run(arguments: Sequence[str], plugins: Sequence[Any]) -> int:
    """Run pytest on the packaged suite, quietly, with nothing taken from or left in the current directory."""
    ini = Path(mgpu_check.suite.__file__).with_name("pytest.ini")
    # Named, because PYTEST_DISABLE_PLUGIN_AUTOLOAD may be set here as everywhere.
    ours = ["-q", "-c", str(ini), "-p", "mgpu_check", "-p", "no:cacheprovider", "--pyargs", "mgpu_check.suite"]
    with tempfile.TemporaryDirectory(prefix="mgpu-check-") as directory:
        # Hypothesis keeps tables there even without an example database; xdist's workers inherit it.
        kept = os.environ.setdefault(_HYPOTHESIS_HOME, directory)
        try:
            return int(pytest.main([*ours, *arguments], plugins=list(plugins)))
        finally:
            if kept == directory:
                del os.environ[_HYPOTHESIS_HOME]
