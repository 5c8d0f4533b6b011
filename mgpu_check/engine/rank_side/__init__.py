"""Run calls in a rank, and restore its state between them."""
