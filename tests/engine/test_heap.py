"""The heap of ranks."""

from __future__ import annotations

import itertools
import resource
import sys
from typing import Any

import pytest
import torch


def faults_of_blocks(rank: Any) -> list[int]:
    """Page faults of each of six rounds that write and free 12 blocks of 16 MiB, 4,096 pages
    each."""
    counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(6):
        blocks = [torch.ones(1 << 22) for _ in range(12)]
        del blocks
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return [after - before for before, after in itertools.pairwise(counts)]


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told")
@pytest.mark.gpus(1)
def test_freed_memory_is_used_again(ranks):
    (faults,) = ranks.run(faults_of_blocks)
    assert faults[0] > 10 * 4096 > 4096 > faults[-1], faults
