"""What was measured on the way is as fast as it should be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.acceptance.performance import CHECK, judge
from mgpu_check.devices.observations import Observation, Subject

if TYPE_CHECKING:
    from mgpu_check.acceptance.node import Node


def test_gpus_and_links_are_fast_enough(node: Node) -> None:
    """Bandwidth, latency and rates are those of the other GPUs, of the baseline, and of the model."""
    if node.plan.simulate not in (None, "cpu"):
        why = "simulated GPUs that share a real one are as fast as their neighbours let them be"
        node.record(Observation(CHECK, Subject("gpu", (number,)), "skipped", why) for number in node.numbers)
        return
    software = node.hosts_of_run[0].software if node.hosts_of_run else {}
    node.record(judge(node.measurements(), node.gpus, node.plan.baseline, software=software))
