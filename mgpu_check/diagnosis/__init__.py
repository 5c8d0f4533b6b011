"""From evidence to the name of a mistake: the rules, and the report.

Gates and comparisons fill `evidence.py` from what they have recorded (`observations.py`, `tensors.py`,
`divergence.py`). `rules/order.py` asks the rules one after the other; each returns a mistake with what was seen, or
nothing. ``mistakes.toml`` is the table of mistakes. `report.py` registers the rules, and writes the smallest case, the
likely mistakes, and a row for each result.
"""
