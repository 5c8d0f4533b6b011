"""Find the slices of single-device tensors that ranks hold, describe them, and put them together."""
