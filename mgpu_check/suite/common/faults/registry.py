"""The registry of planted faults, and their conditions. A check of the fault's property must catch each of them.

Conditions are values that run, and print as the words of the report.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from mgpu_check.asserts.findings import first_suffices


@dataclass(frozen=True)
class When:
    """A condition on the arguments of a call. Join two by ``&``."""

    text: str  # the condition in words, such as "float16" or "above 64 Ki elements"
    holds: Callable[..., bool]  # whether a call with these arguments meets it
    # makes a new `holds` for each planting, if `holds` counts calls
    fresh: Callable[[], Callable[..., bool]] | None = None

    def __and__(self, other: When) -> When:
        def fresh() -> Callable[..., bool]:
            own_test, other_test = self.test(), other.test()
            return lambda *args, **kwargs: own_test(*args, **kwargs) and other_test(*args, **kwargs)

        return When(f"{self.text}, {other.text}", fresh(), fresh)

    def __str__(self) -> str:
        return self.text

    def test(self) -> Callable[..., bool]:
        """Return `holds` for one planting: a count starts at 0."""
        return self.fresh() if self.fresh else self.holds

    def guards(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` for calls that meet the condition. For others it returns NotImplemented."""
        holds = self.test()

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if holds(*args, **kwargs) else NotImplemented

        return guarded


PROPERTIES = (
    "fixtures",
    "scatter",
    "allreduce",
    "collectives",
    "gradients",
    "mismatch",
    "parallelism",
    "sharded",
    "devices",
    "launch",
    "distributed",
    "data_parallel",
)
"""The properties of the packaged suite."""

FAULTS = tuple(f"mgpu_check.suite.{name}.faults" for name in PROPERTIES)
"""The modules that hold the faults of each property."""

PLANTER = f"{__name__}:planted"  # the function below, by its name: ranks plant faults with it


@dataclass(frozen=True)
class Fault:
    """A defect of torch, or of code that the checks call, that can be planted for a test of the checks."""

    name: str
    property: str
    summary: str
    plant: Callable[[], AbstractContextManager[None]]  # makes the context in which the fault is planted
    caught_by: tuple[str, ...]  # the checks of the suite that must catch it; other checks may
    condition: str = ""
    """The calls that it affects, such as "float16 only" or "above 64 Ki elements"; empty for all calls."""
    least_gpus: int = 1  # least number of GPUs of a run that the fault needs to have an effect
    module: str = ""  # the module that has registered it


Planter = Callable[[Callable[..., Any]], AbstractContextManager[None]]
"""Takes the function of a fault, and makes the context in which it is planted."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_faults: dict[str, Fault] = {}


class FaultRow(NamedTuple):
    """A fault of one expression, as a row of a table for `register`."""

    name: str
    summary: str
    caught_by: str | tuple[str, ...]  # the check or the checks that must catch it
    by: Planter  # plants `change`
    change: Callable[..., Any]
    when: When | str = ""  # the calls that it affects, if not all: a condition that selects them, or words if none can
    least_gpus: int = 1  # least number of GPUs of a run that the fault needs to have an effect

    def planted(self) -> AbstractContextManager[None]:
        """Return the context in which the fault is planted."""
        return self.by(self.when.guards(self.change) if isinstance(self.when, When) else self.change)


def register(module: str, *rows: FaultRow) -> None:
    """Register faults for the property that has `module`.

    Raises:
        ValueError: the module is in no folder of `PROPERTIES`, or another module has registered a fault with one of the
            names.
    """
    property = module.removeprefix("mgpu_check.suite.").partition(".")[0]
    for row in rows:
        if property not in PROPERTIES:
            raise ValueError(
                f"fault: {row.name!r} of module {module} has no property; move it to mgpu_check/suite/PROPERTY/faults, "
                f"where PROPERTY is one of {', '.join(PROPERTIES)}"
            )
        if row.name in _faults and _faults[row.name].module != module:
            raise ValueError(f"fault: {row.name!r} is registered already, by {_faults[row.name].module}")
        checks = (row.caught_by,) if isinstance(row.caught_by, str) else row.caught_by
        _faults[row.name] = Fault(
            row.name, property, row.summary, row.planted, checks, str(row.when), row.least_gpus, module
        )


def entered(function: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Plant a fault whose function returns the context that plants it."""
    return function()


def fault(
    summary: str, *caught_by: str, by: Planter | None = None, when: When | str = "", least_gpus: int = 1
) -> Callable[[_Function], _Function]:
    """Register the decorated function as a fault that the checks `caught_by` of its property must catch.

    The name of the fault is that of the function, with hyphens. Its property is the folder of its module.

    ::

        @fault("BAND of bytes is BOR", "test_every_dtype", by=instead("all_reduce"), when=op("BAND"))
        def and_is_or(seen):
            return seen.with_op("BOR")

    Args:
        by: makes the context that plants the function, such as a wrapper of a function of torch. Without it the
            decorated function is a generator function: it plants the fault, yields once, and removes the fault.
        when, least_gpus: see `FaultRow`. For calls that a condition does not select, the original is called.

    Raises:
        ValueError: see `register`; or `when` is a condition, and `by` is not given.
    """

    def decorate(function: _Function) -> _Function:
        name = function.__name__.replace("_", "-")
        if isinstance(when, When) and by is None:
            raise ValueError(f"fault: {name!r} has `when`, which needs `by`: what plants the function")
        planter = by or (lambda generator: contextlib.contextmanager(generator)())
        register(function.__module__, FaultRow(name, summary, caught_by, planter, function, when, least_gpus))
        return function

    return decorate


def caught_by(*checks: str, least_gpus: int = 1) -> Callable[..., Callable[[_Function], _Function]]:
    """Return a decorator for the faults that `checks` must catch. It takes the summary, `by` and `when` of `fault`."""
    least = least_gpus

    def decorator(
        summary: str, by: Planter | None = None, when: When | str = "", *, least_gpus: int = least
    ) -> Callable[[_Function], _Function]:
        return fault(summary, *checks, by=by, when=when, least_gpus=least_gpus)

    return decorator


def all_faults() -> dict[str, Fault]:
    """Return all faults by name, in the order of the properties. Imports torch."""
    for module in FAULTS:
        importlib.import_module(module)
    return dict(sorted(_faults.items(), key=lambda entry: PROPERTIES.index(entry[1].property)))


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant the fault `name` in this process for the duration of the context. Checks may end at their first finding."""
    faults = all_faults()
    if name not in faults:
        raise ValueError(f"fault {name!r} is unknown; choose one of {', '.join(faults)}")
    with first_suffices(), faults[name].plant():
        yield
