"""GPUs that no telemetry looks at: nothing is known of what it alone would see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.devices.observations import Observation, Subject

if TYPE_CHECKING:
    from mgpu_check.acceptance.node import Node

__all__ = ["unwatched"]


def unwatched(node: Node, check: str) -> list[Observation]:
    """Return that nothing is known, for each GPU that telemetry does not look at."""
    watched = () if node.telemetry is None else node.telemetry.gpus
    why = "telemetry looks at the GPUs of the first host alone: run mgpu-check accept on this host by itself, too"
    return [
        Observation(check, Subject("gpu", (gpu.number,)), "unknown", why)
        for gpu in node.gpus
        if gpu.number not in watched
    ]
