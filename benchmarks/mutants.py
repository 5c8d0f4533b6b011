"""Small changes of torch's own Python code, which a rank makes in memory: see `mutation.py` beside it."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import marshal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

AREAS = {
    "collectives": "distributed/distributed_c10d distributed/nn/functional distributed/_functional_collectives"
    " distributed/device_mesh",
    "FSDP2": "distributed/fsdp/_fully_shard/*",
    "FSDP1": "distributed/fsdp/[f_a]*",
    "DTensor": "distributed/tensor/* distributed/tensor/_ops/* distributed/tensor/experimental/_func_map",
    "tensor parallel": "distributed/tensor/parallel/*",
    "pipelining": "distributed/pipelining/[ms_]*",
    "checkpoint": "distributed/checkpoint/[dfopstu_]*",
    "hooks and join": "distributed/algorithms/* distributed/algorithms/ddp_comm_hooks/[_d]*",
    "DataParallel and DDP": "nn/parallel/* nn/modules/_functions",
    "devices": "cuda/__init__ cuda/streams cuda/random cuda/graphs cuda/memory utils/checkpoint",
}
"""The files of torch that are mutated, as patterns without their suffix. Optimizers and GradScaler are left out."""

_SKIPPED = (
    "debug logger logging _log_ warn __repr__ __str__ _repr _visualiz symm_mem strategy_validation _ir hf_ huggingface"
    " compil dynamo meta_tensor jit rpc mpi_ is_ucc profil record_function quantized_hf trace_utils exec_order datapipes"
    " __hash__ flight_rec tracing async_process breakpoint shm _annotat gds tunable sanitizer jiterator memory_viz"
    " _device_limits nvtx unpickl __getattr__ deprecat xccl type_check fake_tensor faketensor"
)
"""Parts of names of files and functions, and of lines, whose mutants change texts, logs or other backends."""

NOT_PLANTED = "the mutant is not planted"

_COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_COMPARED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}
_COMPUTED |= {ast.FloorDiv: ast.Mult}
_CHECKS = ("isinstance", "cast", "getattr", "hasattr")


class Mutant(NamedTuple):
    """A change of one function: variant `variant` of its node number `node`, in the order of `ast.walk`.

    Attributes:
        line: of the node.
        first, last: lines of the statement; a check that executes one of them executes the mutant.
    """

    area: str
    module: str
    function: str
    node: int
    variant: int
    line: int
    first: int
    last: int
    what: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: {self.what}"

    @property
    def places(self) -> list[tuple[str, int]]:
        """The module, with each line of the statement."""
        return [(self.module, line) for line in range(self.first, self.last + 1)]


def mutants() -> Iterator[Mutant]:
    """Yield every mutant of the installed torch."""
    for path, (area, module) in _files().items():
        for name, function in _functions(_tree(path).body):
            number = {id(node): at for at, node in enumerate(ast.walk(function))}
            for statement, own in _statements(function):
                end = max((part.end_lineno or 0 for part in own), default=statement.lineno)
                last = end if hasattr(statement, "body") else statement.end_lineno or end
                for node in [statement, *(found for part in own for found in _expressions(part))]:
                    place = number[id(node)], getattr(node, "lineno", statement.lineno)
                    for at, (what, _) in enumerate(_changes(node)):
                        words = " ".join(what.split())[:150]
                        yield Mutant(area, module, name, place[0], at, place[1], statement.lineno, last, words)


@functools.cache
def _files() -> dict[str, tuple[str, str]]:
    """Return the path of each mutated file -> its area and its module."""
    root = Path(torch.__file__).parent
    found = {}
    for area, patterns in AREAS.items():
        for path in sorted({path for pattern in patterns.split() for path in root.glob(pattern + ".py")}):
            if not _skipped(path.stem):
                found[str(path)] = area, ".".join(("torch", *path.relative_to(root).with_suffix("").parts))
    return found


@functools.cache
def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text())


def _skipped(name: str) -> bool:
    return any(part in name.lower() for part in _SKIPPED.split())


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not _skipped(node.name):
            yield prefix + node.name, node


def _statements(function: ast.FunctionDef) -> Iterator[tuple[ast.stmt, list[ast.expr]]]:
    """Yield each statement with its own expressions. Leave out texts, checks of arguments, and calls that log."""
    todo: list[Any] = list(function.body)
    while todo:
        statement = todo.pop(0)
        if isinstance(statement, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(statement, ast.stmt) and _skipped(ast.unparse(statement).partition("\n")[0]):
            continue
        parts = list(ast.iter_child_nodes(statement))
        todo += [part for part in parts if isinstance(part, (ast.stmt, ast.ExceptHandler))]
        refuses = isinstance(statement, ast.If) and all(isinstance(part, ast.Raise) for part in statement.body)
        if isinstance(statement, ast.stmt) and not refuses:
            parts = [part.context_expr if isinstance(part, ast.withitem) else part for part in parts]
            yield statement, [part for part in parts if isinstance(part, ast.expr)]


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, (ast.JoinedStr, ast.Lambda)):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _expressions(child)


_Change = Callable[[Any], ast.AST | None]
"""Changes a node, or returns a node to replace it."""


def _changes(node: Any) -> Iterator[tuple[str, _Change]]:
    """Yield the variants of a node, with a description."""
    text = ast.unparse
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield f"not ({text(node.test)})", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        new = _COMPARED[type(node.ops[0])]
        yield f"{text(node)} by {new.__name__}", lambda n: n.ops.__setitem__(0, new())
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _COMPUTED:
        other = _COMPUTED[type(node.op)]
        yield f"{text(node)} by {other.__name__}", lambda n: setattr(n, "op", other())
    if isinstance(node, ast.BoolOp):
        swap = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{text(node)} by {swap.__name__}", lambda n: setattr(n, "op", swap())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield f"{text(node)} without its sign", lambda n: n.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        value = not node.value if node.value in (True, False) and type(node.value) is bool else node.value + 1
        yield f"{node.value} is {value}", lambda n: setattr(n, "value", value)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == 0:
        yield f"{text(node)} is the last", lambda n: setattr(n.slice, "value", -1)
    if isinstance(node, ast.For):
        yield f"only the first of {text(node.iter)}", lambda n: n.body.append(ast.Break())
    if isinstance(node, ast.Call):
        yield from _changes_of_call(node)
    targets = [node.target] if isinstance(node, ast.AugAssign) else getattr(node, "targets", [])
    stored = any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets)
    if stored or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield f"without {text(node)}", lambda n: ast.Pass()


def _changes_of_call(node: ast.Call) -> Iterator[tuple[str, _Change]]:
    function = ast.unparse(node.func)
    for at, keyword in enumerate(node.keywords):
        if keyword.arg:
            yield f"{function} without {ast.unparse(keyword)}", functools.partial(_without_keyword, at=at)
    starred = any(isinstance(argument, ast.Starred) for argument in node.args[:2])
    if len(node.args) > 1 and not starred and function not in _CHECKS:
        yield f"{ast.unparse(node)} with swapped arguments", lambda n: n.args.__setitem__(slice(2), n.args[1::-1])


def _without_keyword(node: ast.Call, at: int) -> None:
    del node.keywords[at]


def compiled(mutant: Mutant) -> bytes:
    """Return what `planted` plants; b"" if the mutant has the code of the original, or does not compile."""
    path = next(path for path, (_, module) in _files().items() if module == mutant.module)
    function = dict(_functions(_tree(path).body))[mutant.function]
    changed = copy.deepcopy(function)
    node = list(ast.walk(changed))[mutant.node]
    new = list(_changes(node))[mutant.variant][1](node)
    for parent in ast.walk(changed) if new is not None else ():
        for field, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(part is node for part in value):
                value[:] = [new if part is node else part for part in value]
    try:
        real = _code(path, mutant.function, function)
        code = _code(path, mutant.function, changed)
        lacking = sorted({*real.co_freevars} - {*code.co_freevars})
        # An unreachable use keeps the free variables the same, so that the code fits the function.
        code = _code(path, mutant.function, changed, f"if 0: {', '.join(lacking)}") if lacking else code
    except (SyntaxError, ValueError):
        return b""
    if marshal.dumps(real) == marshal.dumps(code) or real.co_freevars != code.co_freevars:
        return b""
    return marshal.dumps((mutant.module, path, code))


def _code(path: str, name: str, function: ast.FunctionDef, first: str = "") -> CodeType:
    whole: Any = copy.deepcopy(function)
    whole.decorator_list = []
    whole.body[:0] = ast.parse(first).body
    for owner in reversed(name.split(".")[:-1]):
        whole = ast.ClassDef(owner, [], [], [whole], [])
    future = [one for one in _tree(path).body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
    found = compile(ast.fix_missing_locations(ast.Module([*future, whole], [])), path, "exec")
    while found.co_qualname != name:
        found = next(one for one in found.co_consts if isinstance(one, CodeType) and name.startswith(one.co_qualname))
    return found


@contextlib.contextmanager
def planted(file: str) -> Iterator[None]:
    """Give live functions of this process the mutated code that `file` has.

    Raises:
        LookupError: there is no function with the code of the original, as where the simulated node has its own.
    """
    functions, code = _loaded(file)
    before = [function.__code__ for function in functions]
    try:
        for function in functions:
            function.__code__ = code
        yield
    finally:
        for function, old in zip(functions, before, strict=True):
            function.__code__ = old


@functools.cache
def _loaded(file: str) -> tuple[list[FunctionType], CodeType]:
    module, path, code = marshal.loads(Path(file).read_bytes())
    found: Any = importlib.import_module(module)
    for part in code.co_qualname.split("."):
        found = vars(found).get(part)
    functions = list({id(one): one for one in _live(found, path, code.co_qualname)}.values())
    if not functions:
        raise LookupError(f"{NOT_PLANTED}: no live function has the code of {module}.{code.co_qualname}")
    return functions, code


def _live(found: Any, path: str, name: str, depth: int = 0) -> Iterator[FunctionType]:
    """Yield the functions with this code within decorators, methods and properties."""
    if isinstance(found, FunctionType) and (found.__code__.co_filename, found.__code__.co_qualname) == (path, name):
        yield found
    inside = [getattr(found, part, None) for part in ("__func__", "__wrapped__", "func", "fget", "fset")]
    for cell in getattr(found, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            inside.append(cell.cell_contents)
    for part in inside if depth < 6 and not isinstance(found, type) else ():
        if callable(part) or isinstance(part, (property, staticmethod, classmethod)):
            yield from _live(part, path, name, depth + 1)


_seen: set[tuple[str, str, int]] = set()


@contextlib.contextmanager
def traced(file: str) -> Iterator[None]:
    """Append the lines of the mutated files that this process executes to `file`."""
    modules = _files()
    with open(file, "ab", buffering=0) as out:

        def line(frame: Any, event: str, arg: object) -> Any:
            key = file, frame.f_code.co_filename, frame.f_lineno
            if key not in _seen:
                _seen.add(key)
                out.write(f"{modules[key[1]][1]} {key[2]}\n".encode())
            return line

        def call(frame: Any, event: str, arg: object) -> Any:
            return line(frame, event, arg) if frame.f_code.co_filename in modules else None

        threading.settrace(call)
        sys.settrace(call)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
