"""The GPUs are well, before, during and after all other checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.acceptance.unwatched import unwatched
from mgpu_check.checks.health import examine_health
from mgpu_check.checks.load import keep_busy

if TYPE_CHECKING:
    from mgpu_check.acceptance.node import Node

_SAMPLES = {"quick": 3, "standard": 20, "long": 60}
"""Of each GPU under load, where no other check has run before."""


def test_gpus_are_well(node: Node) -> None:
    """No counter of errors has grown, nothing is pending, no clock was held down, and the driver answers for all GPUs."""
    node.record(unwatched(node, "health"))
    telemetry = node.telemetry
    if telemetry is None:
        return
    node.on_ranks("health", keep_busy, _SAMPLES[node.level] * telemetry.interval)
    snapshots = [(boundary.test or "the first look", boundary.snapshot) for boundary in node.boundaries]
    snapshots.append(("test_gpus_are_well", telemetry.snapshot()))
    node.record(examine_health(snapshots, telemetry.samples(), telemetry.troubles()))
