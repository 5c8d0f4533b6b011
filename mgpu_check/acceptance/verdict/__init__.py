"""Verdict of an acceptance: which part is at fault, and what to do with it."""
