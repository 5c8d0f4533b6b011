"""Judge what the kernel says of a host before and after a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mgpu_check.acceptance.machine.kernel import Component, KernelFacts
from mgpu_check.acceptance.robust import LEAST_PEERS
from mgpu_check.devices.observations import Observation, Outcome, Subject, Work

_KINDS = {"infiniband": "InfiniBand port", "ethernet": "Ethernet interface", "memory": "memory controller (EDAC)"}


@dataclass(frozen=True)
class GrowthLimit:
    """A counter that must not grow by more in a run.

    Attributes:
        kind, field: the kind of the component, and its file.
        most: the largest growth that is allowed.
        finding: selects the kind of finding.
        but: models that another check judges.
    """

    kind: str
    field: str
    text: str
    most: int
    finding: str
    but: tuple[str, ...] = ()


_MINOR = 10  # ibcheckerrors of infiniband-diags warns above 10
_CORRECTED = 480  # of PCIe: DCGM's limit for its plugin pcie

_LIMITS = (
    GrowthLimit("infiniband", "link_downed", "times its link went down", 0, "nic link"),
    GrowthLimit("infiniband", "link_error_recovery", "recoveries of its link", 0, "nic errors"),
    GrowthLimit("infiniband", "symbol_error", "symbol errors", _MINOR, "nic errors"),
    GrowthLimit("infiniband", "port_rcv_errors", "received packets with errors", _MINOR, "nic errors"),
    GrowthLimit("infiniband", "local_link_integrity_errors", "errors of link integrity", _MINOR, "nic errors"),
    GrowthLimit("infiniband", "excessive_buffer_overrun_errors", "buffer overruns", _MINOR, "nic errors"),
    GrowthLimit("ethernet", "carrier_down_count", "times its link went down", 0, "nic link"),
    GrowthLimit("ethernet", "statistics/rx_crc_errors", "frames with a wrong checksum", _MINOR, "nic errors"),
    GrowthLimit("ethernet", "statistics/tx_carrier_errors", "losses of the carrier", _MINOR, "nic errors"),
    GrowthLimit("memory", "ue_count", "uncorrected errors of memory", 0, "host memory errors"),
    GrowthLimit("memory", "ce_count", "corrected errors of memory", 0, "host memory corrected"),
    GrowthLimit("pci", "aer_dev_fatal", "fatal errors of PCIe", 0, "host pcie", but=("gpu",)),
    GrowthLimit("pci", "aer_dev_nonfatal", "uncorrectable errors of PCIe", 0, "host pcie", but=("gpu",)),
    GrowthLimit("pci", "aer_dev_correctable", "corrected errors of PCIe", _CORRECTED, "host pcie corrected"),
)
"""The health of a GPU has its fatal and other uncorrectable errors of PCIe from the driver."""


def of_host(outcome: Outcome, seen: str, case: str, work: Work, **evidence: Any) -> Observation:
    return Observation("machine", Subject("host", (0,)), outcome, seen, case, work, evidence)


def examine_kernel(before: KernelFacts | None, after: KernelFacts) -> list[Observation]:
    """Judge counters by their growth and states by their value after the run.

    Args:
        before: the facts from before the run; None if they were not read.

    Returns:
        failed observations, and one that passed, with the number of values that were judged; skipped ones for kinds of
        components that the host does not have.
    """
    found: list[Observation] = []
    judged = 0
    silent: Counter[str] = Counter()

    def wrong(kind: str, one: Component, text: str, **evidence: Any) -> None:
        seen = f"{one.name}: {text}"
        found.append(of_host("failed", seen, "kernel", Work(operations=1), kind=kind, component=one.name, **evidence))

    for limit in _LIMITS:
        for one in (one for one in after.values() if one.kind == limit.kind and one.model not in limit.but):
            first = before[one.name].values.get(limit.field) if before and one.name in before else None
            last = one.values.get(limit.field)
            if not isinstance(first, int) or not isinstance(last, int):
                silent[f"{limit.kind} {limit.field}"] += 1
                continue
            judged += 1
            if (more := last - first if last >= first else last) > limit.most:
                text = f"{more} {limit.text} in the run (from {first} to {last}, allowed {limit.most})"
                wrong(limit.finding, one, text, before=first, after=last, field=limit.field)
    for name, one in (before or {}).items():
        gone = one.kind in ("infiniband", "ethernet") and name not in after
        if gone or (one.is_up and not after.get(name, one).is_up):
            wrong("nic link", one, "it is gone" if gone else "its link is down, and was up before the run")
    for kind, one, text in _states(after):
        wrong(kind, one, text)
    judged += sum(len(one.values) for one in after.values())
    counts = Counter(one.kind for one in after.values())
    evidence = {"components": dict(counts), "not known": dict(silent)}
    found.append(of_host("passed", "", "kernel", Work(operations=judged), **evidence))
    if silent:
        names = ", ".join(f"{name} ({times})" for name, times in silent.items())
        found.append(of_host("skipped", f"counters that could not be read before and after: {names}", "kernel", Work()))
    for kind, text in _KINDS.items():
        if not counts[kind]:
            found.append(of_host("skipped", f"the kernel shows no {text}", "kernel", Work()))
    return found


def _states(facts: KernelFacts) -> Iterator[tuple[str, Component, str]]:
    yield from _speeds(facts)
    gpus = [one for one in facts.values() if one.model == "gpu"]
    for one in facts.values():
        if one.kind == "infiniband" and not one.is_up:
            yield "nic idle", one, f"its state is {one.values.get('state', 'unknown')}, so nothing uses it"
        if one.model == "nic":
            yield from ((*("nic pcie", one), text) for text in _trained(one, facts))
    usual = Counter(one.values["gsp"] for one in gpus if "gsp" in one.values).most_common(1)
    for one in gpus:
        if one.values.get("numa_node") == -1 and int(facts["host"].values["nodes"]) > 1:
            yield "affinity", one, "the kernel does not know its NUMA node"
        if one.values.get("near") == 0:
            yield "affinity", one, "this process may use no core of its NUMA node"
        if str(one.values.get("iommu", "")).startswith("DMA"):
            yield "iommu", one, f"the IOMMU translates its addresses ({one.values['iommu']})"
        if "gsp" in one.values and one.values["gsp"] != usual[0][0] and 2 * usual[0][1] > len(gpus):
            yield ("gsp", one, f"its firmware of the GSP is {one.values['gsp']}, and that of the others {usual[0][0]}")
    above = {slot for one in gpus for slot in one.slots[:-1]} if len(gpus) > 1 else set()
    for one in facts.values():
        if one.name in above and one.values.get("acs"):
            yield "acs", one, "ACS sends the traffic between GPUs below it up to the root"


def _speeds(facts: KernelFacts) -> Iterator[tuple[str, Component, str]]:
    """Yield the NICs that are slower than the others of their model, if at least two of these agree and are most."""
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for one in facts.values():
        speed = _number(one.values.get("rate" if one.kind == "infiniband" else "speed"))
        if one.kind in ("infiniband", "ethernet") and one.is_up and speed is not None and speed > 0:
            groups.setdefault((one.kind, one.model), {})[one.name] = speed
    for (kind, _), speeds in groups.items():
        (usual, times), *_ = Counter(speeds.values()).most_common(1)
        for name, speed in speeds.items():
            if speed < usual and times >= LEAST_PEERS and 2 * times > len(speeds):
                unit = "Gb/s" if kind == "infiniband" else "Mb/s"
                text = f"its link runs at {speed:g} {unit}, and {times} others of its model at {usual:g} {unit}"
                yield "nic slow", facts[name], text


def _trained(one: Component, facts: KernelFacts) -> Iterator[str]:
    """Yield what of the PCIe link of a NIC is below what the NIC and its slot can do."""
    slot = facts.get(one.slots[-2]) if len(one.slots) > 1 else None
    for name, unit in (("speed", "GT/s"), ("width", "lanes")):
        now = _number(one.values.get(f"current_link_{name}"))
        most = [_number(part.values.get(f"max_link_{name}")) for part in (one, slot) if part is not None]
        known = [value for value in most if value]
        if now is not None and known and now < min(known):
            yield f"its PCIe link has {now:g} {unit}, and it and its slot can do {min(known):g} {unit}"


def _number(value: str | int | None) -> float | None:
    match = re.match(r"-?\d+(\.\d+)?", str(value))
    return float(match[0]) if match else None
