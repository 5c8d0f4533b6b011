"""Property: DistributedDataParallel trains like one device, with each of its options."""
