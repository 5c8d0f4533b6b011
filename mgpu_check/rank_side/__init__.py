"""Run functions in a rank: what surrounds each call there."""
