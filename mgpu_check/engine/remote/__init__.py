"""Runs beyond one machine: a launcher starts a process per host, one is the driver and has the pool.

`launched_process.py` reads the launcher's variables; `meeting.py` lets agents find the driver; `credentials.py` proves
both sides to each other; `connections.py` accepts them; `agent.py` then forks ranks as the driver's launcher
(`driver.py`) asks.
"""
