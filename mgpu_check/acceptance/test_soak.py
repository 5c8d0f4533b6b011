"""All GPUs stay right, and as fast as they were, under load for as long as was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mgpu_check.acceptance.soaking import Soak

if TYPE_CHECKING:
    from mgpu_check.acceptance.node import Node


def test_gpus_stay_right_under_load(node: Node) -> None:
    """Training, memory, collectives and copies at once, round after round."""
    if node.soak is None:
        pytest.skip("no soak was asked for; ask with --for=2h")
    Soak(node, node.soak).run()
