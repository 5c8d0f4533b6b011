"""Check torch's own sharding: DTensors, FSDP, sharded optimizers, synchronised statistics, checkpoints."""
