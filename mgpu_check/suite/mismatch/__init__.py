"""Property: operands on different devices work, or raise an error that names both devices."""
