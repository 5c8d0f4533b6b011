"""Read what `mgpu-check init` needs of one Python file: its imports and calls. The file is not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_TRAINER = re.compile(r"\w*Trainer")
_TRAINS = re.compile(r"(.*\.)?(\w*trainer\.(fit|train)|LightningCLI)", re.IGNORECASE)
_RANKS = re.compile(r"world|n_?gpus?|num_gpus|nprocs|num_processes|replicas|ranks", re.IGNORECASE)


@dataclass(frozen=True)
class ScriptArgument:
    """An argument of a script, such as "--batch-size", or "data.batch_size" of Hydra.

    Attributes:
        required: the script does not start without it.
        integer: its values are integers.
        names: all its names, as "-b" and "--batch-size".
        subcommand: it is the name of a subcommand, which has further arguments.
    """

    name: str
    required: bool = False
    integer: bool = False
    names: tuple[str, ...] = ()
    subcommand: bool = False

    def is_in(self, words: Sequence[str]) -> bool:
        """Return whether a command line sets this argument."""
        names = {self.name, *self.names}
        short = tuple(name for name in names if len(name) == 2 and name[0] == "-")  # their values need no space: -b32
        # Hydra adds a key by + or ++.
        return any(word.lstrip("+").partition("=")[0] in names or word.startswith(short) for word in words)

    @property
    def variable(self) -> str:
        """The variable that it sets, in lower case: "batch_size"."""
        return self.name.lstrip("-").rpartition(".")[2].replace("-", "_").lower()


@dataclass
class SourceFile:
    """The facts of one file that a survey needs."""

    imports: set[str] = field(default_factory=set)
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
    made, tree = SourceFile(), ast.parse(source)
    own = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    guarded, outside = False, set()
    for node, place in _nodes(tree):
        if isinstance(node, ast.Import):
            made.imports |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            made.imports |= {module} | {f"{module}.{name.name}".lstrip(".") for name in node.names}
            made.relative |= node.level > 0
        elif isinstance(node, ast.ClassDef):
            made.classes.add(node.name)
        elif isinstance(node, ast.Call):
            name = _name(node.func)
            made.calls |= {name, name.rpartition(".")[2]}
            if place != "function":
                outside.add(name.rpartition(".")[2])
            if name == "hydra.main":
                given = {word.arg: _text(word.value) for word in node.keywords}
                made.configuration = (given.get("config_path") or "", given.get("config_name") or "config")
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
            numerator, by = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
            if _RANKS.search(_name(by)):
                made.divided.add(_name(numerator).rpartition(".")[2].lower())
        guarded |= place == "main"
    made.imports.discard("")
    made.starts = guarded or (trains(made.calls) and not outside.isdisjoint({*own, "backward", "fit", "train"}))
    if "exec" in made.calls:  # of a file that sets module variables from the command line, as nanoGPT's configurator
        made.variables += [
            ScriptArgument(f"--{name.id}")
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.BinOp))
            for name in node.targets
            if isinstance(name, ast.Name)
        ]
    return made


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield all nodes in their order, each with its place: "module", "main" in its block, or "function"."""
    waiting: list[tuple[ast.AST, str]] = [(tree, "module")]
    while waiting:
        node, place = waiting.pop()
        yield node, place
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            place = "function"
        elif isinstance(node, ast.If) and place == "module" and _is_main(node.test):
            place = "main"
        waiting += [(child, place) for child in reversed(list(ast.iter_child_nodes(node)))]


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
