"""Assertions on results of ranks: collectives, shards, models and replicas, and errors for mixed devices.

Each takes plain tensors and raises a `CheckFailure` of `mgpu_check.errors`. `findings.py` collects several of a rank;
`known_defects.py` lists what torch itself does wrong.
"""
