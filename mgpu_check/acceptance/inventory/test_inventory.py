"""Check that the GPUs have equal properties, and that their PCIe links are trained to their capability."""

from __future__ import annotations

import pytest

from mgpu_check.acceptance.inventory.checks import Reference, examine_identity, examine_inventory, examine_pcie
from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.references import packaged_floors
from mgpu_check.devices.observations import Observation, Subject

_SAMPLES = 3  # under load, of each GPU; the first may be of a link that is still asleep


def _references(node: Node, host: int) -> tuple[list[Reference], list[str]]:
    """Return what the facts of a host are compared with, and why some references are missing.
    The number of GPUs is compared only if all GPUs of the host are in the run."""
    baseline, gpus = node.plan.baseline, [gpu for gpu in node.gpus if gpu.host == host]
    all_of_host = len(gpus) == node.visible.get(host)
    references, missing = [], []
    if baseline is not None:
        facts, reason = baseline.expected(gpus, node.hosts_of_run[host].software)
        count = baseline.count(gpus)
        references.append(Reference("the baseline", facts, (count,) if count is not None and all_of_host else ()))
        missing += [reason] if reason else []
    floors = packaged_floors()
    models = {sku.names: sku for gpu in gpus if (sku := floors.sku(gpu)) is not None}
    if len(models) == 1:
        (sku,) = models.values()
        counts = sku.counts if all_of_host else ()
        references.append(Reference(f"the data sheet of {gpus[0].name}", sku.facts(len(gpus)), counts, nominal=True))
    if baseline is None or missing:
        unknown = ((gpu, reason) for gpu in gpus if (reason := floors.about(gpu)))
        missing += sorted({f"no facts of {gpu.name} are known: {reason}" for gpu, reason in unknown})
    return references, missing


@pytest.mark.glance
def test_gpus_are_equal(node: Node) -> None:
    """The GPUs agree with the baseline, the data sheet and each other in model, memory, driver, VBIOS, modes, limits
    and links, and no two have one identity."""
    if node.telemetry is None or not node.boundaries:
        return
    for host, gpus in node.telemetry.hosts.items():
        references, missing = _references(node, host)
        node.record([Observation("inventory", Subject("host", (host,)), "unknown", reason) for reason in missing])
        snapshot = node.boundaries[0].snapshot.only(gpus)
        node.record(examine_inventory(snapshot, host=host, references=references))
        node.record(examine_identity(snapshot, {gpu: node.slots.get(gpu, "") for gpu in gpus}, host=host))


@pytest.mark.glance
def test_pcie_is_trained_under_load(node: Node) -> None:
    """PCIe runs under load at the generation and width that the GPU and its slot support."""
    if node.telemetry is None or not node.boundaries:
        return
    samples = node.telemetry.under_load(node, "inventory", _SAMPLES * node.telemetry.interval)
    node.record(examine_pcie(node.boundaries[0].snapshot, samples))
