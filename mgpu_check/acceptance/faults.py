"""The defects of hardware that can be planted, check by check, and how: their names on the command line, and the
simulated nodes that have them.
"""

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

MEMORY = 16 << 20  # Bytes of memory of a GPU with simulated hardware. Small, so that checks of all of it are fast.

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
    """A defect of hardware that can be planted.
    This module registers each fault when it is imported. `planted_from` finds it by its name, and `hardware_planted`
    plants its defect in every process of the simulated node, from the start of the process to its end."""

    name: str
    summary: str
    # its parameters with their defaults: "device", "peer", "dtype", "operation", "above" (bytes), "probability" (per
    # operation), "every" (affects every n-th operation), "after" (seconds since the start), "factor", ...
    defaults: Parameters
    parts: Accused  # the parts that the verdict must accuse
    caught_by: tuple[str, ...]  # the checks that must detect it
    level: str = "quick"  # the lowest level that must detect it
    # makes the defect of the simulated node; None if the fault shows in telemetry only
    defect: Callable[[Parameters], Defect] | None = None
    # makes the overrides of telemetry; empty by default
    telemetry: Callable[[Parameters], Sequence[Override]] = field(default=lambda parameters: ())
    of_host: Mapping[str, Any] = field(default_factory=dict)  # fields of the simulated host that differ


@dataclass(frozen=True)
class Planted:
    """A fault with its parameters."""

    fault: HardwareFault
    parameters: Parameters

    @property
    def text(self) -> str:
        """The fault in the notation of the command line: ``copy-zeros:device=0,peer=2,above=2097152``."""
        assignments = ",".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.fault.name}:{assignments}" if assignments else self.fault.name

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.fault.parts(self.parameters)


def made_by(name: str, **arguments: Any) -> Callable[[Parameters], Defect]:
    """Return a function that makes the class `name` of `defects.implementations` from parameters and `arguments`.
    Its call imports torch."""

    def make(parameters: Parameters) -> Defect:
        module = importlib.import_module("mgpu_check.simulated.defects.implementations")
        return getattr(module, name)(parameters, **arguments)

    return make


Accused = Callable[[Parameters], tuple[Part, ...]]


def _accused(part_kind: PartKind, *gpu_parameters: str) -> Accused:
    """Return a function that returns the part of the GPUs in these parameters, or of the only host."""
    return lambda parameters: (Part(part_kind, tuple(int(parameters[name]) for name in gpu_parameters) or (0,)),)


gpu, host = _accused("gpu", "device"), _accused("host")
link, host_link = _accused("link", "device", "peer"), _accused("host-link", "device")


_faults: dict[str, HardwareFault] = {}


def hardware_fault(fault: HardwareFault) -> None:
    if _faults.get(fault.name, fault) != fault:
        raise ValueError(f"hardware_fault: {fault.name!r} is registered already")
    _faults[fault.name] = fault


def all_hardware_faults() -> dict[str, HardwareFault]:
    """Return every fault by name. Imports no torch."""
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
    The text begins with the time: the parameter ``after`` counts from it."""
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
    Counters and time of the hardware continue from one context to the next."""
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


def _memory(name: str, summary: str, cls: str, **parameters: Value) -> None:
    # The address is within the first third of the memory of a simulated GPU, and odd, so that it is aligned to nothing.
    defaults = {"device": 1, "address": 5_000_003, **parameters}
    hardware_fault(HardwareFault(name, summary, defaults, gpu, ("memory",), defect=made_by(cls)))


_memory("memory-stuck-at-zero", "a bit of the memory is always 0", "StuckBit", bit=3, value=0)
_memory("memory-stuck-at-one", "a bit of the memory is always 1", "StuckBit", bit=6, value=1)
_memory("memory-dead-row", "a row of the memory reads as zeros", "DeadRow", length=1024)
_SAME_CELL = "two addresses are the same cell: a write to one changes both"
_memory("memory-aliased", _SAME_CELL, "Aliased", length=64, distance=4096)
_SAME_PAGE = "two pages are the same memory: a write to one changes both"
_memory("memory-aliased-pages", _SAME_PAGE, "Aliased", address=5 << 20, length=65536, distance=1 << 20)
_memory("memory-coupled", "a bit that changes from 0 to 1 flips its neighbour", "Coupled", bit=2)
_memory("memory-weak", "a bit sometimes flips", "WeakBit", bit=5, every=7, seed=0)
_memory("memory-leaks", "a bit turns to 0 two seconds after it was written", "LeakyBit", bit=4, seconds=2.0)


def _compute(
    name: str, summary: str, unit: str = "products", level: str = "quick", tf32: bool = False, **parameters: Value
) -> None:
    defect = made_by("Unit", operations=UNITS[unit], **({"tf32": True} if tf32 else {}))
    defaults = {"device": 1, "pattern": "bits", "seed": 0, **parameters}
    hardware_fault(HardwareFault(name, summary, defaults, gpu, ("compute",), level, defect))


_compute("product-dtype", "matrix products of one dtype have a wrong bit", dtype="float16", pattern="bit")
_compute("product-lane", "one lane of each warp is wrong in matrix products", pattern="lane")
_compute("product-tile", "one tile of large matrix products is wrong", pattern="tile", above=4096)
_compute("product-nan", "matrix products sometimes have a NaN", pattern="nan", every=5)
_compute("product-tf32", "matrix products are wrong if TF32 is on", tf32=True)
_compute("product-hot", "matrix products are wrong on a GPU that has been busy", heat=1e-3)
_compute("product-rare", "a matrix product is wrong one time in 10000", every=10000, level="long")
_compute("product-seldom", "a matrix product is wrong one time in 50", every=50, level="standard")
_compute("product-flutters", "every other matrix product is off by its lowest bit", pattern="low-bit", every=2)
_compute("product-inner", "matrix products with an inner dimension of 256 are wrong", inner=256)
_compute("product-vector", "matrix products with one column are wrong", columns=1)
_compute("product-row", "matrix products with one row are wrong", rows=1)
_compute("product-transposed", "matrix products are wrong if the second factor is column-major", transposed=1)
_compute("convolution", "convolutions are wrong", "convolutions")
_compute("attention", "attention is wrong", "attention")
_compute("reduction", "sums are wrong in one bit", "sums", pattern="bit")
_compute("functions", "transcendental functions are off by their lowest bit", "functions", pattern="low-bit")
_compute("sorting", "sorting swaps two elements", "sorting", pattern="swap")
_compute("elementwise", "sums and products of elements are sometimes wrong", "elementwise", every=3)
_RANDOM, _REPEATS = made_by("RepeatingRandom"), "the second half of random numbers repeats the first"
hardware_fault(HardwareFault("random-repeats", _REPEATS, {"device": 1}, gpu, ("compute",), defect=_RANDOM))


def _link(
    name: str, summary: str, cls: str = "Link", level: str = "quick", damage: str | None = None, **parameters: Value
) -> None:
    defect = made_by(cls, **({"damage": damage} if damage else {}))
    defaults = {"device": 0, "peer": 2, "above": 0, **parameters}
    hardware_fault(HardwareFault(name, summary, defaults, link, ("links",), level, defect))


_link("copy-zeros", "copies over a link deliver zeros")
_link("copy-stale", "copies over a link leave the old content", "Stale")
_link("copy-of-another-peer", "copies over a link deliver the data of another peer", "AnotherPeer")
_link("copy-offset", "copies over a link arrive 64 bytes too far", damage="offset")
_link("copy-tail", "copies over a link have a wrong end", damage="tail")
_link("copy-large", "copies over a link lose their second half above 2 MiB", damage="half", above=2 << 20)
_link("copy-by-kernel", "only kernels that write to the peer's memory write zeros", path="kernel")
_link("copy-by-engine", "only the copy engine delivers zeros", path="engine")
_link("copy-under-load", "copies over a link have a wrong bit if other copies run", damage="bit", load=1, seed=0)
_link("copy-lanes", "copies over a link have a wrong bit in each 32nd word", damage="lane", seed=0)
_link("copy-seldom", "one copy in 20 over a link has a wrong bit", damage="bit", every=20, seed=0)
_link("copy-stale-seldom", "one copy in 50 over a link leaves the old content", "Stale", every=50)
_link("copy-stale-rare", "one copy in 500 over a link leaves the old content", "Stale", "standard", every=500)
_ONE_WORD = "a copy of nothing but {} has a wrong bit"
_link("copy-of-zeros", _ONE_WORD.format("zeros"), damage="bit", word=0, seed=0)
_link("copy-of-ones", _ONE_WORD.format("ones"), damage="bit", word=(1 << 64) - 1, seed=0)
_link("copy-of-signs", _ONE_WORD.format("signs of float32"), damage="bit", word=0x80000000_80000000, seed=0)
_link("copy-wraps", "copies over a link arrive 2 MiB in front of their place", "Wrapping", reach=2 << 20)
_BETWEEN, _DROPPED = made_by("Between"), "copies between any two GPUs leave the old content"
hardware_fault(HardwareFault("copies-dropped", _DROPPED, {"above": 0}, host, ("links",), defect=_BETWEEN))
_EGRESS, _OUT = made_by("Egress", damage="tail"), "copies from a GPU to any other have a wrong end"
hardware_fault(HardwareFault("copy-out", _OUT, {"device": 1, "above": 0}, gpu, ("links",), defect=_EGRESS))


def _host_link(name: str, summary: str, damage: str, **parameters: Value) -> None:
    defect = made_by("HostLink", damage=damage, **{name.partition("-")[0]: True})  # upload or download
    defaults = {"device": 1, "above": 0, "memory": "any", **parameters}
    hardware_fault(HardwareFault(name, summary, defaults, host_link, ("links",), defect=defect))


_host_link("upload-truncated", "copies from the host lose their second half", "half")
_host_link("download-truncated", "copies to the host lose their second half", "half")
_ONE_IN_50: dict[str, Value] = {"memory": "pinned", "every": 50}
_host_link("upload-seldom", "one copy in 50 from pinned memory loses its second half", "half", **_ONE_IN_50)
_LOADED = "copies from the host leave a wrong bit while others run"
_host_link("upload-under-load", _LOADED, "bit", memory="pinned", load=1, seed=0)
_host_link("download-seldom", "one copy in 50 to pinned memory has a wrong bit", "bit", **_ONE_IN_50, seed=0)
_host_link("upload-pinned", "copies from pinned memory have a wrong bit", "bit", memory="pinned", seed=0)
_host_link("download-pageable", "copies to pageable memory have a wrong bit", "bit", memory="pageable", seed=0)


def _collective(
    name: str, summary: str, operation: str = "any", pattern: str = "bits", level: str = "quick", **parameters: Value
) -> None:
    defaults = {"device": 2, "operation": operation, "seed": 0, **parameters}
    defect = made_by("WrongCollective", pattern=pattern)
    hardware_fault(HardwareFault(name, summary, defaults, gpu, ("collectives",), level, defect))


_collective("collective-wrong", "the result of each collective is wrong on one GPU")
_collective("all-reduce-dtype", "all_reduce of one dtype is wrong on one GPU", "all_reduce", dtype="bfloat16")
_collective("all-gather-swapped", "all_gather swaps elements on one GPU", "all_gather", "swap")
_collective("reduce-scatter-lanes", "reduce_scatter is wrong in each 32nd element on one GPU", "reduce_scatter", "lane")
_collective("broadcast-nan", "broadcast leaves a NaN on one GPU", "broadcast", "nan")
_collective("all-to-all-wrong", "all_to_all is wrong on one GPU", "all_to_all")
_OF_TWO = "reduce_scatter of two GPUs is wrong on one GPU"
_collective("collective-of-two", _OF_TWO, "reduce_scatter", ranks=2, most=2)
_collective("collective-of-three", "collectives of three GPUs or more are wrong on one GPU", ranks=3)
_LARGE = "all_reduce of more than 512 KiB is wrong on one GPU"
_collective("all-reduce-large", _LARGE, "all_reduce", above=1 << 19)
_MIB = "all_reduce of 1 MiB is wrong one time in {} on one GPU"
_collective("all-reduce-seldom", _MIB.format(50), "all_reduce", bytes=1 << 20, every=50)
_ONE_IN_60 = "one all_gather in 60 is wrong on one GPU"
_collective("all-gather-seldom", _ONE_IN_60, "all_gather", level="standard", every=60)
_collective("all-reduce-rare", _MIB.format(300), "all_reduce", level="long", bytes=1 << 20, every=300)


def _slow(name: str, summary: str, cls: str, accused: Accused = gpu, **parameters: Value) -> None:
    places: Parameters = {"device": 0, "peer": 2, "factor": 4.0} if accused is link else {"device": 1, "factor": 2.0}
    defaults = {**places, **parameters}
    hardware_fault(HardwareFault(name, summary, defaults, accused, ("performance",), defect=made_by(cls)))


_slow("slow-gpu", "a GPU computes slowly", "SlowDevice")
_slow("slow-unit", "a GPU runs one kind of kernels slowly", "SlowDevice", factor=4.0, unit="sorting")
_slow("slow-launches", "a GPU runs small kernels slowly", "SlowDevice", below=4096)
_slow("slow-when-hot", "a GPU that has been busy for some time slows down", "SlowDevice", factor=1.6, heat=1e-3)
_slow("slow-dtype", "a GPU computes slowly in one dtype", "SlowDevice", factor=8.0, dtype="float16")
_slow("slow-link", "copies over a link are slow", "SlowLink", link)
_slow("slow-host-link", "copies between the host and a GPU are slow", "SlowHostLink", host_link, factor=4.0)
_ONE_WAY = "copies from the host to a GPU are slow, but not those back"
_slow("slow-way", _ONE_WAY, "SlowHostLink", host_link, way="upload", memory="any")
_PAGEABLE = "copies of pageable memory to a GPU and back are slow"
_slow("slow-pageable", _PAGEABLE, "SlowHostLink", host_link, factor=4.0, memory="pageable")
_PEER_KERNEL = "kernels that write to the memory of a peer are slow on a link"
_slow("slow-peer-kernel", _PEER_KERNEL, "SlowLink", link, path="kernel")
_slow("slow-small-copies", "small copies over a link are slow", "SlowLink", link, below=4096)
_slow("slow-port", "copies between a GPU and each other one are slow", "SlowPort")
_slow("slow-collective", "collectives with a GPU are slow", "SlowCollective", operation="all_reduce")
_STALLS = "one {} in 40 takes 100 times as long"
_slow("stalls-gpu", _STALLS.format("kernel of a GPU"), "SlowDevice", factor=100.0, every=40)
_slow("stalls-link", _STALLS.format("copy over a link"), "SlowLink", link, factor=100.0, every=40)
_slow("stalls-collective", _STALLS.format("collective with a GPU"), "SlowCollective", factor=100.0, every=40)
_SMALL = "small collectives with a GPU are slow"
_slow("slow-small-collectives", _SMALL, "SlowCollective", operation="any", below=4096)
_ON_GPUS = ("inventory", "memory", "compute", "links", "collectives", "training")
for _name, _summary, _cls in (
    ("lost", "a GPU falls off the bus, `after` seconds into the run", "Lost"),
    ("hangs", "a call of the driver about a GPU never returns", "Hanging"),
):
    hardware_fault(HardwareFault(_name, _summary, {"device": 1, "after": 0.0}, gpu, _ON_GPUS, defect=made_by(_cls)))

# Defects that telemetry reports: growing counters, different settings, links that are down, a driver that hangs.

_DOWN: dict[str, Value] = {"nvlinks": 17, "nvlinks_down": "4"}
_GROWING = {
    "ecc_corrected": ("the counter of corrected memory errors grows", 20),
    "ecc_uncorrected": ("the counter of uncorrected memory errors grows", 1),
    "remapped_uncorrected": ("rows of memory are remapped during the run", 1),
    "pcie_replays": ("PCIe replays exceed the allowed bit error rate", 50),
    "pcie_fatal": ("the counter of fatal PCIe errors grows", 1),
    "nvlink_crc": ("the counter of NVLink CRC errors grows fast", 10_000),
    "nvlink_replay": ("NVLinks replay", 1),
    "nvlink_recovery": ("NVLinks recover", 1),
    "nvlink_packets": ("NVLinks lose packets", 1),
    "pcie_nonfatal": ("the counter of PCIe errors that are not fatal grows", 1),
    "remapped_corrected": ("rows of memory are remapped after corrected errors", 1),
    "retired_pages": ("pages of memory are retired during the run", 1),
    "thermal_violation": ("heat holds the clocks of a GPU down, and no sample shows it", 100_000_000),
    "reliability_violation": ("power or reliability holds the clocks of a GPU down", 100_000_000),
    "board_violation": ("power or reliability holds the clocks of a GPU down", 100_000_000),
}
"""Counters that a fault increments: summary, and the increment per query."""

_WRONG: dict[str, tuple[str, str, Value, str]] = {
    "remap-pending": ("a row of memory waits for its remapping", "remap_pending", True, "health"),
    "remap-failed": ("a row of memory could not be remapped", "remap_failed", True, "health"),
    "retired-pages-pending": ("a page of memory waits for its retirement", "retired_pending", True, "health"),
    "sram-threshold": ("SRAM has had too many uncorrectable errors", "sram_threshold", True, "health"),
    "recovery-required": ("the driver asks for a reset of the GPU", "recovery_action", "reset the GPU", "health"),
    "ecc-off": ("ECC is off on one GPU", "ecc", "off", "inventory"),
    "power-limit": ("one GPU has a lower power limit", "power_limit", 500, "inventory"),
    "vbios-differs": ("one GPU has a different VBIOS", "vbios", "00.00.00.00.01", "inventory"),
    "model-differs": ("one GPU is of a different model", "name", "SIMULATED-2", "inventory"),
    "clock-limit": ("one GPU has a lower maximum clock", "sm_clock_max", 1410, "inventory"),
    "mig-on": ("MIG mode is on, on one GPU", "mig", "on", "inventory"),
    "repair-pending": ("a memory channel waits for its repair", "repair_pending", True, "health"),
    "memory-unrepairable": ("memory cannot be repaired", "unrepairable_memory", True, "health"),
    "fabric-incomplete": ("one GPU has not joined the NVLink fabric", "fabric", "in progress", "health"),
    "ecc-pending": ("ECC will be off after a restart", "ecc_pending", "off", "health"),
    "pages-retired": ("more pages are retired than a GPU may have", "retired_pages", 63, "health"),
    "ecc-uncorrected-before": ("memory errors from before the run", "ecc_uncorrected", 3, "health"),
    "nvlinks-fewer": ("one GPU has fewer NVLinks", "nvlinks", 12, "inventory"),
    "nvlink-slow": ("an NVLink of one GPU runs at half its speed", "nvlink_speed", 13281, "inventory"),
    "driver-differs": ("one GPU reports another driver", "driver", "000.01", "inventory"),
    "inforom-differs": ("one GPU has a different InfoROM", "inforom", "G000.0000.00.01", "inventory"),
    "compute-mode": ("one GPU serves a single process only", "compute_mode", "exclusive process", "inventory"),
    "virtualized": ("one GPU is virtual", "virtualization", "vgpu", "inventory"),
    "memory-clock-limit": ("one GPU has a lower maximum memory clock", "memory_clock_max", 1593, "inventory"),
    "slot-generation": ("one slot is set to Gen3", "pcie_generation_max", 3, "inventory"),
    "slot-width": ("one slot has 8 lanes", "pcie_width_max", 8, "inventory"),
}
"""Faults that set one field of one GPU: summary, field, value, and the check that must detect it."""

_LIMITS: dict[str, tuple[str, dict[str, Value]]] = {
    "core-hot": ("a GPU is hotter than its own slowdown limit", {"temperature": 96}),
    "memory-hot": ("the memory of a GPU is hotter than it may be", {"memory_temperature": 105}),
    "no-margin": ("a GPU without a known limit has no margin of temperature", {"temperature_margin": 0}),
    "clock-stuck": ("the SM clock of a GPU stays at its idle value under load", {"sm_clock": 345}),
    "memory-clock-low": ("the memory clock of a GPU is low under load", {"memory_clock": 810}),
    "power-over": ("a GPU draws more than its power limit", {"power": 805.0}),
    "pcie-trains-down": ("the PCIe link of a GPU trains down after the inventory", {"pcie_generation": 1}),
    "pcie-loses-lanes": ("the PCIe link of a GPU loses lanes under load", {"pcie_width": 8}),
    "nvlink-flaps": ("an NVLink is down under load, and up at the end", {"nvlinks_up": 17}),
    "clock-beside": ("the SM clock of a GPU is far below that of the others under load", {"sm_clock": 1200}),
    "slowed-by-board": ("the board slows a GPU down under load", {"throttle": "hardware slowdown"}),
    "slowed-by-driver": ("the driver slows a GPU down for heat", {"throttle": "thermal (software)"}),
    "power-brake": ("the machine caps the power of a GPU", {"throttle": "power brake"}),
    "unreliable": ("a GPU lowers its clocks to stay reliable", {"throttle": "reliability"}),
    "no-spare-rows": ("banks of memory have no spare rows left", {"banks_without_spares": 2}),
    "thermal-throttle": (
        "a GPU overheats under load, and its clocks drop",
        {"throttle": "thermal (hardware)", "temperature": 94, "sm_clock": 1095},
    ),
}
"""Faults that only load shows: summary, and the fields with their values."""

_CHANGES: dict[str, tuple[str, dict[str, Value]]] = {
    "power-limit-changes": ("the power limit of a GPU is lowered during the run", {"power_limit": 400}),
    "mode-changes": ("MIG is switched on during the run", {"mig": "on"}),
    "memory-shrinks": ("a GPU loses memory during the run", {"memory": 12 << 20}),
    "slot-changes": ("a slot trains to fewer lanes during the run", {"pcie_width_max": 8}),
    "nvlink-goes-down": ("an NVLink goes down during the run", _DOWN),
}
"""Facts that change during the run: summary, and the later values."""

_EVERYWHERE: dict[str, tuple[str, dict[str, Value]]] = {
    "nvlinks-missing-everywhere": ("each GPU has lost the NVLinks to one of several switches", {"nvlinks": 12}),
    "nvlinks-slow-everywhere": ("all NVLinks run at half their speed", {"nvlink_speed": 13281}),
    "ecc-off-everywhere": ("ECC is off on all GPUs", {"ecc": "off", "ecc_pending": "off"}),
    "pcie-width-everywhere": ("all slots have 8 lanes", {"pcie_width_max": 8}),
    "pcie-generation-everywhere": ("all slots are set to Gen3", {"pcie_generation_max": 3}),
}
"""Defects that all GPUs have alike, so that comparing them with each other finds none: summary, fields and values."""

_MOST = 16  # GPUs of a node

Overrides = Callable[[Parameters], Sequence[Override]]


def _overrides(fields: Mapping[str, Value | None], error: str | None = None) -> Overrides:
    """Return a function that makes the overrides of a GPU. The parameters "field" and "value" replace those given."""

    def make(parameters: Parameters) -> Sequence[Override]:
        device, grows, after = (float(parameters.get(name, 0)) for name in ("device", "grows", "after"))
        own = [(str(parameters.get("field", name)), parameters.get("value", value)) for name, value in fields.items()]
        return [Override(int(device), name, value, grows, after, error) for name, value in own]

    return make


def _everywhere(fields: Mapping[str, Value]) -> Overrides:
    return lambda _: [Override(number, field, value) for number in range(_MOST) for field, value in fields.items()]


def _telemetry_fault(
    name: str, summary: str, make: Overrides, by: str = "health", accused: Accused = gpu, **parameters: Value
) -> None:
    hardware_fault(HardwareFault(name, summary, parameters, accused, (by,), telemetry=make))


def _formatted(*rows: tuple[str, str, str]) -> Overrides:
    """Return a function that overrides (the parameter with the GPU, field, value), filled with the parameters."""
    return lambda own: [Override(int(own[gpu]), name.format(**own), value.format(**own)) for gpu, name, value in rows]


for _field, (_summary, _by) in _GROWING.items():
    _telemetry_fault(
        f"{_field.replace('_', '-')}-grows", _summary, _overrides({_field: 0}), device=1, grows=_by, after=0.0
    )
for _name, (_summary, _field, _setting, _check) in _WRONG.items():
    _telemetry_fault(_name, _summary, _overrides({_field: _setting}), _check, device=2)
for _after, _table in ((0.0, _LIMITS), (0.1, _CHANGES)):
    for _name, (_summary, _fields) in _table.items():
        _telemetry_fault(_name, _summary, _overrides(_fields), device=1, after=_after)
for _name, (_summary, _fields) in _EVERYWHERE.items():
    _telemetry_fault(_name, _summary, _everywhere(_fields), "inventory", host)
_ANEW = "a counter starts anew during the run, as after a reset of the GPU"
_telemetry_fault("counter-falls", _ANEW, _overrides({"ecc_corrected": 1000}), device=1, grows=-1, after=0.0)
_telemetry_fault("nvlink-down", "an NVLink is down", _overrides(_DOWN), "inventory", device=1)
_GEN3 = "the PCIe link of a GPU is trained at Gen3 x8, under load too"
_telemetry_fault("pcie-slow", _GEN3, _overrides({"pcie_generation": 3, "pcie_width": 8}), "inventory", device=3)
_telemetry_fault(
    "memory-missing",
    "telemetry reports less memory on one GPU",
    lambda parameters: [Override(int(parameters["device"]), "memory", int(parameters["bytes"]))],
    "inventory",
    device=2,
    bytes=12 << 20,
)
_NO_ACCESS = _formatted(("device", "p2p_{peer}", "chipset not supported"))
_telemetry_fault(
    "peer-access-missing", "a GPU cannot reach the memory of a peer", _NO_ACCESS, "inventory", link, device=0, peer=2
)
_SERIAL = _formatted(("device", "serial", "SIMULATED-{peer}"))
_telemetry_fault("one-serial", "two GPUs report one serial number", _SERIAL, "inventory", host, device=1, peer=2)
_UUIDS = _formatted(("device", "uuid", "GPU-00000000"), ("peer", "uuid", "GPU-00000000"))
_telemetry_fault("one-uuid", "two GPUs report one UUID", _UUIDS, "inventory", host, device=1, peer=2)
_OTHER_SLOT = "the driver's library reports another slot of a GPU than torch"
_telemetry_fault("other-slot", _OTHER_SLOT, _overrides({"pci": "00000000:3F:00.0"}), "inventory", device=1)
_telemetry_fault(
    "slots-swapped",
    "the driver's library reports the slots of two GPUs the wrong way round",
    _formatted(("device", "pci", "00000000:{peer:02X}:00.0"), ("peer", "pci", "00000000:{device:02X}:00.0")),
    "inventory",
    lambda parameters: gpu(parameters) + gpu({"device": parameters["peer"]}),
    device=1,
    peer=2,
)
hardware_fault(
    HardwareFault(
        "xid-79",
        "a GPU falls off the bus during the run, with Xid 79, and telemetry loses it",
        {"device": 3, "after": 0.1},
        gpu,
        ("health",),
        defect=made_by("Lost"),
        telemetry=lambda parameters: [
            *_overrides({"": None}, "lost")(parameters),
            *_overrides({"xid": 79})(parameters),
        ],
    )
)
_NUMBER = "the driver reports an error of a GPU by its number"
_telemetry_fault("xid", _NUMBER, _overrides({"xid": None}), device=1, value=48, after=0.1)
_HANGS = _overrides({"power": None}, "timeout")
_telemetry_fault("driver-hangs", "a query of the driver never returns", _HANGS, device=2, field="power", after=0.0)
_ERRS = _overrides({"ecc_uncorrected": None}, "Unknown Error")
_telemetry_fault("telemetry-errs", "a query of the driver fails", _ERRS, device=2, field="ecc_uncorrected", after=0.0)


_PORT = "sys/class/infiniband/mlx5_1/ports/1"
_NET = "sys/class/net/eth0"
_PCI, _NONFATAL = "sys/devices/pci0000:00/0000:f0:21.0", "TOTAL_ERR_NONFATAL"

_TRANSPORT = "NCCL copies through the memory of the host between GPUs with direct access"
_OF_HOST: dict[str, tuple[str, dict[str, Any]]] = {
    "core-wrong": ("a core of the host computes wrong results", {"core": 5}),
    "host-memory-bit": ("a bit of the memory of the host flips", {"word": 70_001}),
    "transport-shm": (_TRANSPORT, {"transport": "SHM/direct/direct"}),
}
"""Faults of a simulated host: summary, and fields of `SimulatedHost`."""

_FILES: dict[str, tuple[str, str, str]] = {
    "host-memory-uncorrected": (
        *("a memory controller counts an uncorrected error", "sys/devices/system/edac/mc/mc1/ue_count", "1"),
    ),
    "nic-link-flaps": ("the link of a NIC goes down and comes back", f"{_PORT}/counters/link_downed", "1"),
    "nic-link-down": ("the link of a NIC goes down in the run", f"{_PORT}/state", "1: DOWN"),
    "nic-symbol-errors": ("symbol errors of a NIC grow", f"{_PORT}/counters/symbol_error", "5000"),
    "nic-slow": ("the link of a NIC is trained at half the width", f"{_PORT}/rate", "200 Gb/sec (2X NDR)"),
    "nic-pcie-slow": ("the PCIe link of a NIC is trained down", f"{_PCI}/0000:41:00.0/current_link_width", "8"),
    "ethernet-flaps": (
        *("the link of an Ethernet interface goes down and comes back", f"{_NET}/carrier_down_count", "2"),
    ),
    "ethernet-frames": (
        *("frames arrive with wrong checksums at an Ethernet interface", f"{_NET}/statistics/rx_crc_errors", "5000"),
    ),
    "ethernet-carrier": (
        *("an Ethernet interface loses its carrier again and again", f"{_NET}/statistics/tx_carrier_errors", "5000"),
    ),
    "slot-fatal-errors": (
        *("the slot of a NIC counts a fatal error of PCIe", f"{_PCI}/aer_dev_fatal", "TOTAL_ERR_FATAL 1"),
    ),
    "slot-errors": (
        *("the slot of a NIC counts an uncorrectable error of PCIe", f"{_PCI}/aer_dev_nonfatal", f"{_NONFATAL} 1"),
    ),
}
"""Faults that change one file of the kernel: summary, file, and its content after the run."""
_ALWAYS = ("nic-slow", "nic-pcie-slow")  # the content is so before the run, too

for _name, (_summary, _file, _text) in _FILES.items():
    _changes = {_file: _text}
    _OF_HOST[_name] = _summary, {"after": _changes, **({"before": _changes} if _name in _ALWAYS else {})}
for _name, (_summary, _of_host) in _OF_HOST.items():
    hardware_fault(HardwareFault(_name, _summary, {}, host, ("machine",), of_host=_of_host))
