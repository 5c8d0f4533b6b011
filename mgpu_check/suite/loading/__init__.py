"""Property: samplers and loaders give each sample once."""
