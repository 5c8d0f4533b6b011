"""`mgpu-check [--gpus=N] [--simulate] [pytest's arguments]`: run the packaged suite."""

from __future__ import annotations

import importlib.util
import itertools
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

__all__ = [
    "asks_for_gpus",
    "at_standard",
    "command_line",
    "files",
    "main",
    "misuse",
    "names_a_check",
    "on_all_gpus",
    "run",
]


def main(argv: Sequence[str]) -> int:
    """Run every check of the suite; pytest's exit code."""
    arguments = list(argv)
    if refused := misuse(arguments):
        print(f"mgpu-check: {refused}", file=sys.stderr)
        return WRONG_USAGE
    arguments = on_all_gpus(arguments)
    return run(arguments, [Progress(), command_line((), arguments, argv)])


def command_line(
    words: tuple[str, ...], arguments: Sequence[str], typed: Sequence[str], omits: str = ""
) -> CommandLine:
    """Return the command line of ``mgpu-check WORDS``, whose user typed `typed`, and whose pytest gets `arguments`."""
    flags, theirs = ({word.partition("=")[0] for word in some} for some in (arguments, typed))
    return CommandLine(words, tuple(arguments), omits, frozenset(flags - theirs))


def asks_for_gpus(arguments: Sequence[str]) -> bool:
    """Return whether the command line, or the environment, gives a number of devices."""
    return _gives("gpus", arguments)


def on_all_gpus(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with all GPUs that there are, where the user gives no number."""
    if asks_for_gpus(arguments):
        return list(arguments)
    driver = current.driver()  # it knows the number without looking, so it may be one of simulated devices
    return ["--gpus=all" if driver is None else f"--gpus={driver.size}", *arguments]


def at_standard(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with the level of commands that are to find rare faults, where the user names no level."""
    return list(arguments) if _gives("gpu_level", arguments) else ["--gpu-level=standard", *arguments]


def _gives(name: str, arguments: Sequence[str]) -> bool:
    option = OPTIONS[name]
    also = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    given = any(argument.partition("=")[0] == option.flag for argument in [*arguments, *also])
    return given or option.variable in os.environ


def misuse(arguments: Sequence[str]) -> str:
    """Return what is wrong where an option lacks its value, or simulated GPUs their number; empty where all is right."""
    for argument, following in itertools.pairwise([*arguments, "--"]):
        option = OPTIONS.get(argument.removeprefix("--").replace("-", "_"))
        valued = option is not None and "metavar" in option.command_line and "nargs" not in option.command_line
        if option is not None and argument == option.flag and valued and following.startswith("-"):
            return f"{argument}: it needs a value: {argument}={option.command_line['metavar']}"
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
        return int(pytest.main([*ours, *chosen], plugins=[_Words(package), *plugins]))
    finally:
        if kept == str(scratch.path):
            del os.environ[_HYPOTHESIS_HOME]
        scratch.remove()


class _Words:
    """A pytest plugin that refuses words which name no tests: the message of pytest is about packages."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package

    def pytest_configure(self, config: pytest.Config) -> None:
        for word in config.getoption("file_or_dir"):
            name = word.partition("::")[0]
            if not Path(config.invocation_params.dir, name).exists() and not _is_module(name):
                raise pytest.UsageError(
                    f"mgpu-check: {word!r} is no file and no module; choose one of {', '.join(files(self.package))}, or "
                    "checks by -k NAME"
                )


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
