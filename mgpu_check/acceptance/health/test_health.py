"""Check that the GPUs are healthy before, during and after all other checks."""

from __future__ import annotations

import pytest

from mgpu_check.acceptance.health.checks import examine_health, examine_past_xids
from mgpu_check.acceptance.node import Node

_SAMPLES = {"quick": 3, "standard": 20, "long": 60}  # samples of each GPU under load, taken even if no other check ran


@pytest.mark.glance
def test_gpus_are_well(node: Node) -> None:
    """No error counter grew, no repair is pending, no clock was held down, and the driver answers for all GPUs."""
    telemetry = node.telemetry
    if telemetry is None or not node.boundaries:
        return
    telemetry.under_load(node, "health", _SAMPLES[node.depth] * telemetry.interval)
    last = telemetry.snapshot()
    samples, troubles = telemetry.samples(), telemetry.troubles()
    for host, gpus in telemetry.hosts.items():
        earliest, *others = [(boundary.test, boundary.snapshot.only(gpus)) for boundary in node.boundaries]
        others = [labelled for labelled in others if labelled[1].counters]
        snapshots = [earliest, *others, ("test_gpus_are_well", last.only(gpus))]
        mine = [sample for sample in samples if sample.gpu in gpus]
        about = [trouble for trouble in troubles if trouble.gpu in gpus or (trouble.gpu is None and host == 0)]
        node.record(examine_health(snapshots, mine, about, host=host))
        node.record(examine_past_xids({gpu: node.past_xids[gpu] for gpu in gpus if gpu in node.past_xids}))
