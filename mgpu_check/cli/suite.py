"""`mgpu-check [--gpus=N] [--simulate] [pytest's arguments]`: run the packaged suite."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mgpu_check.suite
from mgpu_check.cli.codes import WRONG_USAGE
from mgpu_check.engine.keeper_socket import keeps_imports
from mgpu_check.engine.rank_side.python_hooks import coverage_here
from mgpu_check.engine.remote import launched_process
from mgpu_check.plugin.launch import is_launched
from mgpu_check.plugin.report.replay import CommandLine
from mgpu_check.plugin.report.terminal import Progress
from mgpu_check.plugin.stash import SESSION
from mgpu_check.processes.heap import freeze
from mgpu_check.processes.machine import available_memory, available_processors
from mgpu_check.processes.scratch import Scratch
from mgpu_check.settings import all_options
from mgpu_check.suite.application import modules_of_ranks

_HYPOTHESIS_HOME = "HYPOTHESIS_STORAGE_DIRECTORY"


def main(argv: Sequence[str]) -> int:
    """Run the checks of the packaged suite, and return pytest's exit code."""
    arguments = list(argv)
    if refused := misuse(arguments):
        print(f"mgpu-check: {refused}", file=sys.stderr)
        return WRONG_USAGE
    arguments = on_all_gpus(arguments)
    return run(on_processors(arguments), [Progress(), command_line((), arguments, argv)])


def command_line(
    words: tuple[str, ...], arguments: Sequence[str], typed: Sequence[str], omits: str = ""
) -> CommandLine:
    """Return the command line of ``mgpu-check WORDS``: the user typed `typed`, and pytest gets `arguments`."""
    flags, theirs = ({word.partition("=")[0] for word in command_words} for command_words in (arguments, typed))
    return CommandLine(words, tuple(arguments), omits, frozenset(flags - theirs))


def asks_for_gpus(arguments: Sequence[str]) -> bool:
    """Return whether the command line or the environment sets the number of devices."""
    return _gives("gpus", arguments)


def on_all_gpus(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with ``--gpus`` set to all GPUs, unless the user has set the number."""
    if asks_for_gpus(arguments):
        return list(arguments)
    driver = launched_process.driver()  # knows the number of launched ranks, so that simulated devices work, too
    return ["--gpus=all" if driver is None else f"--gpus={driver.size}", *arguments]


def on_processors(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with a worker of pytest-xdist for each processor, if all checks run on simulated devices.

    A test on ranks seldom keeps two processors busy. Each worker has a simulated node of its own, so there are no more
    workers than memory for them. Their fork servers come from one keeper, so that torch is imported once. The user's
    ``-n`` counts, also 0. Few checks do not repay the start of workers, and some options need all tests in one process.
    """
    words = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *arguments]
    options = {word.partition("=")[0] if word.startswith("--") else word[:2] for word in words}
    by_name = any(not word.startswith("-") for word in arguments)
    if (
        not {"--simulate", "--simulate=cpu"}.intersection(words)
        or options & _IN_ONE_PROCESS
        or by_name
        or is_launched()
        or coverage_here() is not None
        or {"PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_TIMEOUT"} & set(os.environ)
    ):
        return list(arguments)
    workers = min(available_processors(), _MOST_WORKERS)
    gpus = [word.partition("=")[2] for word in words if word.startswith("--gpus=")][-1:]
    if not gpus or not gpus[0].isdigit():
        return list(arguments)
    if (memory := available_memory()) is not None:
        once, each = _MEMORY_OF_WORKER
        ranks = sum(range(1, int(gpus[0]) + 1))  # worlds of all sizes stay warm
        workers = min(workers, memory // (once + each * ranks))
    if workers < 2:
        return list(arguments)
    shared = ["--gpu-keep-warm=0"] if not _gives("gpu_keep_warm", arguments) and keeps_imports() else []
    return ["-n", str(workers), *shared, *arguments]


_IN_ONE_PROCESS = {
    *("-d", "-f", "-h", "-k", "-m", "-n", "-p", "-s", "-V"),
    *("--basetemp", "--capture", "--co", "--collect-only", "--dist", "--ff", "--gpu-replay", "--help", "--lf"),
    *("--hypothesis-show-statistics", "--log-cli-level", "--log-file", "--numprocesses", "--pdb", "--setup-show"),
    *("--sw", "--timeout", "--trace", "--version"),
}
"""Options that choose few checks, that name the number of workers, or that need all checks in pytest's process."""

_MEMORY_OF_WORKER = 2 << 30, 64 << 20
"""Bytes that a worker needs with its fork server, and those of each rank: several times what was measured."""

_MOST_WORKERS = 16


def at_standard(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with ``--gpu-level=standard``, which finds rare faults, unless the user has set the level."""
    return list(arguments) if _gives("gpu_level", arguments) else ["--gpu-level=standard", *arguments]


def _gives(name: str, arguments: Sequence[str]) -> bool:
    option = all_options()[name]
    also = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    present = any(argument.partition("=")[0] == option.flag for argument in [*arguments, *also])
    return present or option.variable in os.environ


_VALUED = {"-k": ", such as -k memory"}
for _option in all_options().values():
    if "metavar" in _option.command_line and "nargs" not in _option.command_line:
        _VALUED[_option.flag] = f": {_option.flag}={_option.command_line['metavar']}"
"""Options that need a value, each with the end of the message that asks for it."""

_SWITCHES = {option.flag for option in all_options().values() if "metavar" not in option.command_line}


def misuse(
    arguments: Sequence[str], own: Mapping[str, str] | None = None, own_switches: Collection[str] = ()
) -> str | None:
    """Return an error message if an option lacks its value, or has an empty or needless one; otherwise None.

    It also covers ``--simulate`` without the number of GPUs. An empty value is most often that of a variable of the
    shell that is not set: to ignore it would run another test than the one that was asked for. `own` has options of the
    command itself that need a value, each with an example of the value, and `own_switches` those without.
    """
    asking = {**_VALUED, **{flag: f", such as {flag}={example}" for flag, example in (own or {}).items()}}
    for argument, following in itertools.pairwise([*itertools.takewhile(lambda word: word != "--", arguments), "--"]):
        flag, equals, value = argument.partition("=")
        if flag in asking and not equals and following.startswith("-"):
            return f"{flag} needs a value{asking[flag]}"
        if flag in asking and not (value if equals else following) and flag != "-k":  # pytest takes -k '' for no -k
            return f"{flag} has an empty value; give one{asking[flag].removeprefix(',')}, or leave the option out"
        if (flag in _SWITCHES or flag in own_switches) and equals:
            return f"{flag} takes no value, and has {value!r}; give {flag} alone"
    simulated = any(argument.partition("=")[0] == "--simulate" for argument in arguments)
    if simulated and not asks_for_gpus(arguments) and launched_process.driver() is None:
        return "--simulate needs the number of GPUs, such as --gpus=4 --simulate"
    return None


def refuse_workers(config: pytest.Config, reason: str) -> None:
    """Raise UsageError if pytest-xdist is to run the tests of a command that needs them in one process."""
    if config.getoption("dist", "no") != "no":
        workers = config.getoption("numprocesses", None) or ""
        raise pytest.UsageError(f"{reason}: leave out -n {workers}".rstrip())


def names_a_check(argument: str, package: ModuleType = mgpu_check.suite) -> bool:
    """Return whether an argument names a file of the package, or a check in it: ``test_scatter.py::test_name``."""
    return argument.partition("::")[0] in files(package)


def files(package: ModuleType = mgpu_check.suite) -> list[str]:
    """Return the names of the test files of a package."""
    return sorted(_paths(package))


def _paths(package: ModuleType) -> dict[str, Path]:
    return {path.name: path for path in Path(package.__path__[0]).rglob("test_*.py")}


def run(
    arguments: Sequence[str],
    plugins: Sequence[Any],
    package: ModuleType = mgpu_check.suite,
    preload: Sequence[str] = (),
) -> int:
    """Run pytest on a package of tests, quietly. Do not read configuration from, or write to, the current directory.

    `preload`: modules that ranks import, besides those of the suite.
    """
    # The plugin is named explicitly, because PYTEST_DISABLE_PLUGIN_AUTOLOAD may be set.
    ours = ["-q", "-c", str(Path(package.__path__[0], "pytest.ini")), "-p", "mgpu_check", "-p", "no:cacheprovider"]
    paths = _paths(package)
    chosen = [
        word.replace(file, str(paths[file]), 1)
        if (file := word.partition("::")[0]) in paths and before != "-k"
        else word
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    named = {Path(word.partition("::")[0]) for word in chosen} & set(paths.values())
    preload = modules_of_ranks(named or paths.values()) if package is mgpu_check.suite else preload
    if chosen == list(arguments):
        ours += ["--pyargs", package.__name__]
    scratch = Scratch.new("suite")
    # Hypothesis stores tables there even without an example database (hypothesis/configuration.py, 6.170). Workers of
    # xdist inherit the variable.
    kept = os.environ.setdefault(_HYPOTHESIS_HOME, str(scratch.path))
    try:
        return int(pytest.main([*ours, *chosen], plugins=[_SuitePlugin(package, preload), *plugins]))
    finally:
        if kept == str(scratch.path):
            del os.environ[_HYPOTHESIS_HOME]
        scratch.remove()


class _SuitePlugin:
    """A pytest plugin for the process of a command, which `run` makes for one run of pytest.

    Rejects arguments that name no test file of `package`, with a clearer message than pytest's. Starts the fork server
    of a simulated node before the collection, so that both run side by side, unless no modules to `preload` are given.
    """

    def __init__(self, package: ModuleType, preload: Sequence[str]) -> None:
        self.package, self.preload = package, preload

    @pytest.hookimpl(trylast=True)  # after the plugin, which makes the session
    def pytest_configure(self, config: pytest.Config) -> None:
        for word in config.getoption("file_or_dir"):
            name = word.partition("::")[0]
            if not name or (not Path(config.invocation_params.dir, name).exists() and not _is_module(name)):
                raise pytest.UsageError(
                    f"mgpu-check: {word!r} is neither a file nor a module; choose one of "
                    f"{', '.join(files(self.package))}, or checks by -k NAME"
                )
        config.stash[SESSION].preload += self.preload
        config.stash[SESSION].has_own_nodes = self.package is mgpu_check.suite

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        config = session.config
        # Each worker of pytest-xdist starts its own.
        idle = config.option.collectonly or config.pluginmanager.has_plugin("dsession")
        if self.preload and not idle and config.stash[SESSION].settings.simulate == "cpu":
            config.stash[SESSION].pool.start()

    def pytest_collection_finish(self) -> None:
        freeze()  # collections would visit modules and tests, which stay, a hundred times


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
