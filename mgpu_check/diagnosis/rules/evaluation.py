"""Detect mistakes that show when every rank evaluates the trained model."""

from __future__ import annotations

from mgpu_check.diagnosis.evidence import Evidence
from mgpu_check.diagnosis.registry import Precedence, mistake, on_evidence
from mgpu_check.diagnosis.report import Finding

mistake(
    "buffers-drift",
    "buffers differ between ranks",
    "gather or reduce over all ranks what the forward pass writes to a buffer, such as the keys of a queue or a moving "
    "average; broadcast_buffers=True only copies the buffers of rank 0",
)
mistake(
    "evaluation-differs",
    "ranks give different answers in evaluation mode",
    "synchronize buffers before evaluation, and call eval() on every rank",
)


@on_evidence(Precedence.AMBIGUOUS + 40)  # before answers, which buffers may explain
def buffers_apart(evidence: Evidence) -> Finding | None:
    """Detect buffers that differ between ranks after training."""
    return Finding("buffers-drift", evidence.buffers_apart) if evidence.buffers_apart else None


@on_evidence(Precedence.AMBIGUOUS + 50)  # before answers that differ, as those of one rank that change do
def answers_change(evidence: Evidence) -> Finding | None:
    """Detect a rank whose answers change when it evaluates the same samples again."""
    return Finding("evaluation-differs", evidence.answers_change) if evidence.answers_change else None


@on_evidence(Precedence.AMBIGUOUS + 60)
def answers_apart(evidence: Evidence) -> Finding | None:
    """Detect ranks that answer differently although they have the same trained parameters."""
    return Finding("evaluation-differs", evidence.answers_apart) if evidence.answers_apart else None
