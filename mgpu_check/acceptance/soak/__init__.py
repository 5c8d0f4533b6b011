"""Soak: full load in rounds, until the time is over."""
