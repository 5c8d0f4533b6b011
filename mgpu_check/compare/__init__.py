"""Run an unchanged training script on one device and on several ranks, and find the first difference.

In comes a command line; out comes a verdict (equal, differs, not comparable, undecided) and its reports.

1. `comparison.py` decides which runs are needed; `processes.py` starts each, and `process_watch.py` watches it.
2. In the script's process, `in_script/recorder.py` records each step into a trace (`trace.py`).
3. `alignment.py` pairs steps and samples, `assembly.py` puts slices together, `comparability.py` says what cannot be
   compared, `rounding.py` measures on the script how far rounding goes.
4. `first_difference.py` finds where the runs part. If data or draws differ, one device runs again with those of the
   ranks (`in_script/replay.py`).
5. `verdict.py` decides, `diagnosis.py` names mistakes, `reports.py` and `page.py` write the outcome.

`gate.py` is all of it as an assertion. `traces/` compares a recorded run with another one. `fake_data/` makes the data
that a script lacks.
"""
