"""Which slices of a single-device tensor each rank holds: how they are found, described and put together."""
