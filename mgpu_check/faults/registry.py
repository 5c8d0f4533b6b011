"""The register of planted faults: each a defect that some check of its property must catch."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mgpu_check.faults.hardware.registry import HARDWARE

__all__ = ["PROPERTIES", "Fault", "all_faults", "fault", "planted"]

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
"""The properties of the packaged suite; `mgpu_check.faults.<property>` holds the faults of each."""


@dataclass(frozen=True)
class Fault:
    """A defect that can be planted from outside the checks."""

    name: str
    property: str
    summary: str
    plant: Callable[[], Iterator[None]]
    """A generator function: what stands before its ``yield`` plants the fault, what follows takes it out."""
    caught_by: tuple[str, ...]
    """The checks of the suite that must catch it; others may."""
    condition: str = ""
    """When it strikes, such as "float16 only" or "above 64 Ki elements"; empty where it always does."""
    least_gpus: int = 1
    """GPUs that a run needs for it to strike at all."""


_faults: dict[str, Fault] = {}


def fault(
    property: str, summary: str, *, caught_by: tuple[str, ...], condition: str = "", least_gpus: int = 1
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Register the decorated generator function as a fault that the checks `caught_by` of `property` must catch.

    A fault that strikes only some calls says which in `condition`: a size, a dtype, a device, a rank, one call in so many. One that strikes only
    in worlds that a run need not have says how many GPUs in `least_gpus`.

    Raises:
        ValueError: `property` is none of `PROPERTIES`, or a fault of that name exists.
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
    """Return every fault by name, in the order of the properties. Imports torch."""
    for name in PROPERTIES:
        importlib.import_module(f"mgpu_check.faults.{name}")
    return dict(sorted(_faults.items(), key=lambda entry: PROPERTIES.index(entry[1].property)))


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Have the fault called `name` in this process, for the time of the context; hardware, where it is called so.

    Raises:
        ValueError: there is no fault of that name.
    """
    if name.startswith(HARDWARE):
        # Here, because only simulated ranks need the simulator.
        from mgpu_check.faults.hardware.planting import hardware_planted

        with hardware_planted(name.removeprefix(HARDWARE)):
            yield
        return
    faults = all_faults()
    if name not in faults:
        raise ValueError(f"fault {name!r} is unknown; choose one of {', '.join(faults)}")
    with contextlib.contextmanager(faults[name].plant)():
        yield
