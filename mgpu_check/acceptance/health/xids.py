"""Explain the common Xids, the error numbers of NVIDIA's driver, and give advice on them."""

from __future__ import annotations

from collections.abc import Mapping

from mgpu_check.devices.observations import Observation, Subject, Work

CONSEQUENCES = frozenset((43, 45, 154))
"""Xids that follow from a killed process or from another Xid, and so accuse no GPU."""

_RESET = "reset the GPU and run again; if it comes back, exchange the GPU"
_REMAP = "reset the GPU, so that the remapping takes effect, and run again"
_LINK = (
    "reset the GPU; look at the error counters of its NVLinks; re-seat it or its bridge; if it comes back, exchange it"
)
_FIRMWARE = "reset the GPU or restart the machine, update driver and firmware; if it comes back, exchange the GPU"
_CODE = "run again; if it comes back on this GPU alone, it is hardware: exchange it; if on others, it is software"

_XIDS: dict[int, tuple[str, str]] = {
    13: ("exception of the graphics engine", _CODE),
    31: ("page fault in the memory of the GPU", _CODE),
    32: ("invalid or corrupted push buffer", _CODE),
    38: ("error of the driver's firmware", _FIRMWARE),
    43: ("the GPU stopped processing", _CODE),
    45: ("clean-up after an earlier error, or after a process was killed", ""),
    46: ("the GPU stopped processing", _RESET),
    48: ("uncorrectable error of memory (double bit)", _RESET),
    61: ("breakpoint of an internal micro-controller", _RESET),
    62: ("halt of an internal micro-controller", _RESET),
    63: ("a row or page of memory was marked for remapping or retirement", _REMAP),
    64: ("a row or page of memory could not be remapped or retired", "exchange the GPU"),
    69: ("class error of the graphics engine", _CODE),
    74: ("error of an NVLink", _LINK),
    79: (
        "the GPU has fallen off the bus",
        "power the machine off and on; re-seat the GPU, look at its power and riser; if it comes back, exchange it",
    ),
    92: ("high rate of corrected errors of memory", _RESET),
    94: ("uncorrectable error of memory, contained", _REMAP),
    95: ("uncorrectable error of memory, not contained", _REMAP),
    109: ("timeout of a switch between contexts", _RESET),
    110: ("fault of the security engine", _RESET),
    119: ("timeout of the GPU's system processor (GSP)", _FIRMWARE),
    120: ("error of the GPU's system processor (GSP)", _FIRMWARE),
    121: ("error of the link between chips (C2C)", "restart the machine; if it comes back, exchange the module"),
    136: ("error while an NVLink was trained", _LINK),
    137: ("error of an access over NVLink", _LINK),
    140: ("uncorrectable error of memory or of a cache", _RESET),
    143: ("the GPU could not be initialized", _FIRMWARE),
    **dict.fromkeys(range(144, 151), ("error of an NVLink", _LINK)),
    154: ("the recovery action of the GPU has changed", "take the recovery action of the GPU"),
    156: ("a resource of the GPU was retired", _REMAP),
    157: ("a resource of the GPU could not be retired", "exchange the GPU"),
    158: ("fatal timeout of the GPU", _RESET),
}


def meaning_of(xid: int) -> str:
    return f"Xid {xid}: {_XIDS[xid][0]}" if xid in _XIDS else f"Xid {xid}"


def advice_on(xid: int) -> str:
    return _XIDS[xid][1] if xid in _XIDS else f"look it up in NVIDIA's catalog of Xids; {_RESET}"


def examine_past_xids(seen: Mapping[int, Mapping[int, int]]) -> list[Observation]:
    found = []
    for gpu, xids in sorted(seen.items()):
        for xid, times in sorted(xids.items()):
            if xid not in CONSEQUENCES:
                text = f"{meaning_of(xid)}, {times} times in the kernel log before the run"
                evidence = {"kind": "past xid", "code": xid, "times": times, "advice": advice_on(xid)}
                subject = Subject("gpu", (gpu,))
                found.append(Observation("health", subject, "failed", text, "kernel log", Work(operations=1), evidence))
    return found
