"""The registry of planted faults. A check of the fault's property must catch each of them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["PLANTER", "PROPERTIES", "Fault", "all_faults", "fault", "planted"]

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
    plant: Callable[[], Iterator[None]]
    """A generator function that plants the fault, yields once, and removes the fault."""
    caught_by: tuple[str, ...]
    """The checks of the suite that must catch it; other checks may."""
    condition: str = ""
    """The calls that it affects, such as "float16 only" or "above 64 Ki elements"; empty for all calls."""
    least_gpus: int = 1
    """Least number of GPUs of a run that the fault needs to have an effect."""


_faults: dict[str, Fault] = {}


def fault(
    property: str, summary: str, *, caught_by: tuple[str, ...], condition: str = "", least_gpus: int = 1
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Register the decorated generator function as a fault that the checks `caught_by` of `property` must catch.

    The name of the fault is that of the function, with hyphens.

    Args:
        condition: the calls that the fault affects, if not all: a size, a dtype, a device, a rank, one call in n.
        least_gpus: least number of GPUs of a run that the fault needs to have an effect.

    Raises:
        ValueError: `property` is not in `PROPERTIES`, or another module has registered a fault with the same name.
    """
    if property not in PROPERTIES:
        raise ValueError(f"fault: property={property!r} is unknown; choose one of {', '.join(PROPERTIES)}")

    def register(plant: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        name = plant.__name__.replace("_", "-")
        if name in _faults and _faults[name].plant.__module__ != plant.__module__:
            raise ValueError(f"fault: {name!r} is registered already, by {_faults[name].plant.__module__}")
        _faults[name] = Fault(name, property, summary, plant, caught_by, condition, least_gpus)
        return plant

    return register


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
    with contextlib.contextmanager(faults[name].plant)():
        yield
