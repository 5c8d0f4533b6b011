"""The engine: warm processes, one per rank, that run functions in lockstep and heal."""
