"""Try one case of a gate on ranks with different hash seeds, as torchrun starts them, if the code under test uses sets.

The ranks of a gate are forks of one interpreter, so all of them iterate over a set of texts in the same order. Whether
code may depend on the order of a set is seen in its bytecode. The search covers the functions that the user passes to
a gate, and the functions and classes of the user's own modules that they name. It misses sets that an installed
package returns, functions that are looked up by a string (`getattr`), and objects whose class is not named. Imports no
torch.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from mgpu_check.diagnosis.evidence import HashSeeds
from mgpu_check.diagnosis.report import Report
from mgpu_check.errors import CheckFailure, RankFailure, RankHang, ScalingMismatch
from mgpu_check.gates.gate_arguments import RanksFixture, first_line
from mgpu_check.processes import environments
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.rank_lists import few
from mgpu_check.processes.tracebacks import is_engine, is_installed

_INSTRUCTIONS = frozenset({"BUILD_SET", "SET_ADD", "SET_UPDATE"})
_NAMES = frozenset({"set", "frozenset", "hash", "__hash__"})
_VIEWS = frozenset({"keys", "items"})
_OPERATIONS = frozenset({"&", "|", "-", "^", "&=", "|=", "-=", "^="})
"""Operators that make a set from the keys or items of a mapping."""


def sets_used(functions: Iterable[object]) -> list[str]:
    """Return the functions that make sets or take hashes: "names (train.py:7)", in the order of discovery."""
    descriptions: dict[str, None] = {}
    for code in _reached(functions):
        if (line := _line_of_set(code)) is not None:
            identifiers = reversed([code.co_name, *code.co_qualname.split(".")])
            name = next(identifier for identifier in identifiers if "<" not in identifier)
            descriptions[f"{name} ({relative(code.co_filename)}:{line})"] = None
    return list(descriptions)


def _line_of_set(code: types.CodeType) -> int | None:
    instructions = list(dis.get_instructions(code))
    views = bool(_VIEWS & set(code.co_names))
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        operator = instruction.argrepr if instruction.opname == "BINARY_OP" else ""
        constant = isinstance(instruction.argval, frozenset) and instruction.opname == "LOAD_CONST"
        contained = following is not None and following.opname == "CONTAINS_OP"
        named = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in _NAMES
        builds = instruction.opname in _INSTRUCTIONS or (views and operator in _OPERATIONS)
        if named or builds or (constant and not contained):
            return instruction.positions.lineno if instruction.positions is not None else code.co_firstlineno
    return None


def _reached(functions: Iterable[object]) -> Iterator[types.CodeType]:
    """Yield the code of the user's own functions, and of all functions and classes that they name, each once."""
    waiting = list(functions)
    visited: set[int] = set()
    kept: list[object] = []  # keeps objects alive, so that no id is reused
    while waiting:
        candidate = waiting.pop(0)
        if id(candidate) in visited:
            continue
        visited.add(id(candidate))
        kept.append(candidate)
        if isinstance(candidate, type):
            waiting += [member for base in candidate.__mro__ if _is_own_class(base) for member in vars(base).values()]
        elif isinstance(candidate, functools.partial):
            waiting += [candidate.func, *candidate.args, *candidate.keywords.values()]
        elif isinstance(candidate, property):
            waiting += [candidate.fget, candidate.fset]
        elif isinstance(candidate, functools.cached_property):
            waiting.append(candidate.func)
        elif isinstance(candidate, (types.MethodType, staticmethod, classmethod)):
            waiting.append(candidate.__func__)
        elif isinstance(candidate, types.FunctionType):
            function = _unwrapped(candidate)
            if not _is_own(function.__code__.co_filename):
                continue
            codes = list(_nested(function.__code__))
            yield from codes
            waiting += _named(function, {name for code in codes for name in code.co_names})
        elif _is_own_class(type(candidate)):
            waiting.append(type(candidate))


def _unwrapped(function: Any) -> Any:
    try:
        return inspect.unwrap(function)
    except ValueError:  # it wraps itself (Lib/inspect.py, unwrap, Python 3.11)
        return function


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _named(function: Callable[..., Any], identifiers: set[str]) -> Iterator[object]:
    """Yield the objects that a function names: globals, its closure, its defaults, and attributes of modules."""
    unwrapped = _unwrapped(function)
    spaces = [unwrapped.__globals__]
    for name in identifiers:
        module = unwrapped.__globals__.get(name)
        if isinstance(module, types.ModuleType) and _is_own(getattr(module, "__file__", None) or ""):
            spaces.append(vars(module))
    for space in spaces:
        yield from (space[name] for name in identifiers if name in space)
    for cell in unwrapped.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # the cell is still empty
    yield from unwrapped.__defaults__ or ()


def _is_own_class(cls: type) -> bool:
    functions = (member for member in vars(cls).values() if isinstance(member, types.FunctionType))
    return any(_is_own(function.__code__.co_filename) for function in functions)


def _is_own(file: str) -> bool:
    return bool(file) and not is_installed(file) and not is_engine(file)


_SHOWN = 3
_LONGEST = 300


def with_seeds_apart(
    ranks: RanksFixture,
    gate: str,
    functions: tuple[object, ...],
    case: Mapping[str, object],
    judge: Callable[[RanksFixture], None],
) -> None:
    """Judge a case again with different hash seeds, if the code under test uses sets.

    A failure counts only if it occurs twice, and if the same case passes in between with one seed. A hang counts at
    once, because waiting for it twice takes too long. `judge` runs the case on the given ranks and raises an error if
    it fails; it has passed with one hash seed.
    """
    if ranks._seeds_apart or not (set_users := sets_used(functions)):
        return
    if seed := environments.fixed_seed(os.environ):
        ranks._remark(
            f"{gate}: different hash seeds on ranks were not tried, because {environments.VARIABLE}={seed} fixes "
            "the seed"
        )
        return
    seeded_apart = cast(RanksFixture, _Apart(ranks))
    failed = _failure(judge, seeded_apart)
    if failed is None:
        return
    judge(ranks)
    if not isinstance(failed, RankHang) and _failure(judge, seeded_apart) is None:
        return  # the failure is intermittent, and does not depend on the seeds
    from mgpu_check.diagnosis.rules.order import findings_of_hash_seeds  # here, because few gates need its rules

    headline = first_line(failed)
    summary = (
        f"the case passes if all ranks share one hash seed; with a seed for each rank, {headline[:_LONGEST]}; sets are "
        f"used in {few(set_users, _SHOWN)}"
    )
    report = Report(
        f"{gate}: ranks with different hash seeds fail, as they have them under torchrun: {headline}",
        case,
        findings=findings_of_hash_seeds(HashSeeds(summary)),
        remarks=["with one hash seed on all ranks the same case passes"],
        place=getattr(failed, "site", ""),
    )
    failing_ranks = getattr(failed, "ranks", ())
    if isinstance(failed, RankHang):
        late = RankHang(str(report), ranks=failing_ranks)
        late.mistakes, late.site = report.mistakes, report.site
        raise late from None
    raise ScalingMismatch(str(report), ranks=failing_ranks, mistakes=report.mistakes, site=report.site) from failed


def _failure(judge: Callable[[RanksFixture], None], ranks: RanksFixture) -> BaseException | None:
    try:
        judge(ranks)
    except (CheckFailure, RankFailure, RankHang, ValueError) as error:
        return error
    return None


class _Apart:
    """The fixture `ranks`, with different hash seeds on the ranks of one world, for the length of one judgement."""

    def __init__(self, ranks: RanksFixture) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def run(self, *args: Any, size: int | None = None, **kwargs: Any) -> list[Any]:
        environment = None if size == 1 else environments.APART
        return self._ranks.run(*args, size=size, environment=environment, **kwargs)
