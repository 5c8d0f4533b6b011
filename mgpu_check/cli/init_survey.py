"""Survey a repository for `mgpu-check init`: the scripts that train, and the arguments that a comparison needs.

The files are parsed, never imported or run.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_MOST_FILES = 5000
_MOST_BYTES = 1 << 20
_NO_CODE_OF_THE_USER = {"build", "dist", "docs", "node_modules", "site-packages", "third_party", "vendor"}
_NO_SCRIPTS = re.compile(r"(test_.*|.*_test|conftest|setup|noxfile|__init__)\.py")
_TRAINERS = {"Trainer", "SFTTrainer", "LightningCLI"}
_PARALLEL = {
    "init_process_group": "init_process_group",
    "DistributedDataParallel": "DistributedDataParallel",
    "DDP": "DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDP": "FSDP",
    "fully_shard": "fully_shard",
    "parallelize_module": "parallelize_module",
    "init_device_mesh": "init_device_mesh",
    "Accelerator": "accelerate",
    "Fabric": "Lightning Fabric",
    "Trainer": "a Trainer",
    "deepspeed.initialize": "DeepSpeed",
}
_RANKS = re.compile(r"world|n_?gpus?|num_gpus|nprocs|num_processes|replicas|ranks", re.IGNORECASE)
_LIKELY_NAME = re.compile(r"(pre|fine)?_?-?(train|main|run|tune)", re.IGNORECASE)


@dataclass(frozen=True)
class ScriptArgument:
    """An argument of a script, such as "--batch-size", and whether the script does not start without it."""

    name: str
    required: bool = False

    @property
    def variable(self) -> str:
        """The variable that it sets, in lower case: "batch_size"."""
        return self.name.lstrip("-").replace("-", "_").lower()


@dataclass
class _File:
    """The facts of one file that a survey needs."""

    imports: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    options: list[ScriptArgument] = field(default_factory=list)
    divided: set[str] = field(default_factory=set)  # names that the code divides by the number of ranks
    guarded: bool = False  # has `if __name__ == "__main__"`
    trains_when_run: bool = False  # calls `backward` outside of functions

    @property
    def trains(self) -> bool:
        return not self.calls.isdisjoint({"backward", *_TRAINERS})


@dataclass(frozen=True)
class TrainingScript:
    """A script that trains.

    Attributes:
        path: relative to the repository.
        parallel: what it uses on several devices, such as "DistributedDataParallel"; empty for one device.
        options: its arguments that are literals in the source.
        divided: names that the code divides by the number of ranks, in lower case.
        training_arguments: the `TrainingArguments` of transformers read its arguments.
        rank: how likely it is the script that the user means; the highest comes first.
    """

    path: Path
    parallel: tuple[str, ...]
    options: tuple[ScriptArgument, ...]
    divided: frozenset[str]
    training_arguments: bool
    rank: int

    @property
    def required(self) -> tuple[str, ...]:
        """The names of arguments without which the script does not start, apart from those of launchers."""
        return tuple(option.name for option in self.options if option.required and "local" not in option.name)


@dataclass(frozen=True)
class Survey:
    """The scripts of a repository that train.

    Attributes:
        files: number of files that were read.
        entries: the scripts, the likeliest first.
        unread: number of files that Python cannot parse.
    """

    files: int
    entries: tuple[TrainingScript, ...]
    unread: int = 0


def survey(root: Path) -> Survey:
    """Return the survey of a repository."""
    files: dict[Path, _File] = {}
    unread = 0
    for path in _python_files(root):
        try:
            files[path] = _facts(ast.parse((root / path).read_bytes()))
        except (SyntaxError, ValueError, OSError, RecursionError):  # of another Python, or no text
            unread += 1
    modules = {".".join(path.with_suffix("").parts): path for path in files}
    entries = [entry for path in files if (entry := _entry(path, files, modules)) is not None]
    return Survey(len(files), tuple(sorted(entries, key=lambda entry: (-entry.rank, str(entry.path)))), unread)


def _python_files(root: Path) -> Iterator[Path]:
    count = 0
    for directory, names, found in os.walk(root):
        names[:] = sorted(
            name
            for name in names
            if not name.startswith(".")
            and name not in _NO_CODE_OF_THE_USER
            and not Path(directory, name, "pyvenv.cfg").exists()
        )
        for name in sorted(found):
            path = Path(directory, name)
            if name.endswith(".py") and path.stat().st_size <= _MOST_BYTES and count < _MOST_FILES:
                count += 1
                yield path.relative_to(root)


def _entry(path: Path, files: Mapping[Path, _File], modules: Mapping[str, Path]) -> TrainingScript | None:
    own = files[path]
    if _NO_SCRIPTS.fullmatch(path.name) or "tests" in path.parts or not (own.guarded or own.trains_when_run):
        return None
    used = [own, *(files[other] for other in _reached(path, files, modules))]
    if not any(file.trains for file in used):
        return None
    calls = set().union(*(file.calls for file in used))
    parallel = tuple(dict.fromkeys(shown for name, shown in _PARALLEL.items() if name in calls))
    options = {option.name: option for file in reversed(used) for option in file.options}
    return TrainingScript(
        path,
        parallel,
        tuple(options.values()),
        frozenset().union(*(file.divided for file in used)),
        "HfArgumentParser" in calls,
        rank=4 * bool(parallel) + 2 * own.trains + 2 * bool(_LIKELY_NAME.match(path.stem)) - len(path.parts),
    )


def _reached(path: Path, files: Mapping[Path, _File], modules: Mapping[str, Path]) -> list[Path]:
    """Return the files of the repository that a script imports, directly or not, in the order of their discovery."""
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        at = waiting.pop(0)
        package = at.parent.parts
        for name in sorted(files[at].imports):
            # As written, beside the script, and in each directory above it: a script's own directory is on its path.
            for depth in range(len(package), -1, -1):
                other = modules.get(".".join([*package[:depth], name]))
                other = other or modules.get(".".join([*package[:depth], name, "__init__"]))
                if other is not None and other != path and other not in found:
                    found[other] = None
                    waiting.append(other)
                if other is not None:
                    break
    return list(found)


def _facts(tree: ast.Module) -> _File:
    made = _File()
    for node, outside in _nodes(tree):
        if isinstance(node, ast.Import):
            made.imports |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            made.imports |= {module} | {f"{module}.{name.name}".lstrip(".") for name in node.names}
        elif isinstance(node, ast.Call):
            _call(node, made, outside)
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
            numerator, by = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
            if _RANKS.search(_name(by)):
                made.divided.add(_name(numerator).rpartition(".")[2].lower())
        elif isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
            made.guarded = True
    made.imports.discard("")
    if "exec" in made.calls:  # of a file that sets module variables from the command line, as nanoGPT's configurator
        made.options += [
            ScriptArgument(f"--{name.id}")
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.BinOp))
            for name in node.targets
            if isinstance(name, ast.Name)
        ]
    return made


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all nodes, each with whether it runs when the file is run: it is outside of functions."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, True)]
    while waiting:
        node, outside = waiting.pop()
        yield node, outside
        outside = outside and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        waiting += [(child, outside) for child in ast.iter_child_nodes(node)]


def _call(node: ast.Call, made: _File, outside: bool) -> None:
    name = _name(node.func)
    last = name.rpartition(".")[2]
    made.calls |= {name, last}
    if last == "backward" and outside:
        made.trains_when_run = True
    adds = last == "add_argument" or name in ("click.option", "click.argument")
    if adds and (option := _option(node, positional=name != "click.option")) is not None:
        made.options.append(option)


def _option(node: ast.Call, positional: bool) -> ScriptArgument | None:
    names = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    if not names:
        return None
    given = {word.arg: word.value for word in node.keywords if word.arg}
    name = max(names, key=lambda word: (word.startswith("--"), len(word)))
    if not name.startswith("-"):
        optional = _literal(given.get("nargs")) in ("?", "*") or _literal(given.get("required")) is False
        return ScriptArgument(name, positional and not optional and "default" not in given)
    return ScriptArgument(name, _literal(given.get("required")) is True)


def _literal(node: ast.expr | None) -> object:
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _name(node: ast.expr) -> str:
    """Return the dotted name of an expression: "args.batch_size", or "dist.get_world_size" for its call."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""
