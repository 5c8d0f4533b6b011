"""Process groups and data parallelism over simulated devices."""
