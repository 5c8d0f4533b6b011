"""Judge evidence by all rules, the most reliable first: the first finding is the likeliest cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from mgpu_check.diagnosis.evidence import Evidence, HashSeeds, Loader, Restored, UnfinishedCall
from mgpu_check.diagnosis.registry import (
    RuleOf,
    known_mistake,
    on_calls,
    on_checkpoint,
    on_epoch,
    on_evidence,
    on_hash_seeds,
    on_loader,
)
from mgpu_check.diagnosis.report import Attempts, Finding

_Evidence = TypeVar("_Evidence")

RULES = on_evidence.ordered()
RULES_OF_EPOCHS = on_epoch.ordered()


def findings_of(evidence: Evidence, most: int, attempts: Attempts) -> list[Finding]:
    """Return at most `most` mistakes, the likeliest first, without repetition.

    `attempts`: collects the rules that fail.
    """
    return distinct(_found(evidence, attempts), most)


def findings_of_calls(evidence: UnfinishedCall, most: int, attempts: Attempts) -> list[Finding]:
    """Return at most `most` mistakes that explain why ranks did not return, the likeliest first."""
    return distinct((_attempted(rule, evidence, attempts) for rule in on_calls.ordered()), most)


def findings_of_checkpoint(evidence: Restored, attempts: Attempts) -> list[Finding]:
    """Return the mistakes that explain why a resumed run differs, without repetition."""
    return distinct(_attempted(rule, evidence, attempts) for rule in on_checkpoint.ordered())


def findings_of_hash_seeds(evidence: HashSeeds) -> list[Finding]:
    """Return the mistake that shows only if hash seeds differ between ranks."""
    return distinct(rule(evidence) for rule in on_hash_seeds.ordered())


def findings_of_loader(evidence: Loader, attempts: Attempts) -> list[Finding]:
    """Return at most one mistake per epoch and one of their order, the likeliest first; a mistake may be repeated."""
    of_epochs: list[Finding] = []
    for epoch in evidence.epochs:
        of_epochs += distinct((_attempted(rule, epoch, attempts) for rule in RULES_OF_EPOCHS), 1)
    of_order = distinct(_attempted(rule, evidence, attempts) for rule in on_loader.ordered())
    # If only some ranks reshuffle, the shares of the ranks do not fit together, so the order is the cause.
    on_some = bool(evidence.epochs) and 0 < len(evidence.repeating) < len(evidence.epochs[0].counts)
    return [*of_order, *of_epochs] if on_some else [*of_epochs, *of_order]


def distinct(named: Iterable[Finding | None], most: int | None = None) -> list[Finding]:
    """Return the first finding of each mistake, in order, and at most `most` findings."""
    findings: dict[str, Finding] = {}
    for finding in named:
        if finding is not None:
            findings.setdefault(finding.mistake, finding)
        if len(findings) == most:
            break
    return list(findings.values())


def _found(evidence: Evidence, attempts: Attempts) -> Iterator[Finding | None]:
    """Yield the finding of each rule, without those that a failure at world size 1 refutes."""
    wrong_alone = evidence.tensors is not None and evidence.tensors.wrong_alone
    for rule in RULES:
        finding = _attempted(rule, evidence, attempts)
        yield None if finding is None or (wrong_alone and known_mistake(finding.mistake).of_ranks) else finding


def _attempted(rule: RuleOf[_Evidence], evidence: _Evidence, attempts: Attempts) -> Finding | None:
    label = f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"
    return attempts.of(f"the rule {label}", None, rule, evidence)
