"""Defects of hardware, planted in the simulated node and its telemetry, below the checks."""
