"""Memory of each GPU: every bit holds its value, at its own address."""
