"""Property: hand-written and torch's model parallelism trains like one device."""
