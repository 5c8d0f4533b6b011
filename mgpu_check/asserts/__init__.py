"""Public assertions on tensors, gradients, shards, replicas and refused operands, and their findings."""
