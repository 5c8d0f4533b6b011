"""Training of a transformer on each GPU, alone and together."""
