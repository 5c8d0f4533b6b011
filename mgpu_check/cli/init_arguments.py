"""Learn the arguments of a script for `mgpu-check init`: run the script until it parses its command line.

Only a run shows which of the parsers in a repository a script uses. The script runs in a Python of its own, which ends
at the first parser, and before training. `main` is what that Python runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mgpu_check.cli.init_source import ScriptArgument
from mgpu_check.processes.launched import VARIABLES, simulating, without_launcher
from mgpu_check.processes.python_path import with_this_package

_FILE = "_MGPU_CHECK_ARGUMENTS"
"""The variable with the file for the arguments; the start-up code then ends the script before it trains."""
_TIMEOUT = 60.0  # seconds: imports from a cold disk take long


def learned(started: str, given: Sequence[str]) -> tuple[tuple[ScriptArgument, ...], str]:
    """Run a script up to its first parser.

    Args:
        started: the script, as "train.py", "-m package.train" or an installed program.
        given: its arguments.

    Returns:
        The arguments that its parser takes; and why they are unknown, or "".
    """
    words = shlex.split(started) if started.startswith("-m ") else [started]
    launched = {name: text.format(rank=0, world=1) for name, text in VARIABLES["torchrun"].items()}
    environment = simulating({**without_launcher(os.environ), **launched}, 1)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "arguments")
        code = with_this_package("from mgpu_check.cli.init_arguments import main; main()")
        environment[_FILE] = str(file)
        command = [sys.executable, "-P", "-c", code, *words, *given]
        try:
            ran = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return (), f"it did not parse them within {_TIMEOUT:g} s"
        if file.exists():
            options = tuple(ScriptArgument(**argument) for argument in json.loads(file.read_text(encoding="utf-8")))
            return options, "" if options else "no parser ran before it ended or began to train"
        last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return (), f"it ended before it parsed them: {''.join(last) or f'exit code {ran.returncode}'}"


_arguments: dict[str, ScriptArgument] = {}


def main() -> None:
    """Run the script of this process's command line, and write its arguments to a file."""
    parsers: Any = argparse.ArgumentParser
    parsers.parse_args = _parsing(parsers.parse_args, last=True)
    parsers.parse_known_args = _parsing(parsers.parse_known_args, last=False)
    with contextlib.suppress(ImportError):
        importlib.import_module("click").Command.main = _parse_by_click
    try:
        _run(sys.argv[1:])
    except SystemExit:  # of a parser
        if not _arguments:
            raise
    _end()


def end_before_training() -> None:
    """End this process when the script that it runs begins to train."""
    import torch

    replaced: Any = torch
    replaced.optim.Optimizer.__init__ = replaced.Tensor.backward = replaced.distributed.init_process_group = _end


def _end(*_: object, **__: object) -> NoReturn:
    with open(os.environ[_FILE], "w", encoding="utf-8") as output:
        json.dump([vars(argument) for argument in _arguments.values()], output)
    os._exit(0)


def _parsing(original: Callable[..., Any], last: bool) -> Callable[..., Any]:
    def parse(parser: Any, args: Any = None, namespace: Any = None) -> Any:
        if args is None or [*args] == sys.argv[1:]:
            _arguments.update((argument.name, argument) for argument in _of_argparse(parser))
            if last:
                _end()
        return original(parser, args, namespace)

    return parse


def _parse_by_click(command: Any, *_: object, **__: object) -> NoReturn:
    _arguments.update((argument.name, argument) for argument in _of_click(command))
    _end()


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        path = words[0] if Path(words[0]).exists() else shutil.which(words[0]) or words[0]
        sys.argv[:] = [path, *words[1:]]
        sys.path.insert(0, str(Path(path).resolve().parent))
        runpy.run_path(path, run_name="__main__")


def _of_argparse(parser: argparse.ArgumentParser) -> Iterator[ScriptArgument]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield ScriptArgument("", subcommand=True)
        elif action.nargs != 0:
            integer = action.type is int or (action.type is None and type(action.default) is int)
            yield _argument(action.option_strings or [action.dest], action.required, integer)


def _of_click(command: Any) -> Iterator[ScriptArgument]:
    if hasattr(command, "commands"):
        yield ScriptArgument("", subcommand=True)
    for parameter in command.params:
        if not getattr(parameter, "is_flag", False) and not getattr(parameter, "count", False):
            yield _argument(parameter.opts, parameter.required, parameter.type.name == "integer")


def _argument(names: Sequence[str], required: bool, integer: bool) -> ScriptArgument:
    name = max(names, key=lambda word: (word.startswith("--"), len(word)))
    return ScriptArgument(name, required, integer, tuple(names))
