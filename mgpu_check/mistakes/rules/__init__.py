"""What may be wrong, by the evidence: each module knows the mistakes of one theme; `order` says which rule goes first."""
