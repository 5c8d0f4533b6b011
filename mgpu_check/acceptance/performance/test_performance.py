"""Check that the speeds measured by the other checks are high enough."""

from __future__ import annotations

import time
from typing import Any

from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.performance.checks import CHECK, judge, unmeasured
from mgpu_check.acceptance.verdict import LOCALISATION_SECONDS
from mgpu_check.devices.observations import Observation, Subject


def test_gpus_and_links_are_fast_enough(node: Node) -> None:
    """Bandwidth, latency and rates reach those of the other GPUs, of the baseline, and the floors of the model."""
    if node.plan.simulate not in (None, "cpu"):
        reason = "simulated GPUs share a real one, so their speed depends on each other"
        node.record(Observation(CHECK, Subject("gpu", (number,)), "skipped", reason) for number in node.numbers)
        return
    measurements, gpus = node.measurements(), node.gpus
    software = {host.number: host.software for host in node.hosts_of_run}
    references: Any = {"baseline": node.plan.baseline, "software": software}
    observations = judge(measurements, gpus, **references)
    keys = ("quantity", "unit", "size")
    slow = {tuple(entry.evidence[key] for key in keys) for entry in observations if entry.outcome == "failed"}
    if slow:
        until = time.monotonic() + LOCALISATION_SECONDS[node.depth]
        slow_ones = [m for m in measurements if m.kind[:3] in slow]
        second_look = node.measure_again(slow_ones, lambda: time.monotonic() > until)
        observations = judge(measurements, gpus, second_look=second_look, **references)
    node.record(observations)
    node.record(unmeasured(measurements, gpus))
