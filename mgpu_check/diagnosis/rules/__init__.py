"""Judge what may be wrong, by the evidence. Each module registers the mistakes and the rules of one theme.

`order` has the order of all rules, and calls them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.observations import Change
from mgpu_check.diagnosis.report import Finding, RuleOf, on_evidence


def clause(mistake_name: str, observed: str) -> RuleOf[Evidence]:
    """Return and register a rule on a text field of the evidence: its clause is all that the mistake needs."""

    def judge(evidence: Evidence) -> Finding | None:
        text = getattr(evidence, observed)
        return Finding(mistake_name, text) if text else None

    judge.__name__ = judge.__qualname__ = observed
    return on_evidence(judge)


def on_change(*kinds: str) -> Callable[[Callable[[Change], Finding]], Callable[[Change], Finding]]:
    """Return a decorator for a rule on a change of one call, of these kinds, with which the step is right."""

    def decorate(rule: Callable[[Change], Finding]) -> Callable[[Change], Finding]:
        @functools.wraps(rule)
        def judge(evidence: Evidence) -> Finding | None:
            change = None if evidence.tensors is None else evidence.tensors.right_with(*kinds)
            return None if change is None else replace(rule(change), confirmed=True)

        return on_evidence.register(rule, judge)

    return decorate
