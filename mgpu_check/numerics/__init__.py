"""What equal means: exact data, error bounds, comparison, and what a difference looks like."""
