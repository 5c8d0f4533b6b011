"""Ranks that another program launched, on one machine or several: torchrun, srun, or whoever sets the classic variables.

Each launched process is an *agent*, which has ranks as its children; the agent of rank 0 also starts the *driver*, the
pytest process, to which all agents connect.
"""
