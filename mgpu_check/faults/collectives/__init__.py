"""Faults of collectives: reductions, copies, messages, groups and other forms of calls."""

from mgpu_check.faults.collectives import copies, forms, groups, messages, reductions, sums

__all__ = ["copies", "forms", "groups", "messages", "reductions", "sums"]
