"""Mechanisms of model parallelism, each with its step on one device, and its step divided among ranks."""
