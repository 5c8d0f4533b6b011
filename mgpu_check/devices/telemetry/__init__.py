"""What the driver says of each GPU while a run goes on: identity, state, counters."""
