"""Exact data and references: what the suite and the acceptance hold results of devices against.

A case (`*_cases.py`, drawn by `strategies.py`) is plain data. From it, `generated_data.py` and `tensors.py` make the
same values on every device, and `models.py` the same model. A reference follows: `operations.py`, `products.py` and
`elements.py` judge one operator by algebra or by the standard of floating point; `repeated_calls.py` a collective;
`reference_training.py`, `training_steps.py` and `gradients.py` a step of training. What comes out is a result that is
right on any device, or a finding that says where and how a result is wrong.

Nothing here needs more than one device, and nothing here is a test.
"""
