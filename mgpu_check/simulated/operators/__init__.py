"""Operators that the backing device computes otherwise than CUDA, or not at all."""
