"""Check that the GPUs have equal properties, and that their PCIe links are trained to their capability."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.acceptance.inventory.checks import examine_inventory, examine_pcie
from mgpu_check.devices.observations import Observation, Subject

if TYPE_CHECKING:
    from mgpu_check.acceptance.node import Node
    from mgpu_check.devices.telemetry.fields import Value

_SAMPLES = 3  # under load, of each GPU; the first may be of a link that is still asleep


def _expected(node: Node, host: int) -> tuple[dict[str, Value], int | None, str]:
    """Return the baseline's facts for a host, its number of GPUs, and why there are no facts ("" if there are).

    The number is None unless all GPUs of the host are in the run.
    """
    baseline, gpus = node.plan.baseline, [gpu for gpu in node.gpus if gpu.host == host]
    if baseline is None:
        return {}, None, ""
    facts, why = baseline.expected(gpus, node.hosts_of_run[host].software)
    return facts, baseline.count(gpus) if len(gpus) == node.visible.get(host) else None, why


def test_gpus_are_equal(node: Node) -> None:
    """The GPUs agree with each other and with the baseline in model, memory, driver, VBIOS, modes, clocks, limits and
    links."""
    if node.telemetry is None or not node.boundaries:
        return
    for host, gpus in node.telemetry.hosts.items():
        facts, count, why = _expected(node, host)
        node.record([Observation("inventory", Subject("host", (host,)), "unknown", why)] if why else [])
        taken = node.boundaries[0].snapshot.only(gpus)
        node.record(examine_inventory(taken, host=host, expected=facts, count=count))


def test_pcie_is_trained_under_load(node: Node) -> None:
    """PCIe runs under load at the generation and width that the GPU and its slot support."""
    if node.telemetry is None or not node.boundaries:
        return
    samples = node.telemetry.under_load(node, "inventory", _SAMPLES * node.telemetry.interval)
    node.record(examine_pcie(node.boundaries[0].snapshot, samples))
