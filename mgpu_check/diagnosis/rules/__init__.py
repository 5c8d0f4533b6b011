"""Judge what may be wrong, by the evidence: each module knows the mistakes of one theme; `order` lists which rule goes
first.
"""
