"""Check that all GPUs keep right results and their speed under load for the requested time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mgpu_check.acceptance.soak.rounds import Soak

if TYPE_CHECKING:
    from mgpu_check.acceptance.node import Node


def test_gpus_stay_right_under_load(node: Node) -> None:
    """Training, memory, collectives and copies stay right when they run at once, round after round."""
    if node.soak is None:
        pytest.skip("no soak was requested; give --for=2h")
    Soak(node, node.soak).run()
