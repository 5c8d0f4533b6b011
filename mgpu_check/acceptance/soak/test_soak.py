"""Check that all GPUs keep right results and their speed under load for the requested time."""

from __future__ import annotations

import pytest

from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.soak.rounds import Soak


def test_gpus_stay_right_under_load(node: Node) -> None:
    """Training, memory, collectives and copies stay right when they run at once, round after round."""
    if node.plan.soak is None:
        pytest.skip("no soak was requested; give --for=2h")
    Soak(node, node.plan.soak).run()
