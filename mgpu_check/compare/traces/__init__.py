"""Traces of runs in files, and comparisons of a run with a run."""
