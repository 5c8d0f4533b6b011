"""Arithmetic of each GPU: digests of exact results, and a vote among the GPUs."""
