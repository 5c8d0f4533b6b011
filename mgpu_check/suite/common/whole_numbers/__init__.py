"""Training in whole numbers: exact in float32, so that no tolerance is needed."""
