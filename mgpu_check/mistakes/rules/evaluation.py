"""Mistakes that show when a trained model is asked on every rank."""

from __future__ import annotations

from mgpu_check.mistakes.evidence import Evidence
from mgpu_check.mistakes.report import Finding

__all__ = ["answers_apart", "answers_change", "buffers_apart"]


def buffers_apart(evidence: Evidence) -> Finding | None:
    """Name buffers that differ between ranks after training."""
    return Finding("buffers-drift", evidence.buffers_apart) if evidence.buffers_apart else None


def answers_change(evidence: Evidence) -> Finding | None:
    """Name an evaluation in which a rank answers otherwise when it is asked again."""
    return Finding("evaluation-differs", evidence.answers_change) if evidence.answers_change else None


def answers_apart(evidence: Evidence) -> Finding | None:
    """Name an evaluation in which ranks that have learned the same answer differently."""
    return Finding("evaluation-differs", evidence.answers_apart) if evidence.answers_apart else None
