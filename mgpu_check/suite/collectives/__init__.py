"""Property: collectives deliver what their documentation says, for all dtypes, sizes, groups and forms of call."""
