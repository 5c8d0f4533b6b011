"""Telemetry of each GPU during a run: identity, state and counters, as the driver reports them."""
