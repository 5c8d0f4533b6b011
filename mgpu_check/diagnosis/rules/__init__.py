"""Judge what may be wrong, by the evidence. Each module registers the mistakes and the rules of one theme.

`order` calls all rules, in the order of their places.
"""
