"""The packaged suite: a folder for each property, with its tests, cases, strategies, checks and planted faults.

A test draws a case in the pytest process and sends it to ranks or to the node process, where a check builds the
tensors, runs torch, and compares with `mgpu_check.oracles`. `common/faults/` plants the faults that prove each test;
`recipes/` is code for several devices as people write it.
"""
