"""The GPUs are what they should be: equal to each other, and with links that are trained as they can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.checks.inventory import examine_inventory, examine_pcie
from mgpu_check.devices.observations import Observation, Subject

if TYPE_CHECKING:
    from mgpu_check.acceptance.baseline import Value
    from mgpu_check.acceptance.node import Node

_SAMPLES = 3  # under load, of each GPU; the first may be of a link that is still asleep


def _expected(node: Node, host: int) -> tuple[dict[str, Value], int | None, str]:
    """Return what the baseline says of a host: facts, number of GPUs, and why it says nothing.

    GPUs are counted only where all of the host are in the run.
    """
    baseline, gpus = node.plan.baseline, [gpu for gpu in node.gpus if gpu.host == host]
    if baseline is None:
        return {}, None, ""
    facts, why = baseline.expected(gpus, node.hosts_of_run[host].software)
    return facts, baseline.count(gpus) if len(gpus) == node.visible.get(host) else None, why


def test_gpus_are_equal(node: Node) -> None:
    """Model, memory, driver, VBIOS, ECC mode, MIG mode, clocks, power limit, links and peer-to-peer capability are equal, and as recorded."""
    if node.telemetry is None or not node.boundaries:
        return
    for host, gpus in node.telemetry.hosts.items():
        facts, count, why = _expected(node, host)
        node.record([Observation("inventory", Subject("host", (host,)), "unknown", why)] if why else [])
        taken = node.boundaries[0].snapshot.only(gpus)
        node.record(examine_inventory(taken, host=host, expected=facts, count=count))


def test_pcie_is_trained_under_load(node: Node) -> None:
    """PCIe has the generation and width under load that a GPU and its slot can do."""
    if node.telemetry is None or not node.boundaries:
        return
    samples = node.telemetry.under_load(node, "inventory", _SAMPLES * node.telemetry.interval)
    node.record(examine_pcie(node.boundaries[0].snapshot, samples))
