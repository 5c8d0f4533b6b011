"""The pytest plugin: the way of a test from its marks to the ranks, and back into pytest's report.

1. `plugin.py` has all hooks and options; it imports no torch. `session.py` is the state of the run.
2. At collection, `requirements.py` reads marks and fixtures; `device_leases.py` gets the devices.
3. `execution.py` replaces the body of the test; `serialization.py` and `replacements.py` say what travels with it.
   `ranks.py` is the fixture for tests that call ranks themselves.
4. In the rank, `in_rank.py` calls the function as pytest would; `rank_messages.py` brings back what it printed or
   warned.
5. `report/` puts the outcome into pytest's reports.

Beside that way: `harness_*.py` adapt torch's own test classes, and `launch.py` is for torchrun and srun.
"""
