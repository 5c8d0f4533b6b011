"""What is divided among ranks by torch itself: DTensors, parameters, optimizers, statistics, checkpoints."""
