"""Inventory of a node: equal GPUs, with links at full speed."""
