"""Defects of collectives: of reductions, of copies and messages, and of what surrounds them."""

from mgpu_check.faults.collectives import copies, forms, groups, messages, reductions, sums

__all__ = ["copies", "forms", "groups", "messages", "reductions", "sums"]
