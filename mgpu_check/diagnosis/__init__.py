"""From evidence to the name of a mistake: the rules, and the report.

Gates and comparisons fill `evidence.py` from what they have recorded (`observations.py`, `tensors.py`,
`divergence.py`). `registry.py` asks the rules of `rules/` one after the other; each returns a mistake with what was
seen, or nothing. `report.py` writes the smallest case, the likely mistakes, and a row for each result.
"""
