"""Learn the arguments of a script for `mgpu-check init`, from its source and by running it.

Of one Python file its imports and calls are read; the file is not run. Only a run shows which of the parsers in a
repository a script uses. The script runs in a Python of its own, which ends at the first parser, and before training.
`main` is what that Python runs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from mgpu_check.processes.environments import VARIABLES, simulating, with_this_package, without_launcher

_TRAINER = re.compile(r"\w*Trainer")
_TRAINS = re.compile(r"(.*\.)?(\w*trainer\.(fit|train)|LightningCLI)", re.IGNORECASE)
_OF_ALL = re.compile(r"\b(total|global|all (gpus|ranks|devices|processes|workers))\b", re.IGNORECASE)
_OF_ONE = re.compile(r"\b(per|each|every|one)[ -](gpu|rank|device|process|worker)", re.IGNORECASE)
_RANKS = re.compile(r"world|n_?gpus?|num_gpus|nprocs|num_processes|replicas|ranks", re.IGNORECASE)


@dataclass(frozen=True)
class ScriptArgument:
    """An argument of a script, such as "--batch-size", or "data.batch_size" of Hydra."""

    name: str
    required: bool = False  # the script does not start without it
    integer: bool = False  # its values are integers
    names: tuple[str, ...] = ()  # all its names, as "-b" and "--batch-size"
    subcommand: bool = False  # it is the name of a subcommand, which has further arguments
    choices: tuple[str, ...] = ()  # the words that it takes, if its parser lists them
    of_all_ranks: bool = False  # its help says that it counts for all ranks together
    unset: bool = False  # its default is for users to replace, such as "/path/to/imagenet"

    def is_in(self, words: Sequence[str]) -> bool:
        """Return whether a command line sets this argument."""
        spellings = {self.name, *self.names}
        # Their values need no space: -b32.
        short = tuple(name for name in spellings if len(name) == 2 and name[0] == "-")
        # Hydra adds a key by + or ++.
        return any(word.lstrip("+").partition("=")[0] in spellings or word.startswith(short) for word in words)

    @property
    def variable(self) -> str:
        """The variable that it sets, in lower case: "batch_size"."""
        return self.name.lstrip("-").rpartition(".")[2].replace("-", "_").lower()


@dataclass
class SourceFile:
    """The facts of one file that a survey needs."""

    imports: set[str] = field(default_factory=set)
    needs: set[str] = field(default_factory=set)  # absolute imports without which the file cannot be imported
    calls: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    variables: list[ScriptArgument] = field(default_factory=list)  # that the command line sets
    configuration: tuple[str, str] | None = None  # directory and name of Hydra's
    divided: set[str] = field(default_factory=set)  # names that the code divides by the number of ranks
    relative: bool = False  # has relative imports
    # running the file starts something: it has a block of `__main__`, or calls its own functions outside of functions
    starts: bool = False


def trains(calls: set[str]) -> bool:
    """Return whether these calls train: a backward pass and a step of an optimizer, or a Trainer."""
    if {"backward", "step"} <= calls or any(map(_TRAINS.fullmatch, calls)):
        return True
    return not calls.isdisjoint({"fit", "train"}) and any(map(_TRAINER.fullmatch, calls))


def facts(source: bytes) -> SourceFile:
    """Return the facts of a file.

    Raises:
        SyntaxError, ValueError, RecursionError: the file is of another Python, or no text.
    """
    source_file, tree = SourceFile(), ast.parse(source)
    own = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            source_file.needs |= {name.name for name in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            source_file.needs.add(statement.module)
    guarded, outside = False, set()
    for node, scope in _nodes(tree):
        if isinstance(node, ast.Import):
            source_file.imports |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            source_file.imports |= {module} | {f"{module}.{name.name}".lstrip(".") for name in node.names}
            source_file.relative |= node.level > 0
        elif isinstance(node, ast.ClassDef):
            source_file.classes.add(node.name)
        elif isinstance(node, ast.Call):
            name = _name(node.func)
            source_file.calls |= {name, name.rpartition(".")[2]}
            if scope != "function":
                outside.add(name.rpartition(".")[2])
            if name == "hydra.main":
                keywords = {word.arg: _text(word.value) for word in node.keywords}
                source_file.configuration = (keywords.get("config_path") or "", keywords.get("config_name") or "config")
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
            numerator, by = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
            if _RANKS.search(_name(by)):
                source_file.divided.add(_name(numerator).rpartition(".")[2].lower())
        guarded |= scope == "main"
    source_file.imports.discard("")
    called = not outside.isdisjoint({*own, "backward", "fit", "train"})
    source_file.starts = guarded or (trains(source_file.calls) and called)
    if "exec" in source_file.calls:  # sets module variables from the command line, as nanoGPT's configurator
        assigned = (node for node in tree.body if isinstance(node, ast.Assign))
        plain = (node for node in assigned if isinstance(node.value, (ast.Constant, ast.BinOp)))
        targets = (name for node in plain for name in node.targets if isinstance(name, ast.Name))
        source_file.variables += [ScriptArgument(f"--{name.id}") for name in targets]
    return source_file


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield all nodes in their order, each with its place: "module", "main" in its block, or "function"."""
    waiting: list[tuple[ast.AST, str]] = [(tree, "module")]
    while waiting:
        node, scope = waiting.pop()
        yield node, scope
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            scope = "function"
        elif isinstance(node, ast.If) and scope == "module" and _is_main(node.test):
            scope = "main"
        waiting += [(child, scope) for child in reversed(list(ast.iter_child_nodes(node)))]


def _is_main(test: ast.expr) -> bool:
    sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
    return any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _name(node: ast.expr) -> str:
    """Return the dotted name of an expression: "args.batch_size", or "dist.get_world_size" for its call."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


_FILE = "_MGPU_CHECK_ARGUMENTS"
"""The variable with the file for the arguments; the start-up code then ends the script before it trains."""
_UNSET = re.compile(r"path/to|\byour\b|<\w+>", re.IGNORECASE)
_MOST_CHOICES = 1000  # of an argument: more are a range of numbers
_TIMEOUT = 60.0  # seconds: imports from a cold disk take long


def learned(started: str, arguments: Sequence[str]) -> tuple[tuple[ScriptArgument, ...], str | None]:
    """Run a script up to its first parser: "train.py", "-m package.train" or an installed program.
    Return the arguments that its parser takes; and why they are unknown, or None."""
    words = shlex.split(started) if started.startswith("-m ") else [started]
    launched = {name: text.format(rank=0, world=1) for name, text in VARIABLES["torchrun"].items()}
    environment = simulating({**without_launcher(os.environ), **launched}, 1)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "arguments")
        code = with_this_package("from mgpu_check.cli.init_arguments import main; main()")
        environment[_FILE] = str(file)
        command = [sys.executable, "-P", "-c", code, *words, *arguments]
        try:
            ran = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return (), f"it did not parse them within {_TIMEOUT:g} s"
        if file.exists():
            options = tuple(ScriptArgument(**argument) for argument in json.loads(file.read_text(encoding="utf-8")))
            return options, None if options else "no parser ran before it ended or began to train"
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
        words = sys.argv[1:]
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            path = words[0] if Path(words[0]).exists() else shutil.which(words[0]) or words[0]
            sys.argv[:] = [path, *words[1:]]
            sys.path.insert(0, str(Path(path).resolve().parent))
            runpy.run_path(path, run_name="__main__")
    except BaseException:  # such as that of a parser, or of missing data
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


def _of_argparse(parser: argparse.ArgumentParser) -> Iterator[ScriptArgument]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield ScriptArgument("", subcommand=True)
        elif action.nargs != 0:
            integer = action.type is int or (action.type is None and type(action.default) is int)
            spellings = action.option_strings or [action.dest]
            argument = _argument(spellings, action.required, integer, action.choices, action.help)
            yield replace(argument, unset=_UNSET.search(str(action.default)) is not None)


def _of_click(command: Any) -> Iterator[ScriptArgument]:
    if hasattr(command, "commands"):
        yield ScriptArgument("", subcommand=True)
    for parameter in command.params:
        if not getattr(parameter, "is_flag", False) and not getattr(parameter, "count", False):
            kind = parameter.type
            choices, text = getattr(kind, "choices", None), getattr(parameter, "help", None)
            yield _argument(parameter.opts, parameter.required, kind.name == "integer", choices, text)


def _argument(
    spellings: Sequence[str], required: bool, integer: bool, choices: object, text: str | None
) -> ScriptArgument:
    name = max(spellings, key=lambda word: (word.startswith("--"), len(word)))
    words = tuple(map(str, choices)) if isinstance(choices, Collection) and len(choices) < _MOST_CHOICES else ()
    of_all = bool(_OF_ALL.search(text or "")) and not _OF_ONE.search(text or "")
    return ScriptArgument(name, required, integer, tuple(spellings), choices=words, of_all_ranks=of_all)
