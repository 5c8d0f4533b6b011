"""Checks as plain functions: each asserts one thing about tensors or ranks, and knows nothing of pytest."""
