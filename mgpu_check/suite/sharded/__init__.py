"""Property: sharding by torch keeps the state of one device."""
