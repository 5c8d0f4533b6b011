"""Wraps of torch: one mechanism to replace a function and put it back, and what is recorded through it.

`patches.py` replaces; `collectives.py` records each collective and its arguments by its row in `collective_table.py`.
`switches.py` finds and restores what a test has changed.
`tensors.py` and `nested.py` read tensors of all classes, wherever they are nested.
"""
