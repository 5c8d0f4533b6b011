"""How far a right result may be from the expected one, and how a wrong one differs. Of tensors alone, without ranks.

`reduction.py` bounds a single operation a priori; `perturbation.py` and `steps.py` measure a whole step by rounding it
at random. `differences.py` compares element by element, `factors.py` finds one factor that explains all, and
`placement.py` finds the slice of a whole that a rank holds.
"""
