"""Modules with changed texts: code that parses a message does not find it again.

`install` puts an import hook before Python's own. Of the modules that make messages about failures, and name mistakes,
it rewords every text of more than one word, each occurrence by itself, and adds words where values are put in. So two
texts that are written alike are not alike any more, and neither a regular expression nor a comparison finds in a
message what another place has written into it.

Unchanged: texts of torch (names that end in `_OF_TORCH`), values of a `Literal`, which
are data, regular expressions and code.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import random
import re
import string
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

REWORDED = (
    "mgpu_check.gates",
    "mgpu_check.diagnosis",
    "mgpu_check.compare",
    "mgpu_check.numerics.differences",
    "mgpu_check.engine.failures",
    "mgpu_check.engine.world",
    "mgpu_check.engine.world_processes",
    "mgpu_check.processes.collective_records",
)
KEPT = ("mgpu_check.compare.page",)  # what is between words there is markup
DATA = {"not comparable"}  # a kind of verdict, and a value of --json
CODE = {"compile", "eval", "exec"}
OF_TORCH = "_OF_TORCH"

# Two words, or one with what parts it from a value that is put in.
TEXT = re.compile(r"[A-Za-z]{2,}.*\s|\s.*[A-Za-z]{2,}", re.DOTALL)
WORD = re.compile(r"\{[^}]*\}|[A-Za-z]{2,}")


class Rewording(ast.NodeTransformer):
    """Rewords texts of a module.

    Attributes:
        count: of texts that were reworded.
    """

    def __init__(self, data: set[str], seed: int) -> None:
        self.data, self.count = data, 0
        self._random = random.Random(seed)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str) or node.value in self.data or not TEXT.search(node.value):
            return node
        self.count += 1
        return ast.copy_location(ast.Constant(WORD.sub(self._other, node.value)), node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        # Separators of values change, too: code can parse a message by its punctuation as well.
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                part.value = self.visit(part.value)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                self.count += 1
                words = WORD.sub(self._other, part.value)
                part.value = re.sub(" +", lambda space: f"{space[0]}{self._letters(3)} ", words)
        return node

    def _other(self, word: re.Match[str]) -> str:
        return word[0] if word[0].startswith("{") else self._letters(len(word[0]))

    def _letters(self, count: int) -> str:
        return "".join(self._random.choices(string.ascii_lowercase, k=count))

    def visit_Call(self, node: ast.Call) -> Any:
        function = node.func
        of_re = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "re"
        if of_re or (isinstance(function, ast.Name) and function.id in CODE):
            return node
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return node if any(name.endswith(OF_TORCH) for name in names) else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)  # a docstring


def literals(tree: ast.AST) -> set[str]:
    """The texts that are values of a `Literal`."""
    return {
        value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal"
        for value in ast.walk(node.slice)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def reworded(source: str, seed: int, data: Collection[str] = ()) -> ast.Module:
    """A module with other texts; `data` are those that stay, besides its own values of a `Literal`."""
    tree = ast.parse(source)
    changed: ast.Module = Rewording(literals(tree).union(data), seed).visit(tree)
    return ast.fix_missing_locations(changed)


class _Loader(importlib.machinery.SourceFileLoader):
    seed = 0

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = reworded(self.get_data(path).decode(), self.seed, DATA)
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        mine = any(fullname == name or fullname.startswith(name + ".") for name in REWORDED)
        if not mine or fullname in KEPT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        loader = _Loader(fullname, spec.loader.path)
        loader.seed = self.seed
        spec.loader = loader
        return spec


def install(seed: int) -> None:
    """Reword all modules that are imported from now on, also beside other import hooks."""
    early = [name for name in sys.modules if name.startswith(("mgpu_check.gates", "mgpu_check.diagnosis"))]
    assert early == [], f"imported already: {early}"
    sys.meta_path.insert(0, _Finder(seed))
