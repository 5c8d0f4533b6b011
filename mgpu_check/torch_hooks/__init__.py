"""Wrap functions of torch, and restore the global switches of torch that a test may have changed."""
