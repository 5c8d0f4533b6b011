"""Wraps of torch: one mechanism to replace a function and put it back, and what is recorded through it.

`patches.py` replaces; `collectives.py` records each collective by its row in `collective_table.py`, with the arguments
that `collective_arguments.py` reads. `module_objects.py` and `switches.py` find and restore what a test has changed.
`tensors.py` and `nested.py` read tensors of all classes, wherever they are nested.
"""
