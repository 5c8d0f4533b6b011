"""Judge what may be wrong, by the evidence. Each module registers the rules of one theme.

`order` has the order of all rules, and calls them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.observations import Change
from mgpu_check.diagnosis.report import Finding, RuleOf, on_evidence

_Evidence = TypeVar("_Evidence")


def says(
    mistake_name: str, register: Callable[[RuleOf[_Evidence]], RuleOf[_Evidence]]
) -> Callable[[Callable[[_Evidence], str]], RuleOf[_Evidence]]:
    """Return a decorator for a rule that returns a clause on what shows the mistake, "" if nothing does."""

    def decorate(rule: Callable[[_Evidence], str]) -> RuleOf[_Evidence]:
        @functools.wraps(rule)
        def judge(evidence: _Evidence) -> Finding | None:
            text = rule(evidence)
            return Finding(mistake_name, text) if text else None

        return register(judge)

    return decorate


def clause(mistake_name: str, observed: str) -> RuleOf[Evidence]:
    """Return and register a rule on a text field of the evidence: its clause is all that the mistake needs."""

    def rule(evidence: Evidence) -> str:
        return getattr(evidence, observed) or ""

    rule.__name__ = rule.__qualname__ = observed
    return says(mistake_name, on_evidence)(rule)


def on_change(*kinds: str) -> Callable[[Callable[[Change], Finding]], Callable[[Change], Finding]]:
    """Return a decorator for a rule on a change of one call, of these kinds, with which the step is right."""

    def decorate(rule: Callable[[Change], Finding]) -> Callable[[Change], Finding]:
        @functools.wraps(rule)
        def judge(evidence: Evidence) -> Finding | None:
            change = None if evidence.tensors is None else evidence.tensors.right_with(*kinds)
            return None if change is None else replace(rule(change), confirmed=True)

        return on_evidence.register(rule, judge)

    return decorate
