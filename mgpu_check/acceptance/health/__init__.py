"""Health of each GPU by its telemetry."""
