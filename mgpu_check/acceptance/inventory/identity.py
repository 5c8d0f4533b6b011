"""Check that each GPU is itself: no two have one identity, and driver and torch agree on its slot."""

from __future__ import annotations

from collections.abc import Mapping

from mgpu_check.devices.observations import Observation, Subject, Work
from mgpu_check.devices.telemetry.fields import field_of
from mgpu_check.devices.telemetry.values import Snapshot

_CHECK = "inventory"
_CASE = "identity"


def examine_identity(snapshot: Snapshot, slots: Mapping[int, str], *, host: int = 0) -> list[Observation]:
    """Compare the identities of the GPUs of one host with each other, and their slots with those that torch reports.

    GPUs on a board with several GPUs share its serial number. MIG devices share that of their GPU, and its slot.

    Args:
        slots: PCI bus id of each GPU by its number, from torch; absent where unknown.

    Returns:
        Failed observations only. It is unknown which of two GPUs has a wrong identity, so they are about the host.
    """
    found = []
    for name in ("uuid", "serial", "pci"):
        owners: dict[object, list[int]] = {}
        for gpu, values in sorted(snapshot.identity.items()):
            facts = snapshot.facts.get(gpu, {})
            may_share = facts.get("mig") == "on" or (name == "serial" and facts.get("multi_gpu_board") is True)
            if values.get(name) and not may_share:
                owners.setdefault(values[name], []).append(gpu)
        for value, gpus in owners.items():
            if len(gpus) > 1:
                text = f"its GPUs {', '.join(map(str, gpus))} have one {field_of(name).text}: {value}"
                found.append(_wrong(Subject("host", (host,)), text, name, value, {"shared by": gpus}))
    for gpu, slot in sorted(slots.items()):
        seen = snapshot.identity.get(gpu, {}).get("pci")
        if seen and slot and str(seen).lower() != slot.lower():
            text = f"PCI bus id is {seen} for the driver's library, and {slot} for torch"
            found.append(_wrong(Subject("gpu", (gpu,)), text, "pci", seen, {"of torch": slot}))
    return found


def _wrong(subject: Subject, text: str, name: str, value: object, more: Mapping[str, object]) -> Observation:
    evidence = {"field": name, "seen": value, **more}
    return Observation(_CHECK, subject, "failed", text, _CASE, Work(operations=1), evidence)
