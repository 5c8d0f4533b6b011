"""Exact data and references: what the suite and the acceptance hold results of devices against.

A case is plain data, drawn by `strategies.py`. From it, `generated_data.py` and `tensors.py` make the same values on
every device, and `batches.py` batches of them. A reference follows: in `devices/` of an operator or a copy, in
`collectives/` of a collective, in `training/` of a step or a whole training. What comes out is a result that is right
on any device, or a finding that says where and how a result is wrong.

Nothing here is a test.
"""
