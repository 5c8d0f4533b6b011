"""Define equality of numbers: exact data, error bounds, comparison, and what a difference looks like."""
