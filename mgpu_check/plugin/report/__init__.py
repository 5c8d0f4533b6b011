"""What a run shows: from the errors of ranks to pytest's report, the closing table, and files.

`failures.py` formats one failure and `replay.py` the line that repeats it; `outcomes.py` keeps the facts of each test
as properties; `terminal.py` makes tables of them, and `github.py` a page and annotations.
"""
