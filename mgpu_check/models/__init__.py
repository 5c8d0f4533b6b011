"""Examine a model: does it train in each kind of parallelism, and with each option, as on one device?

`mgpu-check model TARGET` runs the tests of this package.

1. `targets` finds the model by name and builds it small. `inputs` finds a batch that it accepts, and its loss. `traits`
   says what of it ways and options depend on. A rank does this, and returns plain data.
2. `ways` has a row for each kind of parallelism, and `training_options` a row for each option.
3. `training` makes of a way and options a training step on ranks, and its reference on one device. `examination` tries
   them with the trials of the gate, until the time has passed.
4. `test_ways` has a test for each way. `conftest` gathers the results, and `verdict` makes the table.
"""
