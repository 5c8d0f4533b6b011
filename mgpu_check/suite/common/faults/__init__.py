"""Planted faults: the proof that the checks can fail."""
