"""Wrap functions of torch, and restore its global switches that a test may have changed."""
