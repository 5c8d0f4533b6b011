"""What processes of one machine share without torch: messages, records, directories, and their ends.

A message is pickled by `pickling.py` (in a rank by `rank_pickling.py`) and sent over `channel.py`.
`collective_records.py` are what ranks have entered; `tracebacks.py` says which frames are the user's. `scratch.py`
keeps temporary files, `child_processes.py` ends processes, `environments.py` and `machine.py` say where they
run.
"""
