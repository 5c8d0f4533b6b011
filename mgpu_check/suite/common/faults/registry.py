"""The registry of planted faults. A check of the fault's property must catch each of them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from mgpu_check.suite.common.faults.when import When

__all__ = ["PLANTER", "PROPERTIES", "Fault", "all_faults", "fault", "planted", "row"]

PROPERTIES = (
    "fixtures",
    "scatter",
    "loading",
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
"""The properties of the packaged suite; `mgpu_check.suite.<property>.faults` holds the faults of each."""

PLANTER = f"{__name__}:planted"
"""The function below, by its name: ranks plant faults with it."""


@dataclass(frozen=True)
class Fault:
    """A defect of torch, or of code that the checks call, that can be planted for a test of the checks."""

    name: str
    property: str
    summary: str
    plant: Callable[[], AbstractContextManager[None]]
    """Makes the context in which the fault is planted."""
    caught_by: tuple[str, ...]
    """The checks of the suite that must catch it; other checks may."""
    condition: str = ""
    """The calls that it affects, such as "float16 only" or "above 64 Ki elements"; empty for all calls."""
    least_gpus: int = 1
    """Least number of GPUs of a run that the fault needs to have an effect."""
    module: str = ""
    """The module that has registered it."""


_Function = TypeVar("_Function", bound=Callable[..., Any])

_faults: dict[str, Fault] = {}


def fault(
    summary: str,
    *caught_by: str,
    by: Callable[[Callable[..., Any]], AbstractContextManager[None]] | None = None,
    when: When | None = None,
    condition: str = "",
    least_gpus: int = 1,
) -> Callable[[_Function], _Function]:
    """Register the decorated function as a fault that the checks `caught_by` of its property must catch.

    The name of the fault is that of the function, with hyphens. Its property is the folder of its module.

    ::

        @fault("BAND of bytes is BOR", "test_every_dtype", by=around(dist, "all_reduce"), when=op("BAND"))
        def and_is_or(seen):
            return seen.with_op("BOR")

    Args:
        by: makes the context that plants the function, such as a wrapper of a function of torch. Without it the
            decorated function is a generator function: it plants the fault, yields once, and removes the fault.
        when: the calls that the fault affects, if not all: the function is called for these only, and the original
            otherwise.
        condition: the calls that the fault affects, in words, where no `when` can say it.
        least_gpus: least number of GPUs of a run that the fault needs to have an effect.

    Raises:
        ValueError: the module is in no folder of `PROPERTIES`, another module has registered a fault with the same
            name, or `when` is given without `by`.
    """

    def register(function: _Function) -> _Function:
        name = function.__name__.replace("_", "-")
        if when is not None and by is None:
            raise ValueError(f"fault: {name!r} has `when`, which needs `by`: what plants the function")
        plant = (
            contextlib.contextmanager(function)
            if by is None
            else lambda: by(when.guards(function) if when else function)
        )
        row(
            function.__module__,
            name,
            summary,
            *caught_by,
            plant=plant,
            condition=condition or str(when or ""),
            least_gpus=least_gpus,
        )
        return function

    return register


def row(
    module: str,
    name: str,
    summary: str,
    *caught_by: str,
    plant: Callable[[], AbstractContextManager[None]],
    condition: str = "",
    least_gpus: int = 1,
) -> None:
    """Register a fault that needs no function of its own, as a row of a table; see `fault`.

    Args:
        module: `__name__` of the module that registers it.
        plant: makes the context in which the fault is planted.
    """
    property = module.removeprefix("mgpu_check.suite.").partition(".")[0]
    if property not in PROPERTIES:
        raise ValueError(
            f"fault: {name!r} of module {module} has no property; move it to mgpu_check/suite/PROPERTY/faults, where "
            f"PROPERTY is one of {', '.join(PROPERTIES)}"
        )
    if name in _faults and _faults[name].module != module:
        raise ValueError(f"fault: {name!r} is registered already, by {_faults[name].module}")
    _faults[name] = Fault(name, property, summary, plant, caught_by, condition, least_gpus, module)


def all_faults() -> dict[str, Fault]:
    """Return all faults by name, in the order of the properties. Imports torch."""
    for name in PROPERTIES:
        importlib.import_module(f"mgpu_check.suite.{name}.faults")
    return dict(sorted(_faults.items(), key=lambda entry: PROPERTIES.index(entry[1].property)))


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant the fault `name` in this process for the duration of the context.

    Raises:
        ValueError: the name is unknown.
    """
    faults = all_faults()
    if name not in faults:
        raise ValueError(f"fault {name!r} is unknown; choose one of {', '.join(faults)}")
    with faults[name].plant():
        yield
