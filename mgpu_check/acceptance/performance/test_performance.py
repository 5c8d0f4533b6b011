"""Check that the speeds measured by the other checks are high enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.acceptance.performance.checks import CHECK, judge, unmeasured
from mgpu_check.devices.observations import Observation, Subject

if TYPE_CHECKING:
    from mgpu_check.acceptance.node import Node


def test_gpus_and_links_are_fast_enough(node: Node) -> None:
    """Bandwidth, latency and rates reach those of the other GPUs, of the baseline, and the floors of the model."""
    if node.plan.simulate not in (None, "cpu"):
        why = "simulated GPUs share a real one, so their speed depends on each other"
        node.record(Observation(CHECK, Subject("gpu", (number,)), "skipped", why) for number in node.numbers)
        return
    software = {host.number: host.software for host in node.hosts_of_run}
    measurements = node.measurements()
    node.record(judge(measurements, node.gpus, node.plan.baseline, software=software))
    node.record(unmeasured(measurements, node.gpus))
