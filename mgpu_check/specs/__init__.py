"""Test data as frozen dataclasses of plain values.

An example is drawn in a process that imports no torch, and used in processes that import no Hypothesis: what travels is a
spec. It prints as one line that rebuilds it, and makes its tensors where they are used, the same bits everywhere.
"""
