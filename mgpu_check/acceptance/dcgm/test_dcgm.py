"""Take the results of DCGM's diagnostic into the verdict."""

from __future__ import annotations

import pytest

from mgpu_check.acceptance.dcgm.diagnostic import examine_diagnostic
from mgpu_check.acceptance.node import Node


def test_dcgm_has_passed(node: Node) -> None:
    """No test of DCGM's diagnostic failed on a GPU of this node, and each GPU had one that ran."""
    if node.plan.dcgm is None:
        pytest.skip("no file was given; give --dcgm=FILE.json")
    node.record(examine_diagnostic(node.plan.dcgm, node.gpus, node.visible))
