"""Code that runs in a rank or a node process: `worker.py` is its main loop, from its fork to its end.

A call passes `worker.py`, which pauses where ranks must agree, and sends the result. `devices.py` opens the devices
at the start; `state.py` and `python_hooks.py` put torch and Python back after each test. `rank.py` is what the user's
function sees.
"""
