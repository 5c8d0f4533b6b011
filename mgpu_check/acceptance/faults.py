"""Register defects of hardware, parse their names on the command line, and plant them in simulated nodes."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mgpu_check.devices.observations import Part, PartKind
from mgpu_check.devices.telemetry.fields import FIELDS
from mgpu_check.devices.telemetry.sources import Override
from mgpu_check.simulated.defects import PATTERNS, UNITS, Parameters, Value
from mgpu_check.torch_hooks.collective_table import TRANSFERS

if TYPE_CHECKING:
    from mgpu_check.simulated.hardware import Defect, Hardware

PLANTER = f"{__name__}:hardware_planted"
"""The function that plants what `hardware_text` returns, in a rank: it imports torch."""

MEMORY = 16 << 20
"""Bytes of memory of a GPU with simulated hardware. Small, so that checks of all of it are fast."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "path": ("any", "engine", "kernel"),
    "memory": ("any", "pinned", "pageable"),
    "operation": ("any", *TRANSFERS),
    "pattern": PATTERNS,
    "unit": ("any", *UNITS),
    "way": ("any", "upload", "download"),
    "dtype": (
        *("any", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    ),
    "field": tuple(name for name, field in FIELDS.items() if field.kind != "pair"),  # which are asked once per peer
}
"""Valid values of the parameters that are words. With any other value a fault would have no effect."""


@dataclass(frozen=True)
class HardwareFault:
    """A defect of hardware that can be planted."""

    name: str
    summary: str
    # its parameters with their defaults: "device", "peer", "dtype", "operation", "above" (bytes), "probability" (per
    # operation), "every" (affects every n-th operation), "after" (seconds since the start), "factor", ...
    defaults: Parameters
    parts: Callable[[Parameters], tuple[Part, ...]]  # the parts that the verdict must accuse
    caught_by: tuple[str, ...]  # the checks that must detect it
    level: str = "quick"  # the lowest level that must detect it
    # makes the defect of the simulated node; None if the fault shows in telemetry only
    defect: Callable[[Parameters], Defect] | None = None
    # makes the overrides of telemetry; empty by default
    telemetry: Callable[[Parameters], Sequence[Override]] = field(default=lambda parameters: ())
    of_host: Mapping[str, Any] = field(default_factory=dict)  # fields of the simulated host that differ


@dataclass(frozen=True)
class Planted:
    """A fault with its parameters.

    Attributes:
        text: the fault in the notation of the command line: ``copy-zeros:device=0,peer=2,above=2097152``.
    """

    fault: HardwareFault
    parameters: Parameters

    @property
    def text(self) -> str:
        assignments = ",".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.fault.name}:{assignments}" if assignments else self.fault.name

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.fault.parts(self.parameters)


def made_by(name: str, **arguments: Any) -> Callable[[Parameters], Defect]:
    """Return a function that makes the class `name` of `defects.implementations` from parameters and `arguments`.

    Its call imports torch.
    """

    def make(parameters: Parameters) -> Defect:
        module = importlib.import_module("mgpu_check.simulated.defects.implementations")
        defect: Defect = getattr(module, name)(parameters, **arguments)
        return defect

    return make


def _accused(kind: PartKind, *names: str) -> Callable[[Parameters], tuple[Part, ...]]:
    """Return a function that returns the part of the GPUs in these parameters, or of the only host."""
    return lambda parameters: (Part(kind, tuple(int(parameters[name]) for name in names) or (0,)),)


gpu, host = _accused("gpu", "device"), _accused("host")
link, host_link = _accused("link", "device", "peer"), _accused("host-link", "device")


_faults: dict[str, HardwareFault] = {}


def hardware_fault(fault: HardwareFault) -> HardwareFault:
    if _faults.get(fault.name, fault) != fault:
        raise ValueError(f"hardware_fault: {fault.name!r} is registered already")
    _faults[fault.name] = fault
    return fault


def all_hardware_faults() -> dict[str, HardwareFault]:
    """Return every fault by name. Imports no torch."""
    importlib.import_module("mgpu_check.acceptance.hardware_faults")
    return dict(_faults)


def planted_from(text: str) -> Planted:
    """Parse a fault of the command line, a name with parameters, or raise ValueError with the valid set."""
    faults = all_hardware_faults()
    name, _, assignments = text.partition(":")
    if name not in faults:
        close = difflib.get_close_matches(name, faults, n=3, cutoff=0.4)
        nearest = f"did you mean {' or '.join(close)}? " if close else ""
        listed = f"mgpu-check accept --plant=list lists all {len(faults)}"
        raise ValueError(f"{name!r} is not a hardware fault; {nearest}{listed}")
    fault = faults[name]
    parameters = dict(fault.defaults)
    for pair in filter(None, assignments.split(",")):
        key, equals, value = pair.partition("=")
        if key not in parameters or not equals:
            raise ValueError(f"{name}: {pair!r} is not one of its parameters; choose from {', '.join(parameters)}")
        parameters[key] = _value(name, key, value, parameters[key])
    return Planted(fault, parameters)


def hardware_text(faults: Sequence[Planted]) -> str:
    """Return the name of these faults for `hardware_planted`; hardware without defects if `faults` is empty.

    The text begins with the time: the parameter ``after`` counts from it.
    """
    return ";".join([str(time.time()), *(fault.text for fault in faults)])


def _value(name: str, key: str, text: str, default: Value) -> Value:
    if isinstance(default, str):
        if text not in CHOICES[key]:
            raise ValueError(f"{name}: {key}={text!r} is unknown; choose from {', '.join(CHOICES[key])}")
        return text
    if not re.fullmatch(r"-?\d+(\.\d*)?([eE][-+]?\d+)?", text):
        raise ValueError(f"{name}: {key}={text!r} is not a number; its default is {default}")
    return int(text) if isinstance(default, int) else float(text)


def hardware_planted(text: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that gives the simulated node of this process the hardware of a text of `hardware_text`.

    Counters and time of the hardware continue from one context to the next.
    """
    from mgpu_check.simulated.hardware import planted

    return planted(_hardware(text))


@functools.lru_cache(maxsize=1)
def _hardware(text: str) -> Hardware:
    from mgpu_check.simulated.hardware import Hardware

    started, _, fault_texts = text.partition(";")
    defects = []
    for planted in map(planted_from, filter(None, fault_texts.split(";"))):
        if planted.fault.defect is not None:
            defect = planted.fault.defect(planted.parameters)
            defect.since = float(started) + float(planted.parameters.get("after", 0))
            defects.append(defect)
    return Hardware(defects, MEMORY)
