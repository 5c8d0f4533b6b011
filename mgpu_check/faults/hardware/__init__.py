"""Defects of hardware, planted below the checks, in the simulated node and in its telemetry."""
