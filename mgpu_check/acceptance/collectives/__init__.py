"""Collectives on all GPUs: exact data on every rank, and their speed."""
