"""Faults of collectives: reductions, copies, messages, groups and other forms of calls."""

from mgpu_check.suite.collectives.faults import copies, groups, messages, reductions
from mgpu_check.suite.collectives.faults import functional as forms

__all__ = ["copies", "forms", "groups", "messages", "reductions"]
