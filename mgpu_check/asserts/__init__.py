"""Public assertions on tensors, gradients, shards, replicas and refused operands, and the findings that they are built
of."""
