"""A test of a user, whose loader raises on one device."""

from __future__ import annotations

from mgpu_check import assert_loader_covers


def test_loader_that_raises(ranks):
    assert_loader_covers(ranks, lambda rank: 1 / (rank.size - 1))
