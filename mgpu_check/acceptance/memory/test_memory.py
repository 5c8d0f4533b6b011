"""Check that most of the free memory of each GPU reads back as written."""

from __future__ import annotations

import pytest
from hypothesis import given

from mgpu_check.acceptance.cases import PATTERNS, MemoryCase
from mgpu_check.acceptance.node import SEEDS, Node, drawn
from mgpu_check.engine.rank_side.rank import NamedFunction

_EXAMINE = NamedFunction("mgpu_check.acceptance.memory.checks:examine_memory")
_PASSES = {"quick": 1, "standard": 2, "long": 8}
_HELD = {"quick": 2.5, "standard": 20.0, "long": 120.0}
"""Seconds between writing and reading, for cells that lose their content."""


@pytest.mark.parametrize("pattern", PATTERNS)
@drawn(quick=1, standard=2, long=8)
@given(seed=SEEDS)
def test_memory_holds_what_is_written(node: Node, pattern: str, seed: int) -> None:
    """Each bit of most of the free memory holds 0 and 1, at its own address."""
    node.on_ranks("memory", _EXAMINE, MemoryCase(pattern, node.plan.memory_share, seed, _PASSES[node.depth]))


@drawn(quick=1, standard=1, long=2)
@given(seed=SEEDS)
def test_memory_keeps_what_was_written(node: Node, seed: int) -> None:
    """Most of the free memory holds random numbers, and their complement, while the GPU computes."""
    case = MemoryCase("random", node.plan.memory_share, seed, hold_seconds=_HELD[node.depth])
    node.on_ranks("memory", _EXAMINE, case)
