"""The devices of this machine: which there are, who uses them, what they measure, and what checks observe on them.

`inventory.py` finds the real devices and chooses those of a world, and `leases.py` gives them to one test at a time.
`telemetry/` samples them; `observations.py` are the results of checks of hardware.
"""
