"""Specs: test data as frozen dataclasses of plain values.

The process that draws an example does not import torch, and the processes that use it do not import Hypothesis. So they
exchange specs. The repr of a spec is one line that rebuilds it. A spec builds its tensors where they are used, with the
same bits everywhere.
"""
