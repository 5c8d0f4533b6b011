"""Runs whose processes a launcher started, on one machine or several: torchrun, srun, or one that sets RANK and
WORLD_SIZE.

Each launched process is an *agent*, and the ranks are its children. The agent of rank 0 also starts the *driver*, which
is the pytest process. All agents connect to the driver.
"""
