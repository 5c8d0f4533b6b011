"""`mgpu-check [--gpus=N] [--simulate] [pytest's arguments]`: run the packaged suite."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mgpu_check.suite
from mgpu_check.cli.codes import WRONG_USAGE
from mgpu_check.engine.remote import current
from mgpu_check.processes.scratch import Scratch
from mgpu_check.pytest_plugin.report.progress import Progress
from mgpu_check.pytest_plugin.report.replay import CommandLine
from mgpu_check.settings import OPTIONS

_HYPOTHESIS_HOME = "HYPOTHESIS_STORAGE_DIRECTORY"

__all__ = ["asks_for_gpus", "at_standard", "files", "main", "names_a_check", "run", "without_number"]


def main(argv: Sequence[str]) -> int:
    """Run every check of the suite; pytest's exit code."""
    arguments = list(argv)
    if refused := without_number(arguments):
        print(f"mgpu-check: {refused}", file=sys.stderr)
        return WRONG_USAGE
    if not asks_for_gpus(arguments):
        driver = current.driver()  # it knows the number without looking, so it may be one of simulated devices
        arguments.insert(0, "--gpus=all" if driver is None else f"--gpus={driver.size}")
    return run(arguments, [Progress(), CommandLine((), tuple(argv))])


def asks_for_gpus(arguments: Sequence[str]) -> bool:
    """Return whether the command line, or the environment, gives a number of devices."""
    return _gives("gpus", arguments)


def at_standard(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with the level of commands that are to find rare faults, where the user names no level."""
    return list(arguments) if _gives("gpu_level", arguments) else ["--gpu-level=standard", *arguments]


def _gives(name: str, arguments: Sequence[str]) -> bool:
    option = OPTIONS[name]
    also = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    given = any(argument.partition("=")[0] == option.flag for argument in [*arguments, *also])
    return given or option.variable in os.environ


def without_number(arguments: Sequence[str]) -> str:
    """Return what is wrong where GPUs are to be simulated, and nobody says how many; empty where all is right."""
    simulated = any(argument.partition("=")[0] == "--simulate" for argument in arguments)
    if simulated and not asks_for_gpus(arguments) and current.driver() is None:
        return "--simulate: say how many GPUs to simulate, such as --gpus=4 --simulate"
    return ""


def names_a_check(argument: str, package: ModuleType = mgpu_check.suite) -> bool:
    """Return whether an argument is a file of a package of tests, or a check in it: ``test_scatter.py::test_tutorial_shapes``."""
    return argument.partition("::")[0] in files(package)


def files(package: ModuleType = mgpu_check.suite) -> list[str]:
    """Return the files of a package of tests."""
    return sorted(path.name for path in _directory(package).glob("test_*.py"))


def _directory(package: ModuleType) -> Path:
    return Path(package.__path__[0])


def run(arguments: Sequence[str], plugins: Sequence[Any], package: ModuleType = mgpu_check.suite) -> int:
    """Run pytest on a package of tests, quietly, with nothing taken from or left in the current directory."""
    ini = _directory(package) / "pytest.ini"
    # Named, because PYTEST_DISABLE_PLUGIN_AUTOLOAD may be set here as everywhere.
    ours = ["-q", "-c", str(ini), "-p", "mgpu_check", "-p", "no:cacheprovider"]
    chosen = [
        str(ini.with_name(word)) if names_a_check(word, package) and before != "-k" else word
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    if chosen == list(arguments):
        ours += ["--pyargs", package.__name__]
    scratch = Scratch.new("suite")
    # Hypothesis keeps tables there even without an example database; xdist's workers inherit it.
    kept = os.environ.setdefault(_HYPOTHESIS_HOME, str(scratch.path))
    try:
        return int(pytest.main([*ours, *chosen], plugins=list(plugins)))
    finally:
        if kept == str(scratch.path):
            del os.environ[_HYPOTHESIS_HOME]
        scratch.remove()
